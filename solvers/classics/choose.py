"""Chooses among the plans of one method: the cheapest that fits the budget.

A classic method has one knob (segments, slots, saved bytes) that trades time for
memory, and none of them models the peak of a real graph. So every plan is built and
its peak simulated. Where the knob has more positions than `GRID`, that many are tried,
and then those between the best that fits and its cheaper neighbour by bisection.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from gcpass.solvers.moment import needed_operations
from gcpass.solvers.problem import Plan, Problem, Solution, Termination

GRID = 32  # plans to build at least; on chains of 100 stages costs lie 3 % apart
PROVEN = 1e-9  # relative; sums of the same seconds in another order

Knob = Callable[[int], Plan]


def trivial_bound_seconds(problem: Problem) -> float:
    """Return the time of every needed operation once: no plan takes less."""
    needed = sorted(needed_operations(problem))
    return math.fsum(problem.operations[op].cost_seconds for op in needed)


def solution(
    problem: Problem,
    plan: Plan | None,
    floor_bytes: int,
    bound_seconds: float | None = None,
) -> Solution:
    """Return the solution of a method that worked through its plans.

    Args:
        problem: the problem.
        plan: the best plan within the budget, None if there is none.
        floor_bytes: least peak of the method.
        bound_seconds: proven for any plan; None: the trivial bound.
    """
    if bound_seconds is None:
        bound_seconds = trivial_bound_seconds(problem)
    termination = Termination.INFEASIBLE
    if plan is not None:
        proven = plan.cost_seconds <= bound_seconds * (1 + PROVEN)
        termination = Termination.OPTIMAL if proven else Termination.FEASIBLE
        bound_seconds = min(bound_seconds, plan.cost_seconds)
    return Solution(
        plan=plan,
        termination=termination,
        bound_seconds=bound_seconds,
        floor_bytes=floor_bytes,
    )


def cheapest(
    problem: Problem, knob: Knob, positions: int, budget_bytes: int | None
) -> Solution:
    """Return the cheapest plan within the budget, of equal ones that of least peak.

    `floor_bytes` is the least peak of the plans that are tried for every budget, or
    that of the plan found.

    Args:
        problem: the problem.
        knob: builds the plan of a position.
        positions: how many there are, at least 1; position 0 is the cheapest and costs
            should grow from there (only bisection relies on it).
        budget_bytes: limit of the peak; None: no limit.
    """
    tried = {i: knob(i) for i in _grid(positions)}
    floor = min(plan.peak_bytes for plan in tried.values())
    while (position := _next(tried, budget_bytes)) is not None:
        tried[position] = knob(position)
    best = cheapest_of(problem, tuple(tried.values()), budget_bytes)
    if best.plan is not None:
        floor = min(floor, best.plan.peak_bytes)
    return replace(best, floor_bytes=floor)


def cheapest_of(
    problem: Problem, plans: Sequence[Plan], budget_bytes: int | None
) -> Solution:
    """Return the cheapest of at least one plan within the budget."""
    fitting = [plan for plan in plans if _fits(plan, budget_bytes)]
    best = min(fitting, key=_price, default=None)
    return solution(problem, best, min(plan.peak_bytes for plan in plans))


def _next(tried: Mapping[int, Plan], budget_bytes: int | None) -> int | None:
    """Return a position between the best that fits and the one tried before it."""
    fitting = [i for i in sorted(tried) if _fits(tried[i], budget_bytes)]
    if not fitting:
        return None
    order = sorted(tried)
    best = min(fitting, key=lambda i: _price(tried[i]))
    at = bisect_left(order, best)
    if at == 0 or order[at - 1] == best - 1:
        return None
    return (order[at - 1] + best) // 2


def _grid(positions: int) -> list[int]:
    if positions <= GRID:
        return list(range(positions))
    return sorted({i * (positions - 1) // (GRID - 1) for i in range(GRID)})


def _fits(plan: Plan, budget_bytes: int | None) -> bool:
    return budget_bytes is None or plan.peak_bytes <= budget_bytes


def _price(plan: Plan) -> tuple[float, int]:
    return plan.cost_seconds, plan.peak_bytes
