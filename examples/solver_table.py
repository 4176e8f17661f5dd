"""Solve rematerialization instances at several budgets and print a table.

    python examples/solver_table.py FILE[@0.8,0.7] ... [--time-limit 10]

FILE is an instance in any format that `gcpass solve` reads; budgets are fractions of
the given order's peak. Every plan is checked independently of the solver.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from gcpass.solvers.bound import floor_lower_bound_bytes
from gcpass.solvers.check import check
from gcpass.solvers.instance import read_problem
from gcpass.solvers.plain import budget_of, given_peak_bytes
from gcpass.solvers.problem import Problem
from gcpass.solvers.search import warm_up
from gcpass.solvers.solve import solve

DEFAULT_BUDGETS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)


def main() -> None:
    """Print one line per instance and budget."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("instances", nargs="+", metavar="FILE[@BUDGET,...]")
    parser.add_argument("--time-limit", type=float, default=10.0)
    arguments = parser.parse_args()
    warm_up()
    print(f"{'instance':28} budget  extra %  bound %    gap  peak %  seconds  plan by")
    for text in arguments.instances:
        path, _, fractions = text.partition("@")
        problem = read_problem(Path(path))
        budgets = [float(f) for f in fractions.split(",")] if fractions else None
        for fraction in budgets or DEFAULT_BUDGETS:
            print(_line(Path(path), problem, fraction, arguments.time_limit))


def _line(path: Path, problem: Problem, fraction: float, limit_s: float) -> str:
    budget = budget_of(problem, fraction)
    name = f"{path.stem[:28]:28} {fraction:6.2f}"
    started = time.perf_counter()
    solution = solve(problem, budget, time_limit_s=limit_s)
    seconds = time.perf_counter() - started
    given = given_peak_bytes(problem)
    if solution.plan is None:
        proven = floor_lower_bound_bytes(problem) > budget
        why = "proven infeasible" if proven else "none found"
        return f"{name}  {why}, least peak {100 * solution.floor_bytes / given:.2f} %"
    check(problem, solution.plan, budget)
    base = sum(op.cost_seconds for op in problem.operations)
    extra = 100 * (solution.plan.cost_seconds / base - 1)
    bound = 100 * (solution.bound_seconds / base - 1)
    peak = 100 * solution.plan.peak_bytes / given
    return (
        f"{name} {extra:8.3f} {bound:8.3f} {extra - bound:6.3f} {peak:7.2f} "
        f"{seconds:8.2f}  {solution.plan.origin}"
    )


if __name__ == "__main__":
    main()
