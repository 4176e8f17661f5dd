"""Count how often a larger budget gets a dearer plan, on random graphs.

    python examples/monotone.py [--count 200] [--operations 40] [--moves 20000]

Every budget is solved on its own, by a planner that knows nothing of the others, and
once more by one planner that goes from the smallest to the largest and keeps what it
found: its plans never get dearer.
"""

from __future__ import annotations

import argparse

from gcpass.solvers.bound import floor_lower_bound_bytes
from gcpass.solvers.generate import random_layered
from gcpass.solvers.plain import given_peak_bytes
from gcpass.solvers.search import warm_up
from gcpass.solvers.solve import Planner

BUDGETS = 10


def main() -> None:
    """Print every violation, and how many there are."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--operations", type=int, default=40)
    parser.add_argument("--moves", type=int, default=20_000)
    arguments = parser.parse_args()
    warm_up()
    for shared in (False, True):
        _count(arguments, shared=shared)


def _count(arguments: argparse.Namespace, *, shared: bool) -> None:
    pairs = violations = 0
    largest = 0.0
    for seed in range(arguments.count):
        width = 0.2 + 0.1 * (seed % 4)
        problem = random_layered(arguments.operations, width=width, seed=seed)
        low, high = floor_lower_bound_bytes(problem), given_peak_bytes(problem)
        before, at = float("inf"), 0
        planner = Planner(problem=problem, moves=arguments.moves)
        for k in range(1, BUDGETS + 1):
            budget = low + (high - low) * k // BUDGETS
            if not shared:
                planner = Planner(problem=problem, moves=arguments.moves)
            plan = planner.solve(budget).plan
            seconds = plan.cost_seconds if plan else float("inf")
            pairs += 1
            if seconds > before * (1 + 1e-9):
                violations += 1
                largest = max(largest, seconds / before - 1)
                print(f"seed {seed}: {before} s in {at}, {seconds} s in {budget} bytes")
            before, at = seconds, budget
    kind = "one planner" if shared else "independent"
    worst = f"the largest by {100 * largest:.3f} %"
    print(f"{kind}: {violations} of {pairs} budgets are dearer, {worst}")


if __name__ == "__main__":
    main()
