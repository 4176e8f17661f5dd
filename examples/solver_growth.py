"""Time and memory of the solver on transformers of growing size, with the exponent.

    python examples/solver_growth.py [--operations 1000,3000,10000,30000] [--budget 0.5]

Each size is planned and checked in a process of its own, without annealing. The
exponent is the slope of log seconds over log operations, by least squares.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time

import numpy as np

from gcpass.solvers.check import check
from gcpass.solvers.generate import transformer
from gcpass.solvers.plain import budget_of
from gcpass.solvers.search import warm_up
from gcpass.solvers.solve import solve

OPERATIONS_PER_LAYER = 23


def main() -> None:
    """Print one line per size, then the exponents."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--operations", default="1000,3000,10000,30000")
    parser.add_argument("--budget", type=float, default=0.5)
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(_measure(arguments.one, arguments.budget)))
        return
    print("operations  seconds  MiB added  extra %  bound %  executions")
    rows = []
    for operations in map(int, arguments.operations.split(",")):
        command = [sys.executable, __file__, "--one", str(operations)]
        command += ["--budget", str(arguments.budget)]
        result = subprocess.run(command, check=True, capture_output=True, text=True)
        row = json.loads(result.stdout)
        rows.append(row)
        print("{:10d} {:8.2f} {:10.0f} {:8.3f} {:8.3f} {:11d}".format(*row))
    sizes = np.log([row[0] for row in rows])
    for name, column in (("seconds", 1), ("MiB added", 2)):
        slope = np.polyfit(sizes, np.log([row[column] for row in rows]), 1)[0]
        print(f"{name} grow with the operations to the power {slope:.2f}")


def _measure(operations: int, fraction: float) -> tuple[float, ...]:
    warm_up()
    problem = transformer(round(operations / OPERATIONS_PER_LAYER))
    budget = budget_of(problem, fraction)
    before = _mebibytes()
    started = time.perf_counter()
    solution = solve(problem, budget, time_limit_s=0)
    seconds = time.perf_counter() - started
    assert solution.plan is not None, "half the peak is far above the floor"
    added = _mebibytes() - before
    check(problem, solution.plan, budget)
    base = sum(op.cost_seconds for op in problem.operations)
    extra = 100 * (solution.plan.cost_seconds / base - 1)
    bound = 100 * (solution.bound_seconds / base - 1)
    count = len(problem.operations)
    return count, seconds, added, extra, bound, len(solution.plan.sequence)


def _mebibytes() -> float:
    """Return the largest memory of this process so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    main()
