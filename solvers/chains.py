"""Plans of the chain methods, for graphs that are chains of stages.

Where every operation must be rebuilt more than once, the recursions of Revolve and
rotor know what greedy evictions do not: which checkpoints to give up first.
"""

from __future__ import annotations

import logging

from gcpass.solvers.classics.revolve import revolve
from gcpass.solvers.classics.rotor import rotor
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
    for method in (revolve, rotor):
        try:
            floor_bytes = method(problem, 0).floor_bytes
            plan = method(problem, floor_bytes).plan
        except SolverError as error:
            log.debug("no chain of stages: %s", error)
            continue
        if plan is not None:
            plans.append(plan)
    return plans
