"""The classic methods: valid on everything, optimal where the literature says so."""

from __future__ import annotations

import ast
import itertools
import math
from dataclasses import replace
from pathlib import Path

import pytest

from gcpass.solvers.check import check
from gcpass.solvers.classics import METHODS
from gcpass.solvers.classics.fixed import min_cut, store_everything
from gcpass.solvers.classics.greedy import greedy
from gcpass.solvers.classics.knapsack import knapsack, knapsack_of, saving_bytes
from gcpass.solvers.classics.stages import stages_of
from gcpass.solvers.cut import boundary_cut
from gcpass.solvers.errors import SolverError
from gcpass.solvers.problem import (
    OpId,
    Origin,
    Phase,
    Plan,
    Problem,
    Solution,
    Termination,
)
from gcpass.solvers.turn import turn, turned
from tests.exact import optimum_seconds
from tests.problems import Builder, chain, random_problem, transformer

CLASSICS = Path(__file__).parents[1] / "solvers" / "classics"


def _plain(problem: Problem) -> Problem:
    """Return the same graph as one plain sequence."""
    ops = (replace(op, phase=Phase.BACKWARD) for op in problem.operations)
    return replace(problem, operations=tuple(ops))


def _plenty(problem: Problem) -> int:
    """Return bytes that suffice for every value at once."""
    sizes = sum(v.size_bytes for v in problem.values)
    workspace = max((op.workspace_bytes for op in problem.operations), default=0)
    return sizes + workspace + problem.between_bytes


def _plan(solution: Solution) -> Plan:
    assert solution.plan is not None
    return solution.plan


def _is_hopeless(problem: Problem) -> bool:
    """Return whether the backward needs what can be neither saved nor recomputed."""
    return boundary_cut(turned(problem).training).fastest() is None


def _small_problems() -> list[Problem]:
    problems = [random_problem(seed, 6) for seed in range(9)]
    return problems + [_plain(p) for p in problems]


# --- every method -----------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(METHODS))
def test_plans_are_valid_and_keep_budgets(name: str) -> None:
    """What `check` accepts, at budgets between the floor and the most ever needed."""
    small = name == "checkmate"
    built = 0
    for seed in range(4 if small else 8):
        for plain, fused in itertools.product((False, True), repeat=2):
            problem = random_problem(seed, 6 if small else 20, fused=fused)
            problem = _plain(problem) if plain else problem
            if _is_hopeless(problem):
                continue
            unlimited = METHODS[name](problem, None)
            most, floor = _plan(unlimited).peak_bytes, unlimited.floor_bytes
            assert floor <= most
            for budget in (floor, (floor + most) // 2, most):
                plan = _plan(METHODS[name](problem, budget))
                check(problem, plan, budget)
                assert not plain or plan.boundary == 0
                built += 1
    assert built >= 36


@pytest.mark.parametrize("name", sorted(METHODS))
def test_below_the_floor_it_says_infeasible(name: str) -> None:
    for problem in (chain(5, 10, 1.0), _plain(chain(5, 10, 1.0))):
        floor = METHODS[name](problem, None).floor_bytes
        solution = METHODS[name](problem, floor - 1)
        assert solution.termination is Termination.INFEASIBLE
        assert solution.plan is None
        assert solution.floor_bytes == floor


@pytest.mark.parametrize("name", sorted(METHODS))
def test_no_plan_beats_the_exact_optimum(name: str) -> None:
    """Nor a bound: what is called optimal is (for Checkmate see below)."""
    compared = 0
    for problem in _small_problems():
        if optimum_seconds(problem, _plenty(problem)) is None:
            with pytest.raises(SolverError):
                METHODS[name](problem, None)
            continue
        floor = METHODS[name](problem, None).floor_bytes
        assert optimum_seconds(problem, floor) is not None
        for budget in (floor, floor + 4):
            solution = METHODS[name](problem, budget)
            optimum = optimum_seconds(problem, budget)
            assert optimum is not None
            cost = _plan(solution).cost_seconds
            assert solution.bound_seconds <= optimum + 1e-9
            assert optimum <= cost + 1e-9
            if solution.termination is Termination.OPTIMAL and name != "checkmate":
                assert cost == pytest.approx(optimum)
            compared += 1
    assert compared >= 24


@pytest.mark.parametrize("name", sorted(set(METHODS) - {"checkmate"}))
def test_a_larger_budget_never_costs_more(name: str) -> None:
    problem = transformer(4)
    costs = []
    top = _plan(store_everything(problem, None)).peak_bytes
    for percent in range(100, 9, -10):
        plan = METHODS[name](problem, top * percent // 100).plan
        costs.append(math.inf if plan is None else plan.cost_seconds)
    assert costs == sorted(costs)
    assert costs[0] < math.inf


@pytest.mark.parametrize("name", sorted(METHODS))
def test_the_same_each_time_and_nothing_to_do(name: str) -> None:
    problem = random_problem(3, 8)
    floor = METHODS[name](problem, None).floor_bytes
    assert METHODS[name](problem, floor + 2) == METHODS[name](problem, floor + 2)
    empty = METHODS[name](Problem(operations=(), values=()), 0)
    assert empty.termination is Termination.OPTIMAL
    assert _plan(empty).sequence == ()


@pytest.mark.parametrize("name", sorted(METHODS))
def test_a_value_that_nothing_can_bring_back(name: str) -> None:
    """It may not be saved, and its operation may not run again, but B reads it.

    In a plain sequence there is no boundary that it would have to cross.
    """
    b = Builder()
    x = b.value(1, savable=False)
    tangent = b.value(1, Origin.TANGENT)
    b.run([], [x], 1.0, recomputable=False)
    b.run([x, tangent], [b.value(1, held=True)], 1.0, Phase.BACKWARD)
    with pytest.raises(SolverError):
        METHODS[name](b.problem(), None)
    b.operations[0] = replace(b.operations[0], phase=Phase.BACKWARD)
    plan = _plan(METHODS[name](b.problem(), None))
    check(b.problem(), plan, None)
    assert plan.sequence == (0, 1)


def test_what_reads_something_lost_is_not_run_again() -> None:
    """y reads x, which is gone in the backward: y is saved by every method."""
    b = Builder()
    x, y, z = b.value(1, savable=False), b.value(1), b.value(1)
    tangent = b.value(1, Origin.TANGENT)
    b.run([], [x], 1.0, recomputable=False)
    b.run([x], [y], 1.0)
    b.run([y], [z], 1.0)
    b.run([y, z, tangent], [b.value(1, held=True)], 1.0, Phase.BACKWARD)
    for method in METHODS.values():
        solution = method(b.problem(), None)
        check(b.problem(), _plan(solution), None)
        plan = _plan(method(b.problem(), solution.floor_bytes))
        assert plan.sequence.count(OpId(1)) == 1


def test_an_operation_of_either_side_runs_where_it_can() -> None:
    """Its value is needed in the backward, what it reads cannot be had there."""
    b = Builder()
    x, mask = b.value(4, savable=False), b.value(1)
    tangent = b.value(1, Origin.TANGENT)
    b.run([], [x], 1.0, recomputable=False)
    b.run([x], [mask], 1.0, Phase.EITHER)
    b.run([mask, tangent], [b.value(1, held=True)], 1.0, Phase.BACKWARD)
    for method in METHODS.values():
        plan = _plan(method(b.problem(), None))
        check(b.problem(), plan, None)
        assert plan.boundary == 2


def test_imports_point_down() -> None:
    for path in sorted(CLASSICS.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                top, *below = str(node.module).split(".")
                assert top != "torch"
                assert top != "gcpass" or below[:1] == ["solvers"]


# --- the turn and the stages ------------------------------------------------------


def test_turn_of_a_chain_is_its_end() -> None:
    """a_1 ... a_L-1 are read by the backward; the last is written by operation L-2.

    So L - 1 values cross place L - 1, as many cross L, none is crossed by more, and
    the earliest is taken.
    """
    assert turn(_plain(chain(16, 3, 1.0))) == 15
    assert turned(chain(16, 3, 1.0)).training == chain(16, 3, 1.0)


def test_turn_never_passes_the_first_reader_of_a_tangent() -> None:
    b = Builder()
    small, tangent, wide = b.value(1), b.value(1, Origin.TANGENT), b.value(100)
    b.run([], [small], 1.0, Phase.BACKWARD)
    b.run([tangent], [wide], 1.0, Phase.BACKWARD)
    b.run([small, wide], [], 1.0, Phase.BACKWARD)
    assert turn(b.problem()) == 1


def test_stages_of_a_transformer_end_on_the_residual_stream() -> None:
    """One value of the stream crosses behind each add, more inside attention and MLP.

    Ten operations a block: norm, qkv, attention, projection, add | norm, up, gelu,
    down, add |. In the first attention the stream is an input, which takes no bytes, so
    it is cut everywhere. The backward of a block has 12 operations besides the one that
    may run on either side.
    """
    stages = stages_of(turned(transformer(3)))
    assert [len(part) for part in stages.forward] == [1] * 5 + [5] * 5
    assert [len(values) for values in stages.checkpoint] == [0] + [1] * 9
    assert sum(map(len, stages.backward)) == 36


def test_a_value_that_skips_belongs_to_every_checkpoint_it_crosses() -> None:
    """The first of four stages writes a value that the last reads, too."""
    b = Builder()
    skip, *inner = (b.value(1) for _ in range(4))
    tangent = b.value(1, Origin.TANGENT)
    b.run([], [skip], 1.0)
    b.run([skip], [inner[0]], 1.0)
    b.run([inner[0]], [inner[1]], 1.0)
    b.run([inner[1], skip], [inner[2]], 1.0)
    b.run([inner[2], tangent], [b.value(1, held=True)], 1.0, Phase.BACKWARD)
    stages = stages_of(turned(b.problem()))
    assert len(stages) >= 2
    for i in range(1, len(stages)):
        first = stages.forward[i][0]
        assert (skip in stages.checkpoint[i]) == (first <= 3)
    assert len(stages_of(turned(chain(50, 1, 1.0)), 7)) == 7


# --- greedy, knapsack, minimum cut ------------------------------------------------


def _three_values() -> Problem:
    """Return x, y, z, computed from nothing and read in the backward; sizes 4, 3, 3.

    Each is computed in 5, 4, 4 seconds and read by its own backward operation, which
    writes nothing; the last of these reads the tangent, too (no bytes).
    """
    b = Builder()
    values = [b.value(size) for size in (4, 3, 3)]
    tangent = b.value(0, Origin.TANGENT)
    for value, seconds in zip(values, (5.0, 4.0, 4.0), strict=True):
        b.run([], [value], seconds)
    for value in values:
        b.run([value, tangent], [], 1.0, Phase.BACKWARD)
    return b.problem()


def test_knapsack_by_hand() -> None:
    """Limit 6: y and z are worth 8 seconds, x alone 5; limit 7: x and y, 9."""
    problem = _three_values()
    table = knapsack_of(problem)
    assert [sorted(table.chosen(limit)) for limit in (2, 3, 4, 6, 7, 10)] == [
        [],
        [1],
        [0],
        [1, 2],
        [0, 1],
        [0, 1, 2],
    ]
    assert saving_bytes(problem, 6).cost_seconds == 16.0 + 5.0


def test_knapsack_takes_the_best_set_within_the_limit() -> None:
    """Brute force over all sets; with several results each is worth its share."""
    for seed in range(20):
        problem = random_problem(seed, 10)
        writers = problem.writers()
        table = knapsack_of(problem)
        worth = {}
        for value in table.items:
            op = problem.operations[writers[value] or 0]
            worth[value] = op.cost_seconds / len(op.writes)
        size = {v: problem.values[v].size_bytes for v in table.items}
        for limit in range(0, sum(size.values()) + 1, 3):
            chosen = table.chosen(limit)
            assert sum(size[v] for v in chosen) <= limit
            best = max(
                sum(worth[v] for v in some)
                for count in range(len(table.items) + 1)
                for some in itertools.combinations(table.items, count)
                if sum(size[v] for v in some) <= limit
            )
            assert sum(worth[v] for v in chosen) == pytest.approx(best)


def test_saved_bytes_are_no_peak() -> None:
    """With nothing saved on a chain the first backward rebuilds all: pytorch#197838.

    It needs a_15 and with it a_1 ... a_14, each kept until its own backward: the peak
    is that of storing everything, for 15 seconds more.
    """
    problem = chain(16, 1, 1.0)
    plan = saving_bytes(problem, 0)
    assert (plan.cost_seconds, plan.peak_bytes) == (32.0 + 15.0, 17)
    assert knapsack(problem, 16).termination is Termination.INFEASIBLE


def test_greedy_evicts_the_least_seconds_per_byte() -> None:
    """The peak, 10 bytes, is at the third operation and at the backward of x.

    x is cheapest, 5 / 4 seconds a byte against 4 / 3 of y, but running it again just
    before its reader leaves two steps of 10 bytes. y frees 3 bytes at both: 7 are left.
    """
    problem = _three_values()
    first = _plan(greedy(problem, 9))
    check(problem, first, 9)
    assert first.cost_seconds == 16.0 + 4.0


def test_greedy_drops_big_cheap_values_first() -> None:
    """Eight values; at half the bytes those of one second go, not those of nine."""
    b = Builder()
    values = [b.value(10) for _ in range(8)]
    tangent = b.value(0, Origin.TANGENT)
    for i, value in enumerate(values):
        b.run([], [value], 1.0 if i % 2 else 9.0)
    for value in reversed(values):
        b.run([value, tangent], [], 0.0, Phase.BACKWARD)
    plan = _plan(greedy(b.problem(), 50))
    check(b.problem(), plan, 50)
    repeated = {op for op in range(8) if plan.sequence.count(OpId(op)) > 1}
    assert len(repeated) >= 3
    assert all(op % 2 for op in repeated)


def test_greedy_does_not_carry_over_what_may_not_be_saved() -> None:
    """y is large and idle at the peak; running it again needs x from the forward."""
    b = Builder()
    x, y, w, z = (b.value(n, savable=n > 1) for n in (1, 20, 2, 20))
    tangent = b.value(0, Origin.TANGENT)
    b.run([], [x], 1.0)
    b.run([x], [y], 1.0)
    b.run([y], [w], 1.0)
    b.run([w], [z], 9.0, recomputable=False)
    b.run([z, tangent], [], 1.0, Phase.BACKWARD)
    b.run([y, tangent], [], 1.0, Phase.BACKWARD)
    solution = greedy(b.problem(), None)
    check(b.problem(), _plan(solution), None)
    assert solution.floor_bytes == 42
    assert greedy(b.problem(), 41).termination is Termination.INFEASIBLE


def test_min_cut_recomputes_what_is_dear_to_save() -> None:
    """x takes 10 seconds to write and read, 1 to compute in the reader's kernel."""
    b = Builder()
    x, y, tangent = b.value(10), b.value(1), b.value(1, Origin.TANGENT)
    b.run([], [x], 1.0, fusible=True)
    b.run([x], [y], 1.0, absorbing=True)
    gradient = b.value(1, held=True)
    b.run([x, tangent], [gradient], 1.0, Phase.BACKWARD, absorbing=True)
    problem = b.problem(save_seconds_per_byte=1.0)
    assert _plan(store_everything(problem, None)).cost_seconds == 13.0
    assert _plan(min_cut(problem, None)).cost_seconds == 4.0
    assert min_cut(problem, None).termination is Termination.OPTIMAL


def test_min_cut_is_the_fastest_plan() -> None:
    for seed in range(12):
        problem = random_problem(seed, 6)
        optimum = optimum_seconds(problem, _plenty(problem))
        if optimum is not None:
            fastest = _plan(min_cut(problem, None))
            assert fastest.cost_seconds == pytest.approx(optimum)
