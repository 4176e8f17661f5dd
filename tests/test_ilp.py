"""The integer program: bounds from below, rows from above, the same set each time."""

from __future__ import annotations

import sys

import pytest

from gcpass.solvers.bound import given_order, lower_bound_seconds
from gcpass.solvers.cut import boundary_cut
from gcpass.solvers.errors import SolverError
from gcpass.solvers.ilp import IlpResult, solve_saved_set
from gcpass.solvers.liveness import simulate
from gcpass.solvers.problem import Problem, Termination
from tests.problems import chain, random_problem, transformer

UNLIMITED = 1 << 50


def _once(problem: Problem) -> float:
    return sum(op.cost_seconds for op in problem.operations)


def _assert_complete(problem: Problem, result: IlpResult) -> None:
    """What the backward and the recomputed operations read is saved or recomputed."""
    network = boundary_cut(problem)
    available = {*network.moment.free, *result.saved}
    for op in result.recomputed:
        available.update(problem.operations[op].writes)
    for op in result.recomputed:
        assert available.issuperset(problem.operations[op].reads)
    assert available.issuperset(network.moment.required)


def test_without_a_limit_it_is_the_fastest_cut() -> None:
    for seed in range(20):
        problem = random_problem(seed, 10, fused=seed % 2 == 1)
        fastest = boundary_cut(problem).fastest()
        result = solve_saved_set(problem, UNLIMITED)
        if fastest is None:
            assert result.status is Termination.INFEASIBLE
            continue
        assert result.status is Termination.OPTIMAL
        assert result.cost_seconds == pytest.approx(fastest.cost_seconds, abs=1e-3)
        _assert_complete(problem, result)


def test_chain_of_four() -> None:
    """The optimum at 4 bytes is 1 second more, see `tests/test_bound.py`.

    One of a1 and a2 is saved next to a3; which one is not determined.
    """
    result = solve_saved_set(chain(4, 1, 1.0), 4)
    assert result.status is Termination.OPTIMAL
    assert result.cost_seconds == 1.0
    assert len(result.saved) == 2
    assert len(result.recomputed) == 1


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("percent", [80, 50, 30])
def test_transformer_is_near_the_bound(percent: int, fused: bool) -> None:
    problem = transformer(16, fused=fused)
    budget = simulate(problem, *given_order(problem)).peak_bytes * percent // 100
    result = solve_saved_set(problem, budget)
    _assert_complete(problem, result)
    once = _once(problem)
    extra = lower_bound_seconds(problem, budget).seconds - once
    assert extra / once - 0.001 <= result.cost_seconds / once
    assert result.cost_seconds / once <= extra / once + 0.015


def test_the_result_is_the_same_each_time() -> None:
    problem = transformer(12, dropout=True)
    budget = simulate(problem, *given_order(problem)).peak_bytes // 2
    first = solve_saved_set(problem, budget)
    assert first.status is Termination.OPTIMAL
    assert solve_saved_set(problem, budget) == first
    operations = problem.operations
    assert all(operations[op].recomputable for op in first.recomputed)


def test_a_hint_of_no_use_does_no_harm() -> None:
    problem = transformer(4)
    budget = simulate(problem, *given_order(problem)).peak_bytes // 2
    hint = boundary_cut(problem).fastest()
    plain = solve_saved_set(problem, budget)
    assert solve_saved_set(problem, budget, hint=hint).cost_seconds == pytest.approx(
        plain.cost_seconds, rel=2e-3
    )


def test_no_room_and_nothing_to_do() -> None:
    nothing = solve_saved_set(chain(4, 10, 1.0), 5)
    assert nothing.status is Termination.INFEASIBLE
    empty = solve_saved_set(Problem(operations=(), values=()), 0)
    assert empty.status is Termination.OPTIMAL
    assert empty.saved == ()


def test_says_when_ortools_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ortools.sat.python", None)
    monkeypatch.setitem(sys.modules, "ortools.graph.python", None)
    with pytest.raises(SolverError, match="ortools"):
        solve_saved_set(chain(4, 1, 1.0), 4)
    with pytest.raises(SolverError, match="ortools"):
        boundary_cut(chain(4, 1, 1.0)).fastest()
