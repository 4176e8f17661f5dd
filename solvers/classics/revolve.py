"""Binomial checkpointing: the fewest forward steps on a uniform chain.

With c slots for states (the chain's input is one of them) and no state used for more
than r sweeps, a chain of up to beta(c, r) = C(c + r, c) stages can be reversed, and one
of l stages, beta(c, r - 1) < l <= beta(c, r), takes at least

    t(l, c) = r * l - beta(c + 1, r - 1)

forward steps besides the one that writes the tape of each stage. The recursion that
reaches it: keep a state k stages on, reverse the rest with one slot less, then the
first k with all slots; t(l, c) = min over k of k + t(l - k, c - 1) + t(k, c).

Source: A. Griewank, A. Walther, "Algorithm 799: Revolve: an implementation of
checkpointing for the reverse or adjoint mode of computational differentiation", ACM
TOMS 26(1), 2000, doi:10.1145/347837.347846; A. Griewank, "Achieving
logarithmic growth of temporal and spatial complexity in reverse automatic
differentiation", 1992, doi:10.1080/10556789208805505. Not modelled: stages of unequal
time or size; they are used as they are, and the number of slots is chosen by the
simulated peak. Optimal there: `gcpass.solvers.classics.rotor`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from math import comb

from gcpass.solvers.classics.choose import Knob, cheapest
from gcpass.solvers.classics.stages import Move, emit_schedule, stages_of
from gcpass.solvers.problem import Plan, Problem, Solution
from gcpass.solvers.turn import turned

MOST_STAGES = 128  # with one slot a chain of l takes l * l / 2 steps


def revolve(problem: Problem, budget_bytes: int | None) -> Solution:
    """Return the binomial schedule with the most slots whose peak fits the budget.

    Raises:
        SolverError: the constraints exclude every plan.
    """
    return cheapest(problem, *by_slots(problem), budget_bytes)


def by_slots(problem: Problem) -> tuple[Knob, int]:
    """Return what builds the plan for ever fewer slots, and for how many numbers.

    Raises:
        SolverError: see `revolve`.
    """
    step = turned(problem)
    stages = stages_of(step, MOST_STAGES)
    length = len(stages)

    def with_fewer_slots(position: int) -> Plan:
        moves = _reversal(0, length, length - position)
        return emit_schedule(step, stages, moves, "revolve")

    return with_fewer_slots, length


def fewest_steps(length: int, slots: int) -> int:
    """Return t(length, slots), see the module docstring; both at least 1."""
    repeats = 0
    while comb(slots + repeats, slots) < length:
        repeats += 1
    return repeats * length - (comb(slots + repeats, slots + 1) if repeats else 0)


def _reversal(first: int, length: int, slots: int) -> Iterator[Move]:
    """Yield the moves that reverse stages [first, first + length)."""
    while length > 1:
        keep = _first_checkpoint(length, slots)
        yield from (Move(stage) for stage in range(first, first + keep))
        yield from _reversal(first + keep, length - keep, max(1, slots - 1))
        length = keep
    yield Move(first)
    yield Move(first, back=True)


@cache
def _first_checkpoint(length: int, slots: int) -> int:
    """Return how far on the next state is kept; with one slot: at the last stage."""
    if slots == 1:
        return length - 1

    def steps(keep: int) -> int:
        return keep + fewest_steps(length - keep, slots - 1) + fewest_steps(keep, slots)

    return min(range(1, length), key=steps)
