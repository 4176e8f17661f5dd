"""Plans for problems with fused values: saved sets from cuts, built under caps.

The saved sets are points of the frontier at the boundary, and one from the integer
program; `gcpass.solvers.schedule` builds a sequence for each under a memory cap. Caps
come from a fixed geometric grid, never from the budget itself: a larger budget chooses
among a superset, so it cannot get a dearer plan.
"""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass, field

from gcpass.solvers.chains import chain_plans, lowest_chain_plans
from gcpass.solvers.cut import CutResult, boundary_cut
from gcpass.solvers.errors import SolverError
from gcpass.solvers.frontier import frontier
from gcpass.solvers.ilp import solve_saved_set
from gcpass.solvers.liveness import make_plan
from gcpass.solvers.polish import drop_redundant
from gcpass.solvers.problem import Phase, Plan, Problem, ValueId
from gcpass.solvers.schedule import Index, build, index_problem

log = logging.getLogger("gcpass.solvers")

GRID_RATIO = 0.97  # of one cap to the next: plans lie at most 3 % apart
SAVED_SETS = 6  # of the frontier, tried at every cap
CAPS_BELOW = 4  # caps to look further down after the first that fits
FLOOR_PRECISION = 0.01  # of the cap, when searching the least peak
CHAIN_OVERHEAD = 1.15  # of the fastest plan: half a forward is recomputed
INTEGER_WORK = 1.0  # CP-SAT's deterministic time; about 2 s at 1,000 operations
INTEGER_WALL_S = 20.0  # outermost guard; the work limit stops it before


@dataclass(slots=True, kw_only=True)
class CappedPlanner:
    """Solves one problem for any number of budgets.

    Attributes:
        problem: the problem.
        method: "auto", "min_cut" or "greedy".
        deadline: `time.monotonic()` after which no further plan is tried.
        strict: raise when ortools fails, instead of going on without it.
    """

    problem: Problem
    method: str = "auto"
    deadline: float = math.inf
    strict: bool = False
    hit_limit: bool = False
    _index: Index | None = None
    _sets: list[tuple[ValueId, ...]] | None = None
    _plans: dict[tuple[int, int], Plan] = field(default_factory=dict)
    _fastest: Plan | None = None
    _floor: Plan | None = None

    @property
    def fastest(self) -> Plan:
        """The plan without a budget."""
        if self._fastest is None:
            plan = self._build(0, math.inf)
            self._fastest = self._merge(plan, plan.peak_bytes)
        return self._fastest

    @property
    def reached_bytes(self) -> int:
        """The least peak found so far."""
        return min(plan.peak_bytes for plan in (self.floor, self.fastest))

    @property
    def floor(self) -> Plan:
        """The plan of the least peak that the methods reach."""
        if self._floor is None:
            self._floor = self._search_floor()
        return self._floor

    # --- search -------------------------------------------------------------------

    def within(self, budget_bytes: int) -> Plan | None:
        """Return the cheapest plan with a peak within the budget."""
        if self.fastest.peak_bytes <= budget_bytes:
            return self.fastest
        best: Plan | None = None
        level = self._level(budget_bytes)
        found_at: int | None = None
        while found_at is None or level <= found_at + CAPS_BELOW:
            cap = self._cap(level)
            if cap < self._least_cap() or time.monotonic() > self.deadline:
                self.hit_limit |= time.monotonic() > self.deadline
                break
            for choice in range(len(self.saved_sets)):
                plan = self._build(choice, cap)
                if plan.peak_bytes > budget_bytes:
                    continue
                found_at = level if found_at is None else found_at
                if best is None or _better(plan, best):
                    best = plan
            level += 1
        integer = self._integer_set(budget_bytes)
        for factor in (1.0, GRID_RATIO, GRID_RATIO**2) if integer else ():
            assert integer is not None
            plan = self._build_for(integer, budget_bytes * factor, "integer program")
            if plan.peak_bytes <= budget_bytes:
                if best is not None:
                    best = self._merge(best, budget_bytes)
                plan = self._merge(plan, budget_bytes)
                best = plan if best is None or _better(plan, best) else best
                break
        else:
            best = None if best is None else self._merge(best, budget_bytes)
        if self._is_dear(best):
            for plan in chain_plans(self.problem, budget_bytes):
                plan = self._merge(plan, budget_bytes)
                best = plan if best is None or _better(plan, best) else best
        floor = self.floor
        if floor.peak_bytes <= budget_bytes and (best is None or _better(floor, best)):
            best = floor
        return best

    def _is_dear(self, best: Plan | None) -> bool:
        """Whether the chain methods may do better, which recompute more than once."""
        if self.method != "auto" or time.monotonic() > self.deadline:
            return False
        fastest = self.fastest.cost_seconds
        return best is None or best.cost_seconds > CHAIN_OVERHEAD * fastest

    def _search_floor(self) -> Plan:
        """Return a plan of the least peak found by bisection on the cap.

        Two saved sets suffice to find how low eviction gets; every set is then tried
        at the caps around the least peak, for the cheapest plan that reaches it.
        """
        count = len(self.saved_sets)
        least = self.fastest
        for choice in sorted({0, count // 2}):
            low, high = 0.0, float(least.peak_bytes)
            while high - low > FLOOR_PRECISION * high:
                middle = (low + high) / 2
                plan = self._build(choice, middle)
                least = min(least, plan, key=_lowest)
                if plan.peak_bytes <= middle * (1 + FLOOR_PRECISION):
                    high = middle
                else:
                    low = middle
        for choice in range(count):
            for factor in (1.0, GRID_RATIO):
                plan = self._build(choice, least.peak_bytes * factor)
                least = min(least, plan, key=_lowest)
        for plan in lowest_chain_plans(self.problem) if self.method == "auto" else ():
            least = min(least, plan, key=_lowest)
        return self._merge(least, least.peak_bytes)

    def _merge(self, plan: Plan, budget_bytes: int) -> Plan:
        return drop_redundant(self.problem, plan, budget_bytes, deadline=self.deadline)

    def _build(self, choice: int, cap: float) -> Plan:
        key = (choice, -1 if cap == math.inf else int(cap))
        if key not in self._plans:
            name = "eviction" if choice == 0 else "cut"
            self._plans[key] = self._build_for(self.saved_sets[choice], cap, name)
        return self._plans[key]

    def _build_for(self, saved: tuple[ValueId, ...], cap: float, name: str) -> Plan:
        sequence, boundary = build(self.problem, self.index, saved, cap)
        return make_plan(self.problem, sequence, boundary, name)

    # --- shared pieces ------------------------------------------------------------

    @property
    def index(self) -> Index:
        """What every build needs, computed once."""
        if self._index is None:
            self._index = index_problem(self.problem)
        return self._index

    @property
    def saved_sets(self) -> list[tuple[ValueId, ...]]:
        """Sets of values to save, from the fastest plan's to the smallest."""
        if self._sets is None:
            self._sets = self._choose_sets()
        return self._sets

    def _choose_sets(self) -> list[tuple[ValueId, ...]]:
        if self.method == "greedy":
            return [_everything(self.problem)]
        try:
            chain = frontier(boundary_cut(self.problem), flows=16)
        except SolverError as error:
            self._fall_back(error)
            return [_everything(self.problem)]
        if not chain:
            raise SolverError("no set of saved values satisfies the constraints")
        return [r.saved for r in _spread(chain, SAVED_SETS)]

    def _fall_back(self, error: SolverError) -> None:
        """Go on with eviction only, saying so, or raise if that is what is wanted."""
        if self.strict:
            raise error
        log.warning("planning by eviction only: %s", error)
        self.method = "greedy"

    def _integer_set(self, budget_bytes: int) -> tuple[ValueId, ...] | None:
        """Return the saved set of the integer program, None when it has none."""
        if self.method == "greedy" or time.monotonic() > self.deadline:
            return None
        try:
            result = solve_saved_set(
                self.problem,
                budget_bytes,
                deterministic_limit=INTEGER_WORK,
                wall_limit_s=INTEGER_WALL_S,
            )
        except SolverError as error:
            self._fall_back(error)
            return None
        return tuple(result.saved) if result.recomputed or result.saved else None

    def _level(self, budget_bytes: int) -> int:
        """Return the first grid level whose cap is within the budget."""
        top = max(self.fastest.peak_bytes, 1)
        if budget_bytes >= top:
            return 0
        return math.ceil(math.log(max(budget_bytes, 1) / top) / math.log(GRID_RATIO))

    def _cap(self, level: int) -> float:
        return self.fastest.peak_bytes * GRID_RATIO**level

    def _least_cap(self) -> float:
        """Return the cap under which nothing is gained any more."""
        return self.floor.peak_bytes * GRID_RATIO**8


def _lowest(plan: Plan) -> tuple[int, float]:
    return plan.peak_bytes, plan.cost_seconds


def _better(plan: Plan, other: Plan) -> bool:
    return (plan.cost_seconds, plan.peak_bytes) < (other.cost_seconds, other.peak_bytes)


def _everything(problem: Problem) -> tuple[ValueId, ...]:
    """Return every value that the forward computes and may save."""
    return tuple(
        v
        for op in problem.operations
        if op.phase is Phase.FORWARD
        for v in op.writes
        if problem.values[v].savable
    )


def _spread(chain: list[CutResult], count: int) -> list[CutResult]:
    """Return at most ``count`` of a chain, both ends and evenly by saved bytes."""
    if len(chain) <= count:
        return chain
    lo, hi = chain[-1].saved_bytes, chain[0].saved_bytes
    chosen: dict[int, None] = {}
    for i in range(count):
        want = hi + (lo - hi) * i / (count - 1)
        nearest = min(
            range(len(chain)), key=lambda k: (abs(chain[k].saved_bytes - want), k)
        )
        chosen[nearest] = None
    return [chain[k] for k in sorted(chosen)]
