"""Removes executions that a plan can do without.

An execution is redundant when the sequence stays valid without it (the value of an
earlier execution is read instead, and lives longer) and the peak stays within the
budget. Repeats are tried dearest first, so a plan loses what costs most while bytes
are left; repeats of one operation in a row are tried together first.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from gcpass.solvers.liveness import make_plan
from gcpass.solvers.problem import OpId, Plan, Problem

MAX_TRIES = 500  # sequences simulated per plan; work, not time, so that it repeats
WORTH = 1e-5  # of the plan's time: repeats that cost less are not tried one by one


def drop_redundant(
    problem: Problem, plan: Plan, budget_bytes: int, *, deadline: float
) -> Plan:
    """Return a plan without the repeats that the budget does not need.

    Args:
        problem: the problem.
        plan: a valid plan whose peak is within the budget.
        budget_bytes: limit on the simulated peak.
        deadline: `time.monotonic()` at which to stop; the work is in a fixed order,
            so only the point of stopping depends on it.
    """
    best = plan
    least = WORTH * plan.cost_seconds
    left = MAX_TRIES
    for op_id in _repeated(problem, plan.sequence):
        if time.monotonic() > deadline or left <= 0:
            break
        one_by_one = problem.operations[op_id].cost_seconds >= least
        best, tries = _without(
            problem, best, op_id, budget_bytes, one_by_one=one_by_one
        )
        left -= tries
    return best


def _repeated(problem: Problem, sequence: Sequence[OpId]) -> list[OpId]:
    """Return repeated operations, dearest first."""
    counts: dict[OpId, int] = {}
    for op_id in sequence:
        counts[op_id] = counts.get(op_id, 0) + 1
    return sorted(
        (o for o, n in counts.items() if n > 1),
        key=lambda o: (-problem.operations[o].cost_seconds, o),
    )


def _without(
    problem: Problem,
    plan: Plan,
    op_id: OpId,
    budget_bytes: int,
    *,
    one_by_one: bool,
) -> tuple[Plan, int]:
    """Return the plan without as many repeats of an operation as fit, and the tries."""
    places = [t for t, o in enumerate(plan.sequence) if o == op_id][1:]
    together = _try(problem, plan, frozenset(places), budget_bytes)
    if together is not None:
        return together, 1
    if len(places) == 1 or not one_by_one:
        return plan, 1
    best = plan
    for back in range(len(places), 0, -1):  # later ones first: places stay valid
        shorter = _try(problem, best, frozenset((places[back - 1],)), budget_bytes)
        best = best if shorter is None else shorter
    return best, 1 + len(places)


def _try(
    problem: Problem, plan: Plan, places: frozenset[int], budget_bytes: int
) -> Plan | None:
    """Return the shorter plan, None when it is invalid or over the budget."""
    sequence = [o for t, o in enumerate(plan.sequence) if t not in places]
    boundary = plan.boundary - sum(1 for t in places if t < plan.boundary)
    if not _may_cross(problem, sequence, boundary):
        return None
    shorter = make_plan(problem, sequence, boundary, plan.origin)
    fits = shorter.peak_bytes <= budget_bytes
    return shorter if fits and shorter.cost_seconds <= plan.cost_seconds else None


def _may_cross(problem: Problem, sequence: Sequence[OpId], boundary: int) -> bool:
    """Whether every value that the backward takes from the forward may be saved."""
    fresh: set[int] = set()
    early: set[int] = set()
    for t, op_id in enumerate(sequence):
        op = problem.operations[op_id]
        if t < boundary:
            early.update(op.writes)
            continue
        for value in op.reads:
            if value in fresh or value not in early:
                continue
            data = problem.values[value]
            if not data.savable and not data.held:
                return False
        fresh.update(op.writes)
    return True
