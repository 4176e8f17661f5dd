"""Checkpoints at segment boundaries; the inside of a segment is recomputed once.

The forward keeps the checkpoints only (and everything of the last segment, whose
backward follows at once). When the backward of a segment comes, its forward runs again
from its checkpoint and keeps what the backward reads. This is what frameworks offer as
"activation checkpointing" of blocks. With L stages of one size and segments of k stages
the peak is about L / k + k, least at k = sqrt(L), for less than one more forward.

Source: T. Chen, B. Xu, C. Zhang, C. Guestrin, "Training Deep Nets with Sublinear Memory
Cost", 2016, arXiv:1604.06174. Not modelled: their per-segment budget that makes
segments of unequal length for unequal layers, and their recursion inside segments
(`gcpass.solvers.classics.revolve` is the optimum of that).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

from gcpass.solvers.classics.choose import cheapest, cheapest_of
from gcpass.solvers.classics.stages import Move, Stages, emit_schedule, stages_of
from gcpass.solvers.errors import SolverError
from gcpass.solvers.problem import Plan, Problem, Solution
from gcpass.solvers.turn import Turned, turned


def per_segment(problem: Problem, budget_bytes: int | None) -> Solution:
    """Return the cheapest plan with segments of equal length that fits the budget.

    One segment stores everything; then two, three, ... up to one per stage.

    Raises:
        SolverError: the constraints exclude every plan.
    """
    step = turned(problem)
    stages = stages_of(step)

    def with_segments(position: int) -> Plan:
        ends = _even(len(stages), position + 1)
        return _plan(step, stages, ends, "per segment")

    return cheapest(problem, with_segments, len(stages), budget_bytes)


def sqrt_l(problem: Problem, budget_bytes: int | None) -> Solution:
    """Return the plan with about sqrt(L) segments, INFEASIBLE when it does not fit.

    Raises:
        SolverError: the constraints exclude every plan.
    """
    step = turned(problem)
    stages = stages_of(step)
    count = max(1, round(math.sqrt(len(stages))))
    plan = _plan(step, stages, _even(len(stages), count), "sqrt(L)")
    return cheapest_of(problem, (plan,), budget_bytes)


def at_boundaries(problem: Problem, boundaries: Sequence[int]) -> Plan:
    """Return the plan with checkpoints before the given stages.

    Args:
        problem: the problem.
        boundaries: stages of `gcpass.solvers.classics.stages.stages_of`, ascending,
            larger than 0 and smaller than their number; empty: one segment.

    Raises:
        SolverError: no such stages, or the constraints exclude every plan.
    """
    step = turned(problem)
    stages = stages_of(step)
    ends = (0, *boundaries, len(stages))
    if any(a >= b for a, b in pairwise(ends)):
        raise SolverError(
            f"boundaries {tuple(boundaries)}: must ascend between 1 and "
            f"{len(stages) - 1}, the problem has {len(stages)} stages"
        )
    return _plan(step, stages, ends, "per segment")


def _plan(step: Turned, stages: Stages, ends: Sequence[int], origin: str) -> Plan:
    return emit_schedule(step, stages, _moves(ends), origin)


def _moves(ends: Sequence[int]) -> Iterator[Move]:
    yield from (Move(stage) for stage in range(ends[-1]))
    for first, end in reversed(list(pairwise(ends))):
        if end < ends[-1]:
            yield from (Move(stage) for stage in range(first, end))
        yield from (Move(stage, back=True) for stage in range(end - 1, first - 1, -1))


def _even(length: int, segments: int) -> tuple[int, ...]:
    """Return the ends of segments whose lengths differ by one at most."""
    return tuple(i * length // segments for i in range(segments + 1))
