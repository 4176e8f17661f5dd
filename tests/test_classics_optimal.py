"""Optima of the literature: Chen's segments, Revolve, rotor, Checkmate."""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from gcpass.solvers.bound import lower_bound_seconds
from gcpass.solvers.check import check
from gcpass.solvers.classics.checkmate import checkmate
from gcpass.solvers.classics.revolve import fewest_steps, revolve
from gcpass.solvers.classics.rotor import rotor, tables_of
from gcpass.solvers.classics.segments import at_boundaries, per_segment, sqrt_l
from gcpass.solvers.classics.stages import emit_schedule, stages_of
from gcpass.solvers.errors import SolverError
from gcpass.solvers.liveness import simulate
from gcpass.solvers.problem import (
    OpId,
    Origin,
    Phase,
    Plan,
    Problem,
    Solution,
    Termination,
)
from gcpass.solvers.turn import turned
from tests.fixed_order import fixed_order_optimum
from tests.problems import Builder, chain, random_problem


def _plan(solution: Solution) -> Plan:
    assert solution.plan is not None
    return solution.plan


# --- segments ---------------------------------------------------------------------


def test_one_checkpoint_in_the_middle() -> None:
    """a_4 of a chain of 8; the backward reads a_7 ... a_0 (a_0 is an input).

    At the end of the forward a_4 ... a_7 are alive, with the gradient that arrives and
    the one it becomes: 6. Then a_1, a_2, a_3 are computed again: 3 seconds.
    """
    plan = at_boundaries(chain(8, 1, 1.0), [4])
    check(chain(8, 1, 1.0), plan, 6)
    assert (plan.cost_seconds, plan.peak_bytes) == (19.0, 6)
    for wrong in ([0], [8], [5, 5], [5, 3]):
        with pytest.raises(SolverError, match="8 stages"):
            at_boundaries(chain(8, 1, 1.0), wrong)


@pytest.mark.parametrize("root", [4, 8, 16])
def test_sqrt_of_a_chain(root: int) -> None:
    """With L = root^2 stages: root segments of root stages.

    In the forward's end: root - 1 checkpoints, root - 1 values inside the last segment,
    two gradients: 2 root. Each of the other root - 1 segments runs root - 1 operations
    again (its last result is the next checkpoint).
    """
    length = root * root
    plan = _plan(sqrt_l(chain(length, 1, 1.0), None))
    assert plan.peak_bytes == 2 * root
    assert plan.cost_seconds == 2 * length + (root - 1) ** 2


def test_per_segment_takes_the_longest_segments_that_fit() -> None:
    """Two segments of 8 in a chain of 16: 1 + 7 + 2 bytes and 7 seconds, by hand.

    A budget of 10 excludes one segment (17 bytes) and all that is cheaper.
    """
    plan = _plan(per_segment(chain(16, 1, 1.0), 10))
    assert (plan.cost_seconds, plan.peak_bytes) == (39.0, 10)
    assert _plan(per_segment(chain(16, 1, 1.0), 17)).cost_seconds == 32.0


# --- Revolve ----------------------------------------------------------------------


@functools.cache
def _steps(length: int, slots: int) -> int:
    """Return the fewest forward steps by the recursion itself, without a closed form.

    One stage needs none; with one slot the state runs from the start for each stage.
    """
    if length == 1:
        return 0
    if slots == 1:
        return length * (length - 1) // 2
    return min(
        keep + _steps(length - keep, slots - 1) + _steps(keep, slots)
        for keep in range(1, length)
    )


def test_closed_form_is_the_recursion() -> None:
    """Griewank's example: 10 stages and 3 slots take 15 steps, 2 * 10 - C(5, 4)."""
    assert fewest_steps(10, 3) == 15
    for length in range(1, 30):
        for slots in range(1, length + 1):
            assert fewest_steps(length, slots) == _steps(length, slots)


@pytest.mark.parametrize("length", [10, 16, 23])
def test_revolve_takes_the_fewest_steps(length: int) -> None:
    """c slots are the input (free) and c - 1 states; a step needs 3 bytes more.

    These are what it reads, what it writes and a gradient: c + 2 bytes. Besides the
    steps the forward runs its last operation once, and the backward all of its own.
    """
    for slots in range(1, length - 1):
        plan = _plan(revolve(chain(length, 1, 1.0), slots + 2))
        assert plan.peak_bytes == slots + 2
        assert plan.cost_seconds == _steps(length, slots) + 1 + length


# --- rotor ------------------------------------------------------------------------


def test_rotor_is_revolve_on_uniform_chains() -> None:
    """Revolve is optimal there and persistent."""
    for budget in range(3, 18):
        ours = _plan(rotor(chain(16, 1, 1.0), budget))
        assert (
            ours.cost_seconds == _plan(revolve(chain(16, 1, 1.0), budget)).cost_seconds
        )


def _taped_chain(rng: random.Random, layers: int, gradients: int = 9) -> Problem:
    """Return a chain where stage i writes a_i+1 and z_i; B_i reads a_i and z_i."""
    b = Builder()
    states = [b.value(rng.randint(1, 9), Origin.INPUT)]
    tapes = []
    for _ in range(layers):
        states.append(b.value(rng.randint(1, 9)))
        tapes.append(b.value(rng.randint(1, 9)))
        writes = [states[-1], tapes[-1]]
        b.run(states[-2:-1], writes, float(rng.randint(1, 9)))
    gradient = b.value(rng.randint(1, gradients), Origin.TANGENT)
    for i in reversed(range(layers)):
        new = b.value(rng.randint(1, gradients), held=i == 0)
        b.run([states[i], tapes[i], gradient], [new], 1.0, Phase.BACKWARD)
        gradient = new
    return b.problem()


def _persistent(s: int, t: int, top: int) -> Iterator[tuple[int, ...]]:
    """Yield every persistent schedule of stages s ... t, in numbers of operations."""
    back = 2 * top + 1 - s  # the number of B_s
    if s == t:
        yield (s, back)
        return
    for inner in _persistent(s + 1, t, top):
        yield (s, *inner, back)
    for behind in range(s + 1, t + 1):
        ahead = tuple(range(s, behind))
        right = _persistent(behind, t, top)
        for first, second in itertools.product(
            right, list(_persistent(s, behind - 1, top))
        ):
            yield (*ahead, *first, *second)


def test_the_chain_model_is_exact() -> None:
    """The fewest slots for a cost are the simulated peak of the schedule behind it.

    A slot is a byte here. Gradients are large, so that they take part in peaks.
    """
    for seed in range(6):
        problem = _taped_chain(random.Random(seed), 7, gradients=20)
        problem = replace(problem, between_bytes=30 * (seed % 2))
        step = turned(problem)
        stages = stages_of(step)
        stored = _plan(rotor(problem, None))
        tables = tables_of(problem, stages, stored)
        assert tables.unit == 1
        for m in tables.levels():
            plan = emit_schedule(step, stages, tables.schedule(0, 6, m), "test")
            assert plan.peak_bytes == m
            back = 7.0  # of one second each
            assert plan.cost_seconds == tables.cost[0, -1, m] + back


@pytest.mark.parametrize("seed", range(8))
def test_rotor_is_the_best_persistent_schedule(seed: int) -> None:
    problem = _taped_chain(random.Random(seed), 5)
    prices: dict[int, float] = {}
    for schedule in _persistent(0, 4, 4):
        profile = simulate(problem, [OpId(o) for o in schedule], 5)
        peak = profile.peak_bytes
        prices[peak] = min(profile.cost_seconds, prices.get(peak, math.inf))
    assert rotor(problem, None).floor_bytes == min(prices)
    for budget in range(min(prices), max(prices) + 1):
        best = min(cost for peak, cost in prices.items() if peak <= budget)
        assert _plan(rotor(problem, budget)).cost_seconds == best


def test_rotor_rounds_up() -> None:
    """Bytes that are no multiple of a slot: budgets are kept, little is lost."""
    problem = chain(16, 1_000_003, 1.0)
    for slots in range(1, 15):
        budget = (slots + 2) * 1_000_003
        plan = _plan(rotor(problem, budget))
        check(problem, plan, budget)
        assert plan.cost_seconds == _steps(16, slots) + 17


# --- Checkmate --------------------------------------------------------------------


def test_checkmate_is_the_optimum_of_the_given_order() -> None:
    """Against Dijkstra over the same class of plans, at every budget."""
    compared = different = 0
    forward = [random_problem(seed, 6) for seed in range(10)]
    more = (random_problem(seed, 6) for seed in range(10, 40))
    forward += [p for p in more if any(op.workspace_bytes for op in p.operations)][:3]
    plain = [
        replace(p, operations=tuple(replace(o, phase=Phase.BACKWARD) for o in ops))
        for p in forward
        if (ops := p.operations)
    ]
    for problem in (*forward, *plain):
        try:
            floor = checkmate(problem, None).floor_bytes
        except SolverError:
            continue
        once = sum(op.cost_seconds for op in problem.operations)
        assert fixed_order_optimum(problem, floor - 1) is None
        for budget in (floor, floor + 3):
            solution = checkmate(problem, budget)
            assert solution.termination is Termination.OPTIMAL
            cost = _plan(solution).cost_seconds
            best = fixed_order_optimum(problem, budget)
            assert cost == pytest.approx(best)
            compared += 1
            different += cost > once
            assert lower_bound_seconds(problem, budget).seconds <= cost + 1e-9
    assert compared >= 25
    assert different >= 8  # recomputation was necessary


def test_checkmate_is_optimal_on_chains() -> None:
    """Three slots for a uniform chain of 8 take 5 bytes, see Revolve."""
    solution = checkmate(chain(8, 1, 1.0), 5)
    assert solution.termination is Termination.OPTIMAL
    assert _plan(solution).cost_seconds == _steps(8, 3) + 1 + 8


def test_checkmate_refuses_what_is_too_large() -> None:
    with pytest.raises(SolverError, match="up to 60"):
        checkmate(chain(31, 1, 1.0), 100)


def test_checkmate_counts_workspace() -> None:
    """x and y, 4 and 3 bytes; the backward of y needs 5 more while x waits: 12 bytes.

    With 11, x cannot wait and is computed again, 5 seconds.
    """
    b = Builder()
    x, y = b.value(4), b.value(3)
    tangent = b.value(0, Origin.TANGENT)
    b.run([], [x], 5.0)
    b.run([], [y], 4.0)
    b.run([y, tangent], [], 1.0, Phase.BACKWARD, workspace_bytes=5)
    b.run([x, tangent], [], 1.0, Phase.BACKWARD)
    assert _plan(checkmate(b.problem(), 12)).cost_seconds == 11.0
    assert _plan(checkmate(b.problem(), 11)).cost_seconds == 16.0
