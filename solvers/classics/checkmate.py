"""Checkmate: the optimum for a fixed order, by an integer program for small graphs.

`gcpass.solvers.classics.checkmate_model` states the program and its source. It is
solved by CP-SAT, which counts bytes exactly where solvers in floating point need
tolerances, with one worker and a limit on work, so that each run gives the same plan.
It starts from the cheaper of the plans of rotor and greedy rematerialization.

What OPTIMAL means here: no plan is cheaper *among those whose first executions follow
the given order* (forward, then the rest) and which between two of them execute others
again at most once each, in the given order; to the resolution of the costs, 2^-40 of
their sum per execution. Other orders can be cheaper, so the bound of the solution,
which holds for every plan, can be lower. For problems with fusible operations the
program is an approximation, and nothing is called optimal for its sake.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gcpass.solvers.classics.checkmate_model import Model, build, most_bytes
from gcpass.solvers.classics.choose import cheapest_of
from gcpass.solvers.classics.emit import everything, saving, without_unread
from gcpass.solvers.classics.greedy import greedy
from gcpass.solvers.classics.rotor import rotor
from gcpass.solvers.errors import SolverError
from gcpass.solvers.ilp_model import cp_model
from gcpass.solvers.liveness import make_plan
from gcpass.solvers.problem import (
    OpId,
    Plan,
    Problem,
    Solution,
    Termination,
    ValueId,
)
from gcpass.solvers.turn import turned

MOST_OPERATIONS = 60  # n * n binaries: 60 take CP-SAT seconds to minutes
WORK = 20.0  # CP-SAT's deterministic seconds for the plan
FLOOR_WORK = 5.0  # and for the least peak
TIGHTER = 6  # further budgets to try where fusion makes the simulated peak higher
SEED = 1


def checkmate(problem: Problem, budget_bytes: int | None) -> Solution:
    """Return the optimum for the given order, or the best plan within the work limit.

    `floor_bytes` is the least peak found within `FLOOR_WORK`. INFEASIBLE with a `limit`
    means that none was found, not that there is none.

    Raises:
        SolverError: the problem has more than `MOST_OPERATIONS` operations, the
            constraints exclude every plan, or ortools is missing.
    """
    if len(problem.operations) > MOST_OPERATIONS:
        raise SolverError(
            f"checkmate: {len(problem.operations)} operations; its integer program is "
            f"for up to {MOST_OPERATIONS}, use another method"
        )
    step = turned(problem)
    stored = saving(step, everything(step.training), "checkmate")
    budget = most_bytes(problem) if budget_bytes is None else budget_bytes
    known = [method(problem, budget).plan for method in (rotor, greedy)]
    starts = [p for p in known if p is not None]
    start = min(starts, key=lambda p: (p.cost_seconds, p.peak_bytes), default=None)
    plan, proven = _within(problem, budget, start)
    least, _ = _solved(problem, None, start, FLOOR_WORK)
    found = [p for p in (plan, least, stored) if p is not None]
    result = cheapest_of(problem, found, budget_bytes)
    if not proven:
        stopped = result.termination is Termination.FEASIBLE
        termination = Termination.LIMIT if stopped else result.termination
        return replace(result, termination=termination, limit="work")
    optimal = plan is not None and not any(op.fusible for op in problem.operations)
    return replace(result, termination=Termination.OPTIMAL) if optimal else result


def _within(
    problem: Problem, budget_bytes: int, start: Plan | None
) -> tuple[Plan | None, bool]:
    """Return the plan of a budget, and whether the search was complete."""
    fused = any(op.fusible for op in problem.operations)
    budget = budget_bytes
    proven = True
    for _ in range(TIGHTER):
        plan, proven = _solved(problem, budget, start, WORK)
        if plan is None or plan.peak_bytes <= budget_bytes:
            return plan, proven
        assert fused, f"{plan.peak_bytes} bytes, the program says {budget} at most"
        budget -= plan.peak_bytes - budget_bytes
    return None, proven


def _solved(
    problem: Problem, budget_bytes: int | None, start: Plan | None, work: float
) -> tuple[Plan | None, bool]:
    """Return the plan of one program, and whether CP-SAT finished."""
    if not problem.operations:
        return make_plan(problem, (), 0, "checkmate"), True
    model = build(problem, budget_bytes)
    if start is not None:
        _add_hint(model, start)
    solver = cp_model().CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = SEED
    solver.parameters.linearization_level = 2
    solver.parameters.max_deterministic_time = work
    status = solver.status_name(solver.solve(model.program))
    if status == "MODEL_INVALID":
        raise SolverError(f"CP-SAT refused the program: {model.program.validate()}")
    if status not in ("OPTIMAL", "FEASIBLE"):
        return None, status == "INFEASIBLE"
    return _plan(problem, model, solver), status == "OPTIMAL"


def _plan(problem: Problem, model: Model, solver: Any) -> Plan:
    """Return the plan that the values of R say."""
    sequence: list[OpId] = []
    boundary = 0
    for t in range(len(model.order)):
        for k in range(t):
            if (t, k) in model.run and solver.value(model.run[t, k]):
                sequence.append(model.order[k])
        sequence.append(model.order[t])
        boundary += t < model.boundary
    shorter, boundary = without_unread(problem, sequence, boundary)
    return make_plan(problem, shorter, boundary, "checkmate")


def _add_hint(model: Model, start: Plan) -> None:
    """Tell CP-SAT the R and S of a plan; one of another order is of no use."""
    place = {op_id: k for k, op_id in enumerate(model.order)}
    run: set[tuple[int, int]] = set()
    keep: set[tuple[int, ValueId]] = set()
    written: dict[ValueId, int] = {}
    seen: set[int] = set()
    t = 0
    for op_id in start.sequence:
        op = model.problem.operations[op_id]
        run.add((t, place[op_id]))
        for value in op.reads:
            since = written.get(value, t)
            keep.update((stage, value) for stage in range(since + 1, t + 1))
        written.update((value, t) for value in op.writes)
        seen.add(place[op_id])
        while t in seen:
            t += 1
    for (stage, k), variable in model.run.items():
        if k < stage:
            model.program.add_hint(variable, int((stage, k) in run))
    for key, variable in model.keep.items():
        model.program.add_hint(variable, int(key in keep))
