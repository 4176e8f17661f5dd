"""``gcpass solve``: an instance file and a budget in, the best plan found out.

Every plan passes `gcpass.solvers.check` before a number is printed. Overhead and bound
are percent of the needed operations' time, executed once each; for a plain sequence
that is the TDI of the published tables.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from gcpass.budget import Bytes, Fraction, Minimum, parse_budget
from gcpass.errors import GcpassError, InvalidOptionError, SolverError
from gcpass.solvers.bound import floor_lower_bound_bytes, lower_bound_seconds
from gcpass.solvers.check import check
from gcpass.solvers.instance import read_problem, write_solution
from gcpass.solvers.moment import needed_operations
from gcpass.solvers.plain import budget_of, given_peak_bytes
from gcpass.solvers.problem import Problem, Solution
from gcpass.solvers.solve import solve
from gcpass.units import format_bytes

FOUND, NOT_FOUND, USAGE = 0, 1, 2  # exit codes

_Budget = Bytes | Fraction | Minimum
_Solver = Callable[[Problem, int, float], Solution]  # problem, bytes, seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What the command prints, in JSON by these names.

    Attributes:
        instance: the file.
        method: "auto" or the name of a classic.
        operations: of the problem.
        executions: of the plan; what follows is None without a plan.
        cost: seconds, or the unit of the file's times.
        overhead_percent: cost beyond every needed operation once.
        bound_percent: no plan within the budget has less overhead.
        gap_points: percentage points between the two.
        peak: bytes, of the plan.
        budget: bytes.
        floor: bytes, the least peak found so far; without a plan and for the budget
            "min", the least that the method reaches.
        given_peak: bytes, of the given order.
        termination: why the solver stopped.
        limit: the limit that stopped it, if one did.
        infeasible_proven: no plan at all fits the budget. False with a plan.
        origin: what built the plan.
        seconds: spent on solving.
    """

    instance: str
    method: str
    operations: int
    executions: int | None
    cost: float | None
    overhead_percent: float | None
    bound_percent: float | None
    gap_points: float | None
    peak: int | None
    budget: int
    floor: int
    given_peak: int
    termination: str
    limit: str | None
    infeasible_proven: bool
    origin: str | None
    seconds: float


def run(arguments: argparse.Namespace) -> int:
    """Solve one instance, print the result and return the exit code.

    Args:
        arguments: path, budget, time_limit, json, output and method, as
            `gcpass.cli` parses them.
    """
    try:
        budget = _parse_budget(arguments.budget)
        solver = _solver(arguments.method)
        problem = read_problem(arguments.path)
        if arguments.output and arguments.output.is_dir():
            raise InvalidOptionError(
                f"option '-o': {arguments.output} is a folder", option="output"
            )
        if arguments.output and arguments.output.resolve() == arguments.path.resolve():
            raise InvalidOptionError(
                "option '-o' would overwrite the instance", option="output"
            )
        if arguments.output and not arguments.output.parent.is_dir():
            raise InvalidOptionError(
                f"option '-o': there is no folder {arguments.output.parent}",
                option="output",
            )
    except (OSError, GcpassError) as error:
        return _complain(str(error), USAGE)
    started = time.perf_counter()
    try:
        limit, solution = _solve(problem, budget, solver, arguments.time_limit)
        if solution.plan is not None:
            check(problem, solution.plan, limit)
    except GcpassError as error:
        return _complain(f"the solver failed: {error}", NOT_FOUND)
    seconds = time.perf_counter() - started
    report = _report(problem, limit, solution, seconds, arguments)
    if arguments.json:
        print(json.dumps(dataclasses.asdict(report), allow_nan=False))
    elif solution.plan is not None:
        _print(report)
    if arguments.output:
        try:
            write_solution(solution, arguments.output)
        except OSError as error:
            return _complain(str(error), USAGE)
    return FOUND if solution.plan is not None else _complain(_why(report), NOT_FOUND)


def _parse_budget(text: str) -> _Budget:
    budget = parse_budget(text, option="--budget")
    if isinstance(budget, _Budget):
        return budget
    raise InvalidOptionError(
        f"option '--budget' takes bytes, a fraction of the given order's peak or "
        f"'min' here, got {text!r}",
        option="--budget",
    )


def _solver(name: str) -> _Solver:
    """Return the solver of a name; the classics have no time limit."""
    if name == "auto":
        return lambda problem, limit, seconds: solve(
            problem, limit, time_limit_s=seconds
        )
    from gcpass.solvers.classics import METHODS

    if name not in METHODS:
        raise InvalidOptionError(
            f"no method {name!r}; there are auto, {', '.join(METHODS)}",
            option="--method",
        )
    return partial(_without_limit, METHODS[name])


def _without_limit(
    method: Callable[[Problem, int | None], Solution],
    problem: Problem,
    budget_bytes: int,
    seconds: float,
) -> Solution:
    return method(problem, budget_bytes)


def _solve(
    problem: Problem, budget: _Budget, solver: _Solver, seconds: float
) -> tuple[int, Solution]:
    """Return the budget in bytes and the solution."""
    if isinstance(budget, Bytes):
        return budget.size_bytes, solver(problem, budget.size_bytes, seconds)
    if isinstance(budget, Fraction):
        limit = budget_of(problem, budget.of_peak)
        return limit, solver(problem, limit, seconds)
    # A solution names the floor also when nothing fits, as into 0 bytes.
    started = time.perf_counter()
    floor = solver(problem, 0, seconds / 2).floor_bytes
    left = seconds - (time.perf_counter() - started)
    return floor, solver(problem, floor, max(left, seconds / 10))


def _report(
    problem: Problem,
    limit: int,
    solution: Solution,
    seconds: float,
    arguments: argparse.Namespace,
) -> Report:
    plan = solution.plan
    needed = sorted(needed_operations(problem))
    base = math.fsum(problem.operations[op].cost_seconds for op in needed)
    overhead = None if plan is None else _percent(plan.cost_seconds, base)
    bound = None if plan is None else _percent(solution.bound_seconds, base)
    return Report(
        instance=str(arguments.path),
        method=arguments.method,
        operations=len(problem.operations),
        executions=None if plan is None else len(plan.sequence),
        cost=None if plan is None else plan.cost_seconds,
        overhead_percent=overhead,
        bound_percent=bound,
        gap_points=None if overhead is None or bound is None else overhead - bound,
        peak=None if plan is None else plan.peak_bytes,
        budget=limit,
        floor=solution.floor_bytes,
        given_peak=given_peak_bytes(problem),
        termination=solution.termination.value,
        limit=solution.limit,
        infeasible_proven=plan is None and _is_infeasible(problem, limit),
        origin=None if plan is None else plan.origin,
        seconds=seconds,
    )


def _percent(cost: float, base: float) -> float:
    """Return the overhead of a cost; 0 where nothing takes time."""
    return 100.0 * (cost - base) / base if base else 0.0


def _is_infeasible(problem: Problem, limit: int) -> bool:
    """Return whether it is proven that no plan fits; False without ortools."""
    try:
        if floor_lower_bound_bytes(problem) > limit:
            return True
        return lower_bound_seconds(problem, limit).infeasible_proven
    except SolverError:
        return False


def _why(report: Report) -> str:
    if report.infeasible_proven:
        proof = "it is proven that no plan fits"
    elif report.limit is not None:
        proof = f"the {report.limit} limit stopped the search; one may exist"
    else:
        proof = "it is not proven that none exists"
    return (
        f"no plan within {_exact(report.budget)}: the least peak reached is "
        f"{_exact(report.floor)}; {proof}"
    )


def _print(report: Report) -> None:
    stopped = f" ({report.limit})" if report.limit else ""
    lines = {
        "operations": f"{report.operations}, {report.executions} executions",
        "cost": f"{report.cost:.9g}",
        "overhead": f"{report.overhead_percent:.3f} %",
        "bound": f"{report.bound_percent:.3f} %, gap {report.gap_points:.3f} points",
        "peak": _exact(report.peak or 0),
        "budget": _exact(report.budget),
        "least peak": _exact(report.floor),
        "given order": _exact(report.given_peak),
        "termination": f"{report.termination}{stopped}, plan by {report.origin}",
        "time": f"{report.seconds:.2f} s",
    }
    for name, text in lines.items():
        print(f"{name:12} {text}")


def _exact(size_bytes: int) -> str:
    return f"{size_bytes} bytes ({format_bytes(size_bytes)})"


def _complain(problem: str, code: int) -> int:
    print(f"gcpass: {problem}", file=sys.stderr)
    return code
