"""The search for one problem: sequences built for budgets, and all that was found kept.

Sequences are constructed from cuts and evictions, from the integer program's saved set
where these leave a gap to the bound, by the chain methods where the graph is a chain of
stages, and improved by annealing when moves are allowed. A later budget chooses among
all that earlier ones found.

Construction for a little less memory sometimes finds a cheaper sequence. So without
annealing it is done for a few caps of a fixed grid below the budget, too: two budgets
that are solved apart then choose among nearly the same, and the larger one is hardly
ever dearer.
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
from gcpass.solvers.chains import Chains
from gcpass.solvers.construct import Builder, Found, rank
from gcpass.solvers.errors import SolverError
from gcpass.solvers.evict import RULES
from gcpass.solvers.ilp import solve_saved_set
from gcpass.solvers.liveness import make_plan
from gcpass.solvers.network import NONE, network_of
from gcpass.solvers.portfolio import improve
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

GRID_RATIO = 0.97  # of one cap to the next
GRID_CAPS = 4  # caps of the grid below a budget that are built for
WORTH = 1.003  # of the bound: the integer program is not asked below
INTEGER_WORK = 1.0  # CP-SAT's deterministic time; about 2 s at 1,000 operations
INTEGER_WALL_S = 20.0  # outermost guard; the work limit stops it before
CHAIN_GAP = 1.01  # of the bound: the chain methods are not asked below
CHAIN_COST = 1.05  # of the fastest sequence: likewise
CHAIN_STAGES = 4  # narrow places that make a chain
FLOOR_RATIOS = (0.0, 0.75, 0.9, 0.97, 0.99)  # of the least peak, as targets
AGREEMENT = (4, 0.002)  # sequences whose peaks lie this close together: the floor


@dataclass(slots=True, kw_only=True)
class Search:
    """Finds sequences of one problem for any number of budgets.

    Attributes:
        problem: the problem.
        moments: its cut problems.
        method: "auto", "min_cut" (cuts and evictions) or "greedy" (evictions).
        moves: annealing moves of each worker, per budget; 0: none.
        deadline: `time.monotonic()` after which no further sequence is built.
        strict: raise when ortools fails, instead of going on without it.
        hit_limit: the deadline stopped something.
    """

    problem: Problem
    moments: Moments
    method: str = "auto"
    moves: int = 0
    deadline: float = math.inf
    strict: bool = False
    hit_limit: bool = False
    _builder: Builder = field(init=False)
    _given: Found = field(init=False)
    _archive: list[Found] = field(init=False)
    _chains: Chains = field(init=False)
    _floor: Found | None = None
    _fastest: Found | None = None

    def __post_init__(self) -> None:
        net, numbering = network_of(self.problem)
        self._builder = Builder(net=net, numbering=numbering, moments=self.moments)
        self._given = self._builder.given()
        self._archive = [self._given]
        self._chains = Chains(problem=self.problem)

    @property
    def fastest(self) -> Plan:
        """The plan without a budget.

        Raises:
            SolverError: the constraints exclude every plan.
        """
        return self._plan(self._without_budget())

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
        fastest = self._without_budget()
        if fastest.peak_bytes <= budget_bytes:
            return self._plan(fastest)
        self._build(budget_bytes)
        if self.method == "auto":
            if not self.moves and self._best(budget_bytes).peak_bytes <= budget_bytes:
                for cap in self._grid(budget_bytes):
                    self._build(cap)
            self._add_integer_plan(budget_bytes)
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
        best = self._best(budget_bytes)
        return self._plan(best) if best.peak_bytes <= budget_bytes else None

    def learn(self, plan: Plan) -> None:
        """Take a valid plan of the problem into account."""
        numbers = self._builder.numbering.numbers(plan.sequence, plan.boundary)
        found = self._builder.measure(numbers)
        self._archive.append(dataclasses.replace(found, origin=plan.origin))

    def _without_budget(self) -> Found:
        if self._fastest is None:
            no_limit = BARRED_BYTES - 1
            if self._builder.net.fuses or self._given.peak_bytes > no_limit:
                self._build(no_limit)
            self._fastest = self._best(no_limit)
            if self._fastest.peak_bytes > no_limit:
                raise SolverError("no set of saved values satisfies the constraints")
        return self._fastest

    def _best(self, budget_bytes: int) -> Found:
        return min(self._archive, key=lambda found: rank(found, budget_bytes))

    def _grid(self, budget_bytes: int) -> Iterator[int]:
        """Yield the caps of the grid next below a budget."""
        top = max(1, self._without_budget().peak_bytes)
        level = math.floor(math.log(max(1, budget_bytes) / top, GRID_RATIO)) + 1
        for i in range(level, level + GRID_CAPS):
            cap = int(top * GRID_RATIO**i)
            if cap < budget_bytes and time.monotonic() <= self.deadline:
                yield cap

    def _build(self, budget_bytes: int) -> None:
        """Construct for a budget until time is up or several ways end at one floor."""
        for found in self._sequences(budget_bytes):
            self._archive.append(found)
            if time.monotonic() > self.deadline:
                self.hit_limit = True
                return
            if self.reached_bytes > budget_bytes and self._agree():
                return

    def _sequences(self, budget_bytes: int) -> Iterator[Found]:
        if self.method == "greedy":
            for rule in RULES:
                yield self._builder.fit(self._given.sequence, budget_bytes, rule)
            return
        try:
            yield from self._builder.build(budget_bytes, all_rules=not self.moves)
        except SolverError as error:
            if self.strict:
                raise
            log.warning("planning by eviction only: %s", error)
            yield self._builder.fit(self._given.sequence, budget_bytes)

    def _add_integer_plan(self, budget_bytes: int) -> None:
        """Add what comes of the integer program's saved set."""
        enough = WORTH * self._bound_seconds(budget_bytes)
        if self._builder.numbering.turn == NONE or not self._exceeds(
            enough, budget_bytes
        ):
            return
        try:
            result = solve_saved_set(
                self.problem,
                budget_bytes,
                deterministic_limit=INTEGER_WORK,
                wall_limit_s=INTEGER_WALL_S,
            )
        except SolverError as error:
            if self.strict:
                raise
            log.warning("planning without the integer program: %s", error)
            return
        if result.saved or result.recomputed:
            laid_out = self._builder.from_recomputed(result.recomputed)
            for rule in RULES:
                found = self._builder.fit(laid_out, budget_bytes, rule)
                self._archive.append(
                    dataclasses.replace(found, origin="integer program")
                )

    def _add_chain_plans(self, budget_bytes: int) -> None:
        """Add what the chain methods find where construction may have missed much."""
        enough = CHAIN_GAP * self._bound_seconds(budget_bytes)
        enough = max(enough, CHAIN_COST * self._without_budget().cost_seconds)
        if self._exceeds(enough, budget_bytes) and self._is_chain(budget_bytes):
            self._add(self._chains.within(budget_bytes), budget_bytes)

    def _exceeds(self, seconds: float, budget_bytes: int) -> bool:
        """Whether nothing found fits in these seconds, and there is time."""
        if time.monotonic() > self.deadline:
            self.hit_limit = True
            return False
        best = self._best(budget_bytes)
        return best.peak_bytes > budget_bytes or best.cost_seconds > seconds

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
        if self.method == "auto" and self._is_chain(low):
            for plan in self._chains.lowest():
                self._add([plan], plan.peak_bytes)
        for ratio in FLOOR_RATIOS:
            before = None
            while before != self.reached_bytes and not self.hit_limit:
                before = self.reached_bytes
                if before <= low or self._agree():
                    break
                self._build(max(low, int(before * ratio)))
        target = max(low, int(self.reached_bytes * FLOOR_RATIOS[-2]))
        for rule in RULES[1:]:
            if self.reached_bytes > low and time.monotonic() <= self.deadline:
                found = self._builder.fit(self._given.sequence, target, rule)
                self._archive.append(found)
        return self._least()

    def _agree(self) -> bool:
        if self.reached_bytes >= BARRED_BYTES:
            return False  # what must not cross the boundary still does
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
    search = Search(problem=problem, moments=moments(problem), moves=256)
    for budget_bytes in (7, 6, 5):
        search.within(budget_bytes)
