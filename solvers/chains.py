"""Plans of the chain methods, for graphs that are chains of stages.

Where every operation must be rebuilt more than once, the recursions of Revolve and
rotor know what greedy evictions do not: which checkpoints to give up first.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache

from gcpass.solvers.classics.choose import Knob, cheapest
from gcpass.solvers.classics.revolve import by_slots
from gcpass.solvers.classics.rotor import by_level
from gcpass.solvers.errors import SolverError
from gcpass.solvers.problem import Plan, Problem, Solution

log = logging.getLogger("gcpass.solvers")


@dataclass(slots=True, kw_only=True)
class Chains:
    """The plans of both methods for one problem; each is built once for all budgets."""

    problem: Problem
    _methods: list[tuple[Knob, int]] | None = None

    def within(self, budget_bytes: int) -> list[Plan]:
        """Return each method's cheapest plan that fits the budget."""
        found = (self._solved(*method, budget_bytes) for method in self._built())
        return [s.plan for s in found if s is not None and s.plan is not None]

    def lowest(self) -> list[Plan]:
        """Return each method's cheapest plan of the least peak that it reaches."""
        plans = []
        for method in self._built():
            tried = self._solved(*method, 0)
            found = tried and self._solved(*method, tried.floor_bytes)
            if found is not None and found.plan is not None:
                plans.append(found.plan)
        return plans

    def _built(self) -> list[tuple[Knob, int]]:
        if self._methods is None:
            methods: list[tuple[Knob, int]] = []
            for knob_of in (by_slots, by_level):
                try:
                    knob, positions = knob_of(self.problem)
                except SolverError as error:
                    log.debug("no chain of stages: %s", error)
                    continue
                methods.append((cache(knob), positions))
            self._methods = methods
        return self._methods

    def _solved(self, knob: Knob, positions: int, budget_bytes: int) -> Solution | None:
        try:
            return cheapest(self.problem, knob, positions, budget_bytes)
        except SolverError as error:  # what it cannot do, the other methods may
            log.debug("no chain of stages: %s", error)
            return None
