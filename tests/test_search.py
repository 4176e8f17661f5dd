"""The planner against exact search and its own rules, without and with fusion."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from gcpass.solvers.accelerate import COMPILED
from gcpass.solvers.bound import floor_lower_bound_bytes
from gcpass.solvers.check import check
from gcpass.solvers.classics import METHODS
from gcpass.solvers.classics.revolve import fewest_steps
from gcpass.solvers.errors import SolverError
from gcpass.solvers.generate import random_layered
from gcpass.solvers.plain import given_peak_bytes
from gcpass.solvers.problem import Origin, Phase, Plan, Problem, Termination
from gcpass.solvers.search import warm_up
from gcpass.solvers.solve import Planner, moves_for, solve
from tests.exact import optimum_seconds
from tests.problems import Builder, chain, random_plain, random_problem, transformer

ROOT = Path(__file__).parents[1]
MOVES = 20_000
EPSILON = 1e-6  # seconds; costs of the random problems are whole numbers


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    warm_up()


def budgets_of(problem: Problem, count: int) -> list[int]:
    """Return budgets from the least that is not excluded up to below the peak."""
    low, high = floor_lower_bound_bytes(problem), given_peak_bytes(problem)
    return sorted({low + (high - low) * k // count for k in range(count)})


def plan_of(problem: Problem, budget: int, moves: int = MOVES) -> Plan | None:
    """Return the plan of a planner that has solved nothing else, checked."""
    solution = Planner(problem=problem, moves=moves).solve(budget)
    if solution.plan is not None:
        check(problem, solution.plan, budget)
    return solution.plan


# --- exact search -----------------------------------------------------------------


def compare(problem: Problem, budget: int) -> bool:
    """Whether the plan is optimal; never without a plan, too dear or too cheap."""
    optimum = optimum_seconds(problem, budget)
    solution = Planner(problem=problem, moves=MOVES).solve(budget)
    if optimum is None:
        assert solution.plan is None
        assert solution.termination is Termination.INFEASIBLE
        return True
    assert solution.plan is not None, f"{budget} bytes, optimum {optimum}"
    check(problem, solution.plan, budget)
    assert solution.bound_seconds <= optimum + EPSILON
    assert solution.plan.cost_seconds >= optimum - EPSILON
    if solution.termination is Termination.OPTIMAL:
        assert solution.plan.cost_seconds == pytest.approx(optimum)
    return solution.plan.cost_seconds <= optimum + EPSILON


def test_plain_sequences_against_exact_search() -> None:
    problems = [random_plain(seed, 5 + seed % 4) for seed in range(40)]
    results = [compare(p, b) for p in problems for b in budgets_of(p, 3)]
    assert len(results) >= 70  # some have no three budgets below the peak
    assert sum(results) >= 0.97 * len(results)


def test_training_problems_against_exact_search() -> None:
    problems = [random_problem(seed, 5 + seed % 4) for seed in range(60)]
    results = [compare(p, b) for p in feasible(problems) for b in budgets_of(p, 3)]
    assert len(results) > 100
    assert sum(results) >= 0.97 * len(results)


def feasible(problems: Iterable[Problem]) -> Iterator[Problem]:
    """Yield those that have a plan.

    There is none where a value can neither be saved nor recomputed. Tangents that
    nothing reads have a test of their own.
    """
    for problem in problems:
        readers = problem.readers()
        if any(
            value.origin is Origin.TANGENT and not readers[v]
            for v, value in enumerate(problem.values)
        ):
            continue
        try:
            Planner(problem=problem).solve(None)
        except SolverError:
            assert any(not value.savable for value in problem.values)
            assert optimum_seconds(problem, given_peak_bytes(problem)) is None
            continue
        yield problem


@pytest.mark.parametrize("moves", [0, 2_000])
def test_every_plan_is_valid_and_fits(moves: int) -> None:
    found = 0
    problems = [
        random_problem(seed, 6 + seed % 20, fused=seed % 2 == 1) for seed in range(80)
    ]
    # `test_training_problems_against_exact_search` has what cannot be saved.
    savable = [p for p in problems if all(value.savable for value in p.values)]
    for problem in feasible(savable):
        planner = Planner(problem=problem, moves=moves)
        for budget in budgets_of(problem, 4):
            solution = planner.solve(budget)
            if solution.plan is None:
                assert solution.floor_bytes > budget
                continue
            check(problem, solution.plan, budget)
            assert solution.plan.cost_seconds >= solution.bound_seconds
            found += 1
    assert found > 100


def test_a_tangent_that_nothing_reads_takes_its_bytes() -> None:
    """9 bytes arrive with the backward, between the two sides.

    2 more are there when they are kept for the other side, none when they are rebuilt.
    """
    b = Builder()
    x, y = b.value(1, Origin.INPUT), b.value(2)
    b.run([x], [y], 1.0)
    b.value(9, Origin.TANGENT)
    b.run([y], [b.value(1, held=True)], 1.0, Phase.BACKWARD)
    problem = b.problem()
    budgets = (8, 9, 10, 11)
    assert [optimum_seconds(problem, k) for k in budgets] == [None, 3.0, 3.0, 2.0]
    for budget in budgets:
        compare(problem, budget)


def test_draws_keep_their_order_on_either_side() -> None:
    """Two draws, one of which the forward does not need, and a large value between.

    The backward reads `early`, drawn before `late` in the given order. When it runs in
    the forward it must run before `late` does.
    """
    b = Builder()
    x, big, seed = b.value(1, Origin.INPUT), b.value(50), b.value(3)
    early, late = b.value(1), b.value(1)
    b.run([x], [seed], 1.0)
    b.run([seed], [early], 1.0, Phase.EITHER, recomputable=False)
    b.run([seed], [late], 1.0, recomputable=False)
    b.run([late], [big], 1.0)
    tangent, gradient = b.value(1, Origin.TANGENT), b.value(50)
    b.run([tangent, big], [gradient], 1.0, Phase.BACKWARD)
    b.run([gradient, early], [b.value(1, held=True)], 1.0, Phase.BACKWARD)
    problem = b.problem()
    for budget in range(100, given_peak_bytes(problem) + 1):
        compare(problem, budget)


def test_the_boundary_does_not_move_over_what_must_not_cross_it() -> None:
    """`a` must not cross; `u` needs 9 bytes of workspace, beside the tangent or not.

    Without the tangent: a 1, u 20, 9 = 30 in the forward, and `a` again in the backward
    (20 + 5 + 1, then 1 more). Moving the boundary behind `u` alone would let `a` cross.
    """
    b = Builder()
    x = b.value(1, Origin.INPUT)
    a, u = b.value(1, savable=False), b.value(20)
    b.run([x], [a], 1.0)
    b.run([a], [u], 1.0, Phase.EITHER, workspace_bytes=9)
    tangent = b.value(5, Origin.TANGENT)
    b.run([a, u, tangent], [b.value(1, held=True)], 1.0, Phase.BACKWARD)
    problem = b.problem()
    assert [optimum_seconds(problem, k) for k in (29, 30, 35)] == [None, 4.0, 4.0]
    for budget in (29, 30, 34, 35):
        compare(problem, budget)


# --- fusion -----------------------------------------------------------------------


def kernels() -> Problem:
    """`a` (8 bytes) is read by a pointwise `u` whose reader comes late, behind `b`.

    u is virtual, so a is alive while b (4 bytes, rebuilt for the last operation anyway)
    is worked with: 8 + 4 + 2. Running a and u again behind that costs 5 and 1.
    """
    b = Builder()
    x, a, u = b.value(1, Origin.INPUT), b.value(8), b.value(8)
    big, small = b.value(4), b.value(2)
    b.run([x], [a], 5.0, Phase.BACKWARD)
    b.run([a], [u], 1.0, Phase.BACKWARD, fusible=True, absorbing=True)
    b.run([x], [big], 7.0, Phase.BACKWARD)
    b.run([big], [small], 1.0, Phase.BACKWARD)
    total = b.value(1)
    b.run([u, small], [total], 1.0, Phase.BACKWARD, absorbing=True)
    return b.problem()


def test_what_a_kernel_draws_on_is_dropped_with_what_it_computes() -> None:
    """Moving a and u behind the small value costs nothing: 4 + 2, then 2 + 8 + 1."""
    problem = kernels()
    assert given_peak_bytes(problem) == 14
    solution = Planner(problem=problem).solve(11)
    assert solution.plan is not None
    assert solution.plan.cost_seconds == 15.0
    assert solution.plan.peak_bytes == 11
    assert solution.termination is Termination.OPTIMAL
    assert Planner(problem=problem).solve(10).plan is None


def test_plans_of_fused_transformers_are_near_the_bound() -> None:
    """A percentage point of the fastest plan's time, from 90 down to 50 %."""
    problem = transformer(8, fused=True)
    planner = Planner(problem=problem)
    fastest = planner.fastest
    for percent in (90, 80, 70, 60, 50):
        budget = fastest.peak_bytes * percent // 100
        solution = planner.solve(budget)
        assert solution.plan is not None
        check(problem, solution.plan, budget)
        gap = solution.plan.cost_seconds - solution.bound_seconds
        assert gap <= 0.01 * fastest.cost_seconds, f"{percent} %"


# --- budgets ----------------------------------------------------------------------


def test_a_larger_budget_never_costs_more() -> None:
    for seed in range(30):
        problem = random_plain(seed, 10 + seed % 10)
        before = float("inf")
        for budget in [*budgets_of(problem, 5), given_peak_bytes(problem)]:
            plan = plan_of(problem, budget, MOVES // 4)
            seconds = plan.cost_seconds if plan else float("inf")
            assert seconds <= before, f"seed {seed}, {budget} bytes"
            before = seconds


def test_one_planner_for_falling_budgets_finds_what_fresh_ones_do() -> None:
    problem = random_layered(60, width=0.4, seed=1)
    planner = Planner(problem=problem, moves=MOVES)
    for budget in reversed(budgets_of(problem, 4)):
        shared, alone = planner.solve(budget).plan, plan_of(problem, budget)
        assert (shared is None) <= (alone is None)
        if shared is not None and alone is not None:
            check(problem, shared, budget)


@pytest.mark.parametrize("layers", [16, 24, 32])
def test_uniform_chains_reach_the_fewest_steps(layers: int) -> None:
    """c slots are the input (free) and c - 1 states; a step needs 3 bytes more.

    See `tests/test_classics_optimal.py`: t(layers, c) forward steps, one for the last
    layer, and the backward.
    """
    problem = chain(layers, 1, 1.0)
    for slots in (1, 2, 3, 4, 6, layers // 2, layers - 2):
        plan = plan_of(problem, slots + 2)
        assert plan is not None
        classic = METHODS["revolve"](problem, slots + 2).plan
        assert classic is not None
        fewest = fewest_steps(layers, slots) + 1 + layers
        assert classic.cost_seconds == fewest
        assert plan.cost_seconds == fewest, f"{slots} slots"


def test_below_the_floor_there_is_no_plan() -> None:
    problem = chain(8, 1, 1.0)
    solution = solve(problem, 2, time_limit_s=0.01)
    assert solution.plan is None
    assert solution.termination is Termination.INFEASIBLE
    assert solution.floor_bytes == 3


def test_what_takes_no_bytes_fits_in_none() -> None:
    empty = Problem(operations=(), values=())
    assert solve(empty, 0).termination is Termination.OPTIMAL
    b = Builder()
    b.run([], [b.value(0)], 2.0, Phase.BACKWARD)
    solution = solve(b.problem(), 0)
    assert solution.plan is not None
    assert solution.plan.cost_seconds == solution.bound_seconds == 2.0


def test_moves_follow_from_the_problem_and_the_limit() -> None:
    small, large = chain(8, 1, 1.0), random_layered(100, width=0.3, seed=0)
    assert moves_for(small, 0.0) == 0
    assert moves_for(small, 2.0) == pytest.approx(2 * moves_for(small, 1.0), abs=1)
    assert moves_for(large, 1.0) < moves_for(small, 1.0)


# --- the same on every run --------------------------------------------------------

SCRIPT = """
import json, sys
from gcpass.solvers.generate import chain, random_layered, transformer
from gcpass.solvers.plain import given_peak_bytes
from gcpass.solvers.solve import Planner
moves = int(sys.argv[1])
problems = [random_layered(24, width=0.5, seed=4), chain(8, 1, 1.0), transformer(1)]
plans = []
for problem in problems:
    budget = given_peak_bytes(problem) * 8 // 10
    plan = Planner(problem=problem, moves=moves).solve(budget).plan
    plans.append(plan and [plan.sequence, plan.boundary, plan.cost_seconds.hex()])
print(json.dumps(plans))
"""


def run_script(moves: int, **environment: str) -> list[object]:
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(moves)],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    plans: list[object] = json.loads(result.stdout)
    return plans


def test_two_processes_find_the_same() -> None:
    plans = run_script(MOVES, PYTHONHASHSEED="1")
    assert len(plans) == 3
    assert None not in plans
    assert plans == run_script(MOVES, PYTHONHASHSEED="2")


@pytest.mark.skipif(not COMPILED, reason="numba is not installed")
def test_numba_changes_nothing_but_the_speed() -> None:
    plans = run_script(600)
    assert None not in plans
    assert plans == run_script(600, NUMBA_DISABLE_JIT="1")


@pytest.mark.skipif(not COMPILED, reason="numba is not installed")
def test_after_warming_up_nothing_is_compiled() -> None:
    """In a process of its own: other tests call the functions in other ways."""
    code = WARM_SCRIPT.format(modules=", ".join(COMPILED_MODULES))
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    before, after = json.loads(result.stdout)
    assert before == after
    assert sum(before.values()) >= 10


COMPILED_MODULES = ("anneal", "cut_plan", "evict", "narrow", "tighten", "timeline")
WARM_SCRIPT = """
import json
from gcpass.solvers import {modules}
from gcpass.solvers.search import warm_up
from gcpass.solvers.generate import chain, random_layered
from gcpass.solvers.plain import given_peak_bytes
from gcpass.solvers.solve import Planner

def signatures():
    return {{
        f"{{module.__name__}}.{{name}}": len(function.signatures)
        for module in ({modules})
        for name, function in vars(module).items()
        if hasattr(function, "signatures")
    }}

warm_up()
before = signatures()
for problem in (random_layered(30, width=0.3, seed=0), chain(10, 1, 1.0)):
    for tenths in (9, 6, 4, 1):
        budget = given_peak_bytes(problem) * tenths // 10
        planner = Planner(problem=problem, moves=2_000)
        planner.solve(budget)
        planner.floor
print(json.dumps([before, signatures()]))
"""
