"""Solves the integer program of `gcpass.solvers.ilp_model` from a warm start.

CP-SAT finds the first feasible point of a large program late, so it gets one: of the
cuts along the price the two next to the budget are mixed. The operations that only the
smaller saved set recomputes fall into connected components (typically one per layer),
and as many of them, in the order of the forward, are saved as the rows allow.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gcpass.solvers.cut import CutResult, boundary_cut
from gcpass.solvers.errors import SolverError
from gcpass.solvers.frontier import frontier
from gcpass.solvers.ilp_model import Model, build, cp_model
from gcpass.solvers.problem import OpId, Problem, Termination, ValueId

HINT_FLOWS = 12
RELATIVE_GAP = 1e-3  # of the extra time: finer than the approximations of the model
SEED = 1

Choice = frozenset[OpId]  # operations to recompute; what is saved follows


@dataclass(frozen=True, slots=True, kw_only=True)
class IlpResult:
    """A saved set for the boundary.

    Attributes:
        status: OPTIMAL for the program to `RELATIVE_GAP` (not for the problem), LIMIT
            when stopped with the best so far, INFEASIBLE when the rows exclude every
            choice or nothing was found within the limits.
        saved: values to save, ascending; held ones and inputs are not listed.
        recomputed: operations to execute in the backward, ascending.
        cost_seconds: recompute costs and tolls of the choice.
    """

    status: Termination
    saved: tuple[ValueId, ...]
    recomputed: tuple[OpId, ...]
    cost_seconds: float


def solve_saved_set(
    problem: Problem,
    budget_bytes: int,
    *,
    hint: CutResult | None = None,
    deterministic_limit: float = 2.0,
    wall_limit_s: float = 10.0,
) -> IlpResult:
    """Return a saved set for the budget.

    Args:
        problem: the problem.
        budget_bytes: limit of modelled memory at the rows.
        hint: choice at the boundary to start from; None: one from the frontier.
        deterministic_limit: CP-SAT's deterministic seconds; the same result each time.
        wall_limit_s: outermost guard in seconds; reaching it is not deterministic.

    Raises:
        SolverError: ortools is missing, or refuses the program.
    """
    network = boundary_cut(problem)
    model = build(problem, network, budget_bytes)
    choices = [frozenset(cut.recomputed) for cut in frontier(network, flows=HINT_FLOWS)]
    if hint is not None:
        choices.insert(0, frozenset(hint.recomputed))
    start = _warm_start(model, choices)
    _add_hint(model, start)
    solver = cp_model().CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = SEED
    solver.parameters.linearization_level = 2  # all rows in the LP: 10 times faster
    solver.parameters.relative_gap_limit = RELATIVE_GAP
    solver.parameters.max_deterministic_time = deterministic_limit
    solver.parameters.max_time_in_seconds = wall_limit_s
    return _result(model, solver, solver.solve(model.program), start)


def _warm_start(model: Model, choices: Sequence[Choice]) -> Choice | None:
    """Return the cheapest choice that fits the rows, None if there is none."""
    fitting = [choice for choice in choices if _fits(model, choice)]
    for more, less in itertools.pairwise(choices):
        if less in fitting and more not in fitting:
            fitting.append(_mixed(model, more, less))
    costs = model.network.moment.costs

    def cost(choice: Choice) -> float:
        return math.fsum(costs[op] for op in choice)

    return min(fitting, key=cost, default=None)


def _mixed(model: Model, more: Choice, less: Choice) -> Choice:
    """Return `less` without the longest run of components that still fits."""
    parts = _components(model, less - more)
    lo, hi = 0, len(parts)  # the first lo parts can be saved, the first hi cannot
    while hi - lo > 1:
        middle = (lo + hi) // 2
        if _fits(model, less.difference(*parts[:middle])):
            lo = middle
        else:
            hi = middle
    return less.difference(*parts[:lo])


def _components(model: Model, ops: Choice) -> list[Choice]:
    """Return the connected components of these operations, by their first."""
    part: dict[OpId, set[OpId]] = {}
    for op in sorted(ops):
        part[op] = {op}
        for value in model.problem.operations[op].reads:
            writer = model.network.moment.writers[value]
            if writer in part and part[writer] is not part[op]:
                joined = part[writer] | part[op]
                part.update(dict.fromkeys(joined, joined))
    return [frozenset(part[op]) for op in sorted(part) if op == min(part[op])]


def _saved_by(model: Model, choice: Choice) -> frozenset[ValueId]:
    """Return what must be saved when exactly these operations are recomputed."""
    read = set(model.network.moment.required)
    for op in choice:
        read.update(model.problem.operations[op].reads)
    for op in choice:
        read.difference_update(model.problem.operations[op].writes)
    return frozenset(value for value in read if value in model.saved)


def _point(model: Model, choice: Choice) -> dict[int, int]:
    """Return the values of all variables, by index, that a choice implies."""
    saved = _saved_by(model, choice)
    point = {v.index: int(value in saved) for value, v in model.saved.items()}
    point.update({v.index: int(op in choice) for op, v in model.again.items()})
    for floor in model.floors:
        least = -floor.allowance
        for index in floor.plus:
            least += point[index]
        for index in floor.minus:
            least -= point[index]
        point[floor.index] = max(point.get(floor.index, 0), least)
    return point


def _add_hint(model: Model, start: Choice | None) -> None:
    if start is None:
        return
    point = _point(model, start)
    chosen = itertools.chain(model.saved.values(), model.again.values())
    variables = {variable.index: variable for variable in chosen}
    variables.update({floor.index: floor.variable for floor in model.floors})
    for index, variable in variables.items():
        model.program.add_hint(variable, point[index])


def _fits(model: Model, choice: Choice) -> bool:
    costs, tolls = model.network.moment.costs, model.network.moment.tolls
    impossible = any(math.isinf(costs[op]) for op in choice)
    if impossible or any(math.isinf(tolls[v]) for v in _saved_by(model, choice)):
        return False
    point = _point(model, choice)
    return all(
        sum(units * point[index] for units, index in row.terms) <= row.room
        for row in model.rows
    )


def _result(model: Model, solver: Any, status: Any, start: Choice | None) -> IlpResult:
    name = solver.status_name(status)
    if name == "MODEL_INVALID":
        raise SolverError(f"CP-SAT refused the program: {model.program.validate()}")
    if name in ("OPTIMAL", "FEASIBLE"):
        saved = [v for v, variable in model.saved.items() if solver.value(variable)]
        again = [op for op, variable in model.again.items() if solver.value(variable)]
        proven = name == "OPTIMAL"
        return _priced(
            model, saved, again, Termination.OPTIMAL if proven else Termination.LIMIT
        )
    if start is not None:  # stopped before it had looked at its warm start
        kept = sorted(_saved_by(model, start))
        return _priced(model, kept, sorted(start), Termination.LIMIT)
    return IlpResult(
        status=Termination.INFEASIBLE, saved=(), recomputed=(), cost_seconds=0.0
    )


def _priced(
    model: Model,
    saved: Sequence[ValueId],
    recomputed: Sequence[OpId],
    status: Termination,
) -> IlpResult:
    tolls = [model.network.moment.tolls[value] for value in saved]
    costs = [model.network.moment.costs[op] for op in recomputed]
    return IlpResult(
        status=status,
        saved=tuple(saved),
        recomputed=tuple(recomputed),
        cost_seconds=math.fsum(tolls + costs),
    )
