"""Plans of the chain methods, for graphs that are chains of stages.

Where every operation must be rebuilt more than once, the recursions of Revolve and
rotor know what greedy evictions do not: which checkpoints to give up first.
"""

from __future__ import annotations

import logging
from functools import cache

from gcpass.solvers.classics.choose import cheapest
from gcpass.solvers.classics.revolve import by_slots, revolve
from gcpass.solvers.classics.rotor import by_level, rotor
from gcpass.solvers.errors import SolverError
from gcpass.solvers.problem import Plan, Problem

log = logging.getLogger("gcpass.solvers")


def chain_plans(problem: Problem, budget_bytes: int) -> list[Plan]:
    """Return the plans of both methods that fit the budget."""
    plans = []
    for method in (revolve, rotor):
        try:
            plan = method(problem, budget_bytes).plan
        except SolverError as error:  # what it cannot do, the other methods may
            log.debug("no chain of stages: %s", error)
            continue
        if plan is not None:
            plans.append(plan)
    return plans


def lowest_chain_plans(problem: Problem) -> list[Plan]:
    """Return the plans of the least peak that each method reaches."""
    plans = []
    for knob_of in (by_slots, by_level):
        try:
            knob, positions = knob_of(problem)
            built = cache(knob)  # the floor must be known to ask for it
            floor_bytes = cheapest(problem, built, positions, 0).floor_bytes
            plan = cheapest(problem, built, positions, floor_bytes).plan
        except SolverError as error:
            log.debug("no chain of stages: %s", error)
            continue
        if plan is not None:
            plans.append(plan)
    return plans
