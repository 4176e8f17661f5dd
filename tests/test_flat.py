"""The planner for problems without fusion, against exact search and its own rules."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gcpass.solvers import anneal, cut_plan, evict, narrow, tighten, timeline
from gcpass.solvers.accelerate import COMPILED
from gcpass.solvers.bound import floor_lower_bound_bytes
from gcpass.solvers.check import check
from gcpass.solvers.classics import METHODS
from gcpass.solvers.classics.revolve import fewest_steps
from gcpass.solvers.flat import warm_up
from gcpass.solvers.generate import random_layered
from gcpass.solvers.plain import given_peak_bytes
from gcpass.solvers.problem import (
    OpId,
    Origin,
    Phase,
    Plan,
    Problem,
    Solution,
    Termination,
)
from gcpass.solvers.solve import Planner, moves_for, solve
from tests.exact import optimum_seconds
from tests.problems import Builder, chain, random_plain, random_problem

ROOT = Path(__file__).parents[1]
MOVES = 20_000
EPSILON = 1e-6  # seconds; costs of the random problems are whole numbers
LAYERS = 16


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
    cases = [(random_plain(seed, 5 + seed % 4), seed) for seed in range(40)]
    results = [compare(p, b) for p, _ in cases for b in budgets_of(p, 3)]
    assert len(results) > 100
    assert sum(results) >= 0.97 * len(results)


def test_training_problems_against_exact_search() -> None:
    problems = [random_problem(seed, 5 + seed % 4) for seed in range(60)]
    results = [
        compare(p, b) for p in problems if has_plan(p) for b in budgets_of(p, 3)
    ]
    assert len(results) > 100
    assert sum(results) >= 0.97 * len(results)


def has_plan(problem: Problem) -> bool:
    """Whether there is a plan of any peak; a value may be fixed to no side."""
    return optimum_seconds(problem, given_peak_bytes(problem)) is not None


@pytest.mark.parametrize("moves", [0, 2_000])
def test_every_plan_is_valid_and_fits(moves: int) -> None:
    for seed in range(120):
        problem = random_problem(seed, 6 + seed % 20)
        planner = Planner(problem=problem, moves=moves)
        if any(not v.savable for v in problem.values):
            continue  # perhaps no plan at all: see below
        for budget in budgets_of(problem, 4):
            solution = planner.solve(budget)
            if solution.plan is not None:
                check(problem, solution.plan, budget)
                assert solution.plan.cost_seconds >= solution.bound_seconds - EPSILON
