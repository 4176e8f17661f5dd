"""The solver that gcpass uses: a plan for a budget, with a bound on every plan.

A `Planner` keeps what the solves of one problem share: the cut problems of its bound
and the sequences found by `gcpass.solvers.search`.
"""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass

from gcpass.solvers.bound import Bound, Moments, given_order, moments
from gcpass.solvers.errors import SolverError
from gcpass.solvers.problem import Plan, Problem, Solution, Termination
from gcpass.solvers.search import Search, warm_up

log = logging.getLogger("gcpass.solvers")

NO_BUDGET = 1 << 62  # bytes
PIVOTS = (16, 128)  # moments that bounds look at: as a rule, and when there is time
PIVOT_OPERATIONS = 200_000  # pivots times operations: about two seconds
ANNEALED_SHARE = 0.5  # of the time limit; building and proving take the rest
MOVE_SECONDS = 0.9e-6  # of one worker, and as much again for each edge at an operation
EDGE_SECONDS = 0.15e-6


def solve(
    problem: Problem, budget_bytes: int, *, time_limit_s: float = 10.0
) -> Solution:
    """Return the cheapest plan found within the budget, with a bound on all.

    The limit is turned into a number of annealing moves from the size of the problem
    alone, so on a machine that is fast enough the result does not depend on its speed.
    On a slower one the limit stops between two parts of the work, and the solution
    says so.

    Args:
        problem: the problem.
        budget_bytes: limit of the peak.
        time_limit_s: seconds; 0: construct a plan only.
    """
    planner = Planner(
        problem=problem,
        moves=moves_for(problem, time_limit_s),
        deadline=time.monotonic() + max(time_limit_s, 1.0),
    )
    return planner.solve(budget_bytes)


def moves_for(problem: Problem, time_limit_s: float) -> int:
    """Return how many annealing moves a worker makes within a time limit."""
    edges = sum(len(op.reads) for op in problem.operations)
    degree = edges / max(1, len(problem.operations))
    return int(ANNEALED_SHARE * time_limit_s / (MOVE_SECONDS + EDGE_SECONDS * degree))


@dataclass(slots=True, kw_only=True)
class Planner:
    """Solves one problem for any number of budgets.

    Attributes:
        problem: the problem.
        method: "auto", "min_cut" or "greedy".
        moves: annealing moves per budget; 0: none.
        deadline: `time.monotonic()` after which no further plan is tried.
        strict: raise when ortools fails, instead of going on without it.
    """

    problem: Problem
    method: str = "auto"
    moves: int = 0
    deadline: float = math.inf
    strict: bool = False
    _engine: Search | None = None
    _moments: Moments | None = None

    def on(self, problem: Problem) -> Planner:
        """Return a planner of another problem, with the same settings."""
        return Planner(
            problem=problem,
            method=self.method,
            moves=self.moves,
            deadline=self.deadline,
            strict=self.strict,
        )

    @property
    def fastest(self) -> Plan:
        """The plan without a budget."""
        return self._method().fastest

    @property
    def floor(self) -> Plan:
        """The plan of the least peak that the methods reach."""
        return self._method().floor

    def learn(self, plan: Plan) -> None:
        """Take a valid plan of the problem, found elsewhere, into account."""
        self._method().learn(plan)

    def solve(self, budget_bytes: int | None) -> Solution:
        """Return the cheapest plan within the budget, with a bound on any plan."""
        engine = self._method()
        plan = engine.fastest
        if budget_bytes is not None and plan.peak_bytes > budget_bytes:
            found = engine.within(budget_bytes)
            if found is None and engine.floor.peak_bytes <= budget_bytes:
                found = engine.floor
            if found is None:
                return self._without_plan(engine)
            plan = found
        bound = self.bound(budget_bytes).seconds
        limit = self._limit(engine)
        if plan.cost_seconds <= bound * (1 + 1e-9):
            termination, limit = Termination.OPTIMAL, None
        else:
            termination = Termination.LIMIT if limit else Termination.FEASIBLE
        return Solution(
            plan=plan,
            termination=termination,
            bound_seconds=min(bound, plan.cost_seconds),
            floor_bytes=min(engine.reached_bytes, plan.peak_bytes),
            limit=limit,
        )

    def bound(self, budget_bytes: int | None) -> Bound:
        """Return the proven bound; the trivial one when ortools is not usable."""
        try:
            return self._cuts().bound(
                NO_BUDGET if budget_bytes is None else budget_bytes
            )
        except SolverError as error:
            log.warning("no bound beyond the trivial one: %s", error)
            sequence, _ = given_order(self.problem)
            seconds = math.fsum(
                self.problem.operations[o].cost_seconds for o in sequence
            )
            return Bound(seconds=seconds, infeasible_proven=False, pivot=None)

    def _without_plan(self, engine: Search) -> Solution:
        return Solution(
            plan=None,
            termination=Termination.INFEASIBLE,
            bound_seconds=math.inf,
            floor_bytes=engine.floor.peak_bytes,
            limit=self._limit(engine),
        )

    def _limit(self, engine: Search) -> str | None:
        if engine.hit_limit:
            return "time"
        return "moves" if self.moves else None

    def _cuts(self) -> Moments:
        if self._moments is None:
            count = PIVOTS[0]
            if self.moves:
                fair = PIVOT_OPERATIONS // max(1, len(self.problem.operations))
                count = max(PIVOTS[0], min(PIVOTS[1], fair))
            self._moments = moments(self.problem, max_pivots=count)
        return self._moments

    def _method(self) -> Search:
        if self._engine is None:
            started = time.monotonic()
            warm_up()
            self.deadline += time.monotonic() - started
            self._engine = Search(
                problem=self.problem,
                moments=self._cuts(),
                method=self.method,
                moves=self.moves,
                strict=self.strict,
            )
        self._engine.deadline = self.deadline
        return self._engine
