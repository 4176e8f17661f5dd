"""Plans for problems in which every value is materialized, such as published ones.

Sequences are constructed from cuts and evictions, by the chain methods where the graph
is a chain of stages, and improved by annealing when moves are allowed. Everything found
is kept: a later budget chooses among it, too.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache

from gcpass.solvers.accelerate import COMPILED
from gcpass.solvers.bound import Moments, floor_lower_bound_bytes, moments
from gcpass.solvers.chains import chain_plans, lowest_chain_plans
from gcpass.solvers.construct import Builder, Found
from gcpass.solvers.errors import SolverError
from gcpass.solvers.liveness import make_plan
from gcpass.solvers.network import network_of
from gcpass.solvers.portfolio import improve, rank
from gcpass.solvers.problem import (
    Operation,
    Phase,
    Plan,
    Problem,
    Value,
    ValueId,
)
from gcpass.solvers.timeline import BARRED_BYTES

log = logging.getLogger("gcpass.solvers")

CHAIN_GAP = 1.01  # of the bound: the chain methods are not asked below
CHAIN_STAGES = 4  # narrow places that make a chain
FLOOR_RATIOS = (0.0, 0.75, 0.9, 0.97, 0.99)  # of the least peak, as targets
AGREEMENT = (4, 0.002)  # sequences whose peaks lie this close together: the floor


@dataclass(slots=True, kw_only=True)
class FlatPlanner:
    """Solves one problem without fusible operations for any number of budgets.

    Attributes:
        problem: the problem.
        moments: its cut problems.
        moves: annealing moves of each worker, per budget; 0: none.
        deadline: `time.monotonic()` after which no further sequence is built.
        strict: raise when ortools fails, instead of going on without it.
        hit_limit: the deadline stopped something.
    """

    problem: Problem
    moments: Moments
    moves: int = 0
    deadline: float = math.inf
    strict: bool = False
    hit_limit: bool = False
    _builder: Builder = field(init=False)
    _given: Found = field(init=False)
    _archive: list[Found] = field(init=False)
    _floor: Found | None = None
    _fastest: Plan | None = None

    def __post_init__(self) -> None:
        net, numbering = network_of(self.problem)
        self._builder = Builder(net=net, numbering=numbering, moments=self.moments)
        self._given = self._builder.given()
        self._archive = [self._given]

    @property
    def fastest(self) -> Plan:
        """The plan without a budget."""
        if self._fastest is None:
            self._fastest = self.within(BARRED_BYTES - 1)
        if self._fastest is None:
            raise SolverError("no set of saved values satisfies the constraints")
        return self._fastest

    @property
    def reached_bytes(self) -> int:
        """The least peak found so far."""
        return self._least().peak_bytes

    @property
    def floor(self) -> Plan:
        """The plan of the least peak reached."""
        if self._floor is None:
            self._floor = self._search_floor()
        return self._plan(self._floor)

    def within(self, budget_bytes: int) -> Plan | None:
        """Return the cheapest plan found within the budget."""
        if self._given.peak_bytes <= budget_bytes:
            return self._plan(self._given)
        self._archive += self._built(budget_bytes)
        self._add_chain_plans(budget_bytes)
        if self.moves and self._lower_bound() <= budget_bytes:
            best, stopped = improve(
                self._builder.net,
                self._archive,
                budget_bytes,
                self.moves,
                self.deadline,
                self._bound_seconds(budget_bytes) * (1 + 1e-12),
            )
            self.hit_limit |= stopped
            self._archive.append(best)
        best = min(self._archive, key=lambda found: rank(found, budget_bytes))
        return self._plan(best) if best.peak_bytes <= budget_bytes else None

    def _built(self, budget_bytes: int) -> Iterator[Found]:
        try:
            for found in self._builder.build(budget_bytes):
                yield found
                if time.monotonic() > self.deadline:
                    self.hit_limit = True
                    return
        except SolverError as error:
            if self.strict:
                raise
            log.warning("planning by eviction only: %s", error)
            yield self._builder.fit(self._given.sequence, budget_bytes)

    def _add_chain_plans(self, budget_bytes: int) -> None:
        """Add what the chain methods find where construction may have missed much."""
        best = min(self._archive, key=lambda found: rank(found, budget_bytes))
        enough = CHAIN_GAP * self._bound_seconds(budget_bytes)
        fits = best.peak_bytes <= budget_bytes
        if (fits and best.cost_seconds <= enough) or not self._is_chain(budget_bytes):
            return
        self._add(chain_plans(self.problem, budget_bytes), budget_bytes)

    def _is_chain(self, budget_bytes: int) -> bool:
        try:
            return self._builder.narrow_places(budget_bytes) >= CHAIN_STAGES
        except SolverError:
            return False

    def _add(self, plans: Iterable[Plan], budget_bytes: int) -> None:
        for plan in plans:
            numbers = self._builder.numbering.numbers(plan.sequence, plan.boundary)
            found = self._builder.fit(numbers, budget_bytes)
            self._archive.append(dataclasses.replace(found, origin=plan.origin))

    def _search_floor(self) -> Found:
        """Return the lowest sequence that construction finds.

        A target far below what can be reached ends in a sequence that is stuck early,
        so targets start low and come closer to the least peak while that helps. Where
        several ways end at the same peak, nothing lower is expected.
        """
        low = self._lower_bound()
        if self._is_chain(low):
            for plan in lowest_chain_plans(self.problem):
                self._add([plan], plan.peak_bytes)
        for ratio in FLOOR_RATIOS:
            before = None
            while before != self.reached_bytes and not self.hit_limit:
                before = self.reached_bytes
                if before <= low or self._agree():
                    return self._least()
                self._archive += self._built(max(low, int(before * ratio)))
        return self._least()

    def _agree(self) -> bool:
        limit = self.reached_bytes * (1 + AGREEMENT[1])
        return sum(x.peak_bytes <= limit for x in self._archive) >= AGREEMENT[0]

    def _least(self) -> Found:
        return min(
            self._archive, key=lambda found: (found.peak_bytes, found.cost_seconds)
        )

    def _lower_bound(self) -> int:
        try:
            return floor_lower_bound_bytes(self.problem)
        except SolverError:
            return 0

    def _bound_seconds(self, budget_bytes: int) -> float:
        try:
            return self.moments.bound(budget_bytes).seconds
        except SolverError:
            return self.moments.base_seconds

    def _plan(self, found: Found) -> Plan:
        sequence, boundary = self._builder.numbering.sequence(found.sequence)
        plan = make_plan(self.problem, sequence, boundary, found.origin)
        assert plan.peak_bytes == found.peak_bytes, "the timeline is the simulation"
        return plan


@cache
def warm_up() -> None:
    """Load or compile the inner loops, which no time limit should pay for."""
    if not COMPILED:
        return
    layers = 8
    reads = [[], *([i] for i in range(layers - 1))]
    reads += [[layers + i - 1, layers - 1 - i] for i in range(layers)]
    operations = tuple(
        Operation(
            reads=tuple(ValueId(v) for v in sorted(set(values))),
            writes=(ValueId(op_id),),
            cost_seconds=1.0,
            phase=Phase.BACKWARD,
        )
        for op_id, values in enumerate(reads)
    )
    values = tuple(Value(size_bytes=1) for _ in operations)
    problem = Problem(operations=operations, values=values)
    planner = FlatPlanner(problem=problem, moments=moments(problem), moves=256)
    for budget_bytes in (7, 6, 5):
        planner.within(budget_bytes)
