"""Bounds never exceed what exact search or enumeration reach; cuts are minimum cuts."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest

from gcpass.solvers.bound import (
    Bound,
    choose_pivots,
    floor_lower_bound_bytes,
    given_order,
    lower_bound_seconds,
)
from gcpass.solvers.cut import CutProblem, boundary_cut, cut
from gcpass.solvers.frontier import frontier
from gcpass.solvers.liveness import simulate
from gcpass.solvers.moment import needed_operations
from gcpass.solvers.problem import OpId, Origin, Phase, Problem, ValueId
from tests.exact import optimum_seconds, pareto
from tests.problems import Builder, chain, random_problem, transformer

EPSILON = 1e-6  # seconds; costs of the random problems are whole numbers


def _bound(problem: Problem, budget_bytes: int) -> Bound:
    everywhere = [OpId(i) for i in range(len(problem.operations))]
    return lower_bound_seconds(problem, budget_bytes, everywhere)


def _peak(problem: Problem) -> int:
    return simulate(problem, *given_order(problem)).peak_bytes


@pytest.mark.parametrize(
    ("budget", "optimum", "bound"),
    [(5, 8.0, 8.0), (4, 9.0, 9.0), (3, 11.0, 10.0), (2, None, None)],
)
def test_chain_of_four(budget: int, optimum: float | None, bound: float | None) -> None:
    """Values a1..a4 of one byte, gradients g4..g0; every execution takes a second.

    When backward layer 3 runs first it reads a3 and g4 and writes g3: 3 bytes. Under 3
    nothing fits. With everything saved a1 and a2 are alive, too: 5 bytes, 8 seconds.
    Budget 4: one of a1 and a2 is dead then and runs again, so 9; reached by saving a1
    and rebuilding a2 from it (a1 a2 g3, then a1 a2 g3 g2: 4 bytes). Budget 3: both are
    dead, so at least 10. a2 is needed first, with g3 and g2 next to it, which fills
    the budget: a1, built on the way to a2, dies and is built once more, so 11.
    """
    problem = chain(4, 1, 1.0)
    assert optimum_seconds(problem, budget) == optimum
    proven = _bound(problem, budget)
    assert proven.infeasible_proven is (optimum is None)
    assert floor_lower_bound_bytes(problem) == 3
    if bound is not None:
        assert proven.seconds == pytest.approx(bound, abs=EPSILON)


@pytest.mark.parametrize("seed", range(150))
def test_bound_is_below_the_optimum(seed: int) -> None:
    problem = random_problem(seed, 6 + seed % 3)
    peak, floor = _peak(problem), floor_lower_bound_bytes(problem)
    for budget in sorted({max(0, peak - cut_off) for cut_off in (0, 1, 3, 6)}):
        optimum = optimum_seconds(problem, budget)
        if optimum is None:
            continue
        assert floor <= budget
        proven = _bound(problem, budget)
        assert not proven.infeasible_proven
        assert proven.seconds <= optimum + EPSILON


def test_bound_sees_most_shortages() -> None:
    positive, reached = 0, 0
    for seed in range(150):
        problem = random_problem(seed, 6)
        budget = _peak(problem) - 2
        optimum = optimum_seconds(problem, budget)
        once = _bound(problem, 1 << 40).seconds
        if optimum is not None and optimum > once + EPSILON:
            positive += 1
            reached += _bound(problem, budget).seconds > once + EPSILON
    assert positive >= 15
    assert reached >= positive // 2


@pytest.mark.parametrize("seed", range(100))
def test_bound_is_below_every_enumerated_plan_with_fusion(seed: int) -> None:
    problem = random_problem(seed, 4 + seed % 3, fused=True)
    floor = floor_lower_bound_bytes(problem)
    for peak, (seconds, _, _) in sorted(pareto(problem, 2, 800).items()):
        proven = _bound(problem, peak)
        assert floor <= peak
        assert not proven.infeasible_proven
        assert proven.seconds <= seconds + EPSILON


@pytest.mark.parametrize("fused", [False, True])
def test_more_memory_never_raises_the_bound(fused: bool) -> None:
    problem = transformer(6, fused=fused)
    peak = _peak(problem)
    found = [lower_bound_seconds(problem, peak * k // 10) for k in range(1, 11)]
    assert all(a.seconds >= b.seconds for a, b in itertools.pairwise(found))
    assert found[0].seconds > 1.2 * found[-1].seconds
    assert found == [lower_bound_seconds(problem, peak * k // 10) for k in range(1, 11)]


def test_scaling_costs_and_sizes_scales_the_bound() -> None:
    problem = transformer(4)
    scaled = dataclasses.replace(
        problem,
        operations=tuple(
            dataclasses.replace(op, cost_seconds=8 * op.cost_seconds)
            for op in problem.operations
        ),
        values=tuple(
            dataclasses.replace(value, size_bytes=3 * value.size_bytes)
            for value in problem.values
        ),
    )
    budget = _peak(problem) // 2
    expected = 8 * lower_bound_seconds(problem, budget).seconds
    assert lower_bound_seconds(scaled, 3 * budget).seconds == pytest.approx(expected)


def test_what_cannot_be_recomputed_raises_the_floor() -> None:
    # The draw of 100 bytes is needed by the last backward operation and cannot be
    # repeated, so it is alive while the first one has its 7 + 5 bytes.
    b = Builder()
    x, draw, y = b.value(1, Origin.INPUT), b.value(100), b.value(7)
    b.run([x], [draw], 1.0, recomputable=False)
    b.run([draw], [y], 1.0)
    g, late = b.value(5), b.value(1, held=True)
    b.run([y], [g], 1.0, Phase.BACKWARD)
    b.run([g, draw], [late], 1.0, Phase.BACKWARD)
    problem = b.problem()
    assert floor_lower_bound_bytes(problem) == 112
    assert lower_bound_seconds(problem, 111).infeasible_proven
    assert not lower_bound_seconds(problem, 112).infeasible_proven


@pytest.mark.parametrize("savable", [True, False])
def test_a_value_rebuilt_early_in_the_backward(savable: bool) -> None:
    """Two values of 5 bytes, 5 seconds each to save, are rebuilt together in 1 second.

    Their source of 100 bytes cannot be drawn again and does not fit next to the 100
    bytes of workspace that follow, so they are rebuilt before and kept: 112 bytes with
    tangent, gradient and source, 112 with two gradients and workspace. One second more
    than the 5 of one execution each; charging it for both values would be wrong, and
    so would be charging what saving them takes.
    """
    b = Builder()
    draw, one, two, g1, g2 = (
        b.value(100),
        b.value(5, savable=savable),
        b.value(5, savable=savable),
        b.value(1),
        b.value(1),
    )
    back = Phase.BACKWARD
    b.run([b.value(1, Origin.INPUT)], [draw], 1.0, recomputable=False)
    b.run([draw], [one, two], 1.0, fusible=True)
    b.run([draw, b.value(1, Origin.TANGENT)], [g1], 1.0, back)
    b.run([g1], [g2], 1.0, back, workspace_bytes=100)
    b.run([g2, one, two], [b.value(1, held=True)], 1.0, back)
    problem = b.problem(1.0)
    plan = simulate(problem, [OpId(i) for i in (0, 1, 1, 2, 3, 4)], 2)
    assert (plan.peak_bytes, plan.cost_seconds) == (112, 6.0)
    proven = _bound(problem, 112)
    assert proven.seconds == pytest.approx(6.0, abs=EPSILON)
    assert not proven.infeasible_proven
    assert lower_bound_seconds(problem, 111).infeasible_proven


def test_what_may_neither_be_saved_nor_recomputed_has_no_plan() -> None:
    b = Builder()
    draw = b.value(1, savable=False)
    b.run([b.value(1, Origin.INPUT)], [draw], 1.0, recomputable=False)
    b.run([draw], [b.value(1, held=True)], 1.0, Phase.BACKWARD)
    assert boundary_cut(b.problem()).fastest() is None
    assert frontier(boundary_cut(b.problem())) == []
    assert lower_bound_seconds(b.problem(), 1 << 40).infeasible_proven


def test_needed_operations_leave_out_what_nobody_reads() -> None:
    b = Builder()
    x = b.value(1, Origin.INPUT)
    used, unused = b.value(1), b.value(1)
    b.run([x], [used], 1.0, Phase.EITHER)
    b.run([used], [unused], 64.0, Phase.EITHER)
    b.run([used], [b.value(1, held=True)], 1.0, Phase.BACKWARD)
    assert needed_operations(b.problem()) == {0, 2}
    assert given_order(b.problem()) == ((0, 2), 0)
    assert lower_bound_seconds(b.problem(), 10, [OpId(1)]).seconds == 2.0


def test_an_empty_problem() -> None:
    empty = Problem(operations=(), values=())
    assert lower_bound_seconds(empty, 0) == Bound(
        seconds=0.0, infeasible_proven=False, pivot=None
    )
    assert floor_lower_bound_bytes(empty) == 0
    assert choose_pivots(empty, 4) == ()


def test_pivots_are_distinct_and_materialize_something() -> None:
    problem = transformer(6, fused=True)
    pivots = choose_pivots(problem, 16)
    assert len(set(pivots)) == 16
    readers = problem.readers()
    for op in pivots:  # not absorbed by all that read it
        data = problem.operations[op]
        reading = [o for v in data.writes for o in readers[v]]
        absorbed = all(problem.operations[o].absorbing for o in reading)
        held = any(problem.values[v].held for v in data.writes)
        assert not data.fusible or not absorbed or not reading or held


def _cheapest(problem: Problem, network: CutProblem, lam: float) -> float:
    """Return the least price over all sets of operations to recompute."""
    moment, best = network.moment, math.inf
    for count in range(len(network.operations) + 1):
        for again in itertools.combinations(network.operations, count):
            saved: set[ValueId] = set(moment.required)
            for op in again:
                saved.update(problem.operations[op].reads)
            for op in again:
                saved.difference_update(problem.operations[op].writes)
            saved.difference_update(moment.free)
            seconds = sum(moment.costs[op] for op in again)
            for value in saved:
                size = problem.values[value].size_bytes
                seconds += moment.tolls[value] + lam * size
            best = min(best, seconds)
    return best


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("seed", range(25))
def test_a_cut_is_the_cheapest_choice(seed: int, fused: bool) -> None:
    problem = random_problem(seed, 9, fused=fused)
    networks = [boundary_cut(problem)]
    networks += [cut(problem, op) for op in choose_pivots(problem, 4)]
    for network, lam in itertools.product(networks, (0.0, 0.3, 1.0, 7.0)):
        best, found = _cheapest(problem, network, lam), network.solve(lam)
        if found is None:
            assert best == math.inf
            continue
        price = found.cost_seconds + lam * found.saved_bytes
        assert price == pytest.approx(best, abs=EPSILON)
        assert found.dual_seconds == pytest.approx(best, abs=EPSILON)
        assert found.dual_seconds <= best + 1e-9


def test_fastest_and_least_break_ties() -> None:
    # Saving y (9 bytes) or its source z (1 byte): rebuilding y from z is free.
    b = Builder()
    z, y = b.value(1), b.value(9)
    b.run([b.value(1, Origin.INPUT)], [z], 2.0)
    b.run([z], [y], 0.0)
    b.run([y, b.value(1, Origin.TANGENT)], [b.value(1, held=True)], 1.0, Phase.BACKWARD)
    network = boundary_cut(b.problem())
    fastest, least = network.fastest(), network.least()
    assert fastest is not None
    assert least is not None
    assert (fastest.saved, fastest.recomputed) == ((z,), (1,))
    assert (least.saved, least.recomputed, least.cost_seconds) == ((), (0, 1), 2.0)
    assert fastest.saved_bytes == 1


@pytest.mark.parametrize("fused", [False, True])
def test_frontier_is_convex_and_repeatable(fused: bool) -> None:
    problem = transformer(5, fused=fused)
    found = frontier(boundary_cut(problem))
    assert len(found) >= 4
    slopes = [
        (b.cost_seconds - a.cost_seconds) / (a.saved_bytes - b.saved_bytes)
        for a, b in itertools.pairwise(found)
    ]
    assert all(slope > 0 for slope in slopes)
    assert slopes == sorted(slopes)
    assert found == frontier(boundary_cut(problem))
    middle = found[2].saved_bytes
    near = frontier(boundary_cut(problem), cap_lo=middle - 1, cap_hi=middle + 1)
    assert found[2] in near
