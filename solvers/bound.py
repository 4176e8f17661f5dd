"""A proven lower bound on the time of every plan within a memory budget.

Let tau be the first execution of an operation x (or the boundary, which is an instant
between two executions) in any valid plan. With the sets of `gcpass.solvers.moment`:

(i)   Operations of *before* have run at tau. An ancestor of x had to run first; a
      forward operation runs before the boundary, and a backward x after it; random
      draws of the forward keep their order.
(ii)  Operations of *later* run first after tau, and run at all: they need x, and are
      themselves needed (at the boundary: they are backward).
(iii) *Fixed* values are alive at tau. x holds its results and its workspace, and what
      it reads; what may be virtual (`virtual_values`; read: if x is absorbing) aside.
      A held value written before tau stays, and a tangent exists once and lives from
      the boundary to its last reader. If x may write its result in place, the bytes of
      that are taken off once, whichever values they are.
(iv)  Take a value v that x or a later operation reads and that is not fixed or input.
      The instance read was written before tau and is materialized, hence alive (v in
      S); or it was written before and is virtual across tau; or it is written after
      tau. In the last two cases v's operation is in R, and (iv) holds for what it
      reads: a virtual instance keeps its sources alive until its last reader
      (`gcpass.solvers.liveness`, 3 to 5), which is at or after tau.

So fixed bytes + bytes(S) <= budget. For o in R executed after tau and in *before*, the
plan pays o's cost on top of one execution each. If o's instance is virtual across tau
the plan pays it when x is backward and o forward, because no virtual instance crosses
the boundary; else nothing. A forward v in S that is alive at a backward tau was saved
(`Problem.saving_seconds`, impossible if not savable) or executed again; its
toll is the lesser, shared between the operation's values, and no operation is charged
in R and in S because S needs only values whose operation is not in R. Hence for every
multiplier lam >= 0

    time >= sum of needed costs + min cut(x, lam) - lam * (budget - fixed bytes)

and the bound is the largest right side over pivots and lam. It ignores that recomputing
takes memory at other moments and that copies die, so it is not always reachable: 55 %
of the optimum's extra time on average over random graphs of 9 operations, within 0.3
percentage points of good plans on transformers.

Sources: Lagrangian bounds, A. M. Geoffrion, 1974, doi:10.1007/BFb0120690. Why not the
linear relaxation of Checkmate (arXiv:1910.02653, section 4.7): on FCN8 it proves 0.0004
percent where this proves 0.08, in 0.04 s.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from gcpass.solvers.cut import boundary_cut, cut
from gcpass.solvers.frontier import Frontier
from gcpass.solvers.liveness import simulate
from gcpass.solvers.moment import (
    in_place_bytes,
    materialized_reads,
    needed_operations,
    results_at,
    virtual_values,
)
from gcpass.solvers.problem import OpId, Origin, Phase, Problem

PRECISION = 1e-7  # of the needed time: stop where no multiplier can gain more
FLOOR_PIVOTS = 8  # moments whose exact minimum of saved bytes is computed


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """What is proven about every plan within a budget.

    Attributes:
        seconds: no plan costs less: every needed operation once, and the extra time.
        infeasible_proven: no plan fits at all; `seconds` is then of no interest.
        pivot: operation whose moment gave the proof, None for the boundary or when
            nothing beyond the needed operations is proven.
    """

    seconds: float
    infeasible_proven: bool
    pivot: OpId | None


@dataclass(slots=True, eq=False)
class Moments:
    """The cut problems of one problem, for bounds at any number of budgets.

    Attributes:
        problem: the problem.
        pivots: operations whose first execution is looked at; None: the boundary.
        base_seconds: what every plan costs: each needed operation once.
    """

    problem: Problem
    pivots: tuple[OpId | None, ...]
    base_seconds: float = field(init=False)
    _frontiers: dict[OpId | None, Frontier] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        needed = needed_operations(self.problem)
        self.pivots = tuple(p for p in self.pivots if p is None or p in needed)
        costs = (self.problem.operations[op].cost_seconds for op in needed)
        self.base_seconds = math.fsum(costs)

    def frontier(self, pivot: OpId | None) -> Frontier:
        """Return the choices at one moment, shared by all budgets."""
        if pivot not in self._frontiers:
            if pivot is None:
                network = boundary_cut(self.problem)
            else:
                network = cut(self.problem, pivot)
            self._frontiers[pivot] = Frontier(network)
        return self._frontiers[pivot]

    def bound(self, budget_bytes: int) -> Bound:
        """Return the best bound over the pivots."""
        best, best_pivot = 0.0, None
        precision = PRECISION * self.base_seconds
        for pivot in self.pivots:
            choices = self.frontier(pivot)
            cap = budget_bytes - choices.network.moment.fixed_bytes
            if not choices.can_fit(cap):
                seconds = self.base_seconds + best
                return Bound(seconds=seconds, infeasible_proven=True, pivot=pivot)
            extra = choices.bound(cap, enough=best, precision=precision)
            if extra > best:
                best, best_pivot = extra, pivot
        seconds = self.base_seconds + best
        return Bound(seconds=seconds, infeasible_proven=False, pivot=best_pivot)


def moments(
    problem: Problem, pivots: Sequence[OpId] | None = None, max_pivots: int = 16
) -> Moments:
    """Return the boundary and the pivots; None: those of `choose_pivots`."""
    chosen = choose_pivots(problem, max_pivots) if pivots is None else tuple(pivots)
    return Moments(problem, (None, *chosen))


def lower_bound_seconds(
    problem: Problem,
    budget_bytes: int,
    pivots: Sequence[OpId] | None = None,
    max_pivots: int = 16,
) -> Bound:
    """Return the best bound over the boundary and the pivots.

    Args:
        problem: the problem.
        budget_bytes: no step of a plan may need more bytes.
        pivots: operations to look at; None: those of `choose_pivots`. Ones that no
            plan needs are ignored.
        max_pivots: how many to choose when `pivots` is None.
    """
    return moments(problem, pivots, max_pivots).bound(budget_bytes)


def floor_lower_bound_bytes(problem: Problem) -> int:
    """Return bytes that every plan needs at some moment.

    The largest over all operations of what is surely alive at their first execution,
    over what is held at the end, and over a few moments of the fewest bytes that must
    be alive beyond that because they cannot be recomputed.
    """
    static = _static_bytes(problem)
    held = sum(
        value.size_bytes
        for value in problem.values
        if value.held and value.origin is Origin.COMPUTED
    )
    floor = max([held, *static.values()], default=held)
    top = heapq.nsmallest(FLOOR_PIVOTS, static, key=lambda op: (-static[op], op))
    pivots = dict.fromkeys([*top, *choose_pivots(problem, FLOOR_PIVOTS)])
    networks = [boundary_cut(problem), *(cut(problem, op) for op in pivots)]
    for network in networks:
        least = network.least()
        if least is not None:
            floor = max(floor, network.moment.fixed_bytes + least.saved_bytes)
    return floor


def choose_pivots(problem: Problem, count: int) -> tuple[OpId, ...]:
    """Return operations at whose first execution plans are short of memory.

    By turns from two lists: the steps of most bytes when everything is saved, where
    the best pivot was among the first 3 on eight training graphs, and the operations
    of most surely alive bytes. What writes virtual values only is left out.
    """
    sequence, boundary = given_order(problem)
    memory = simulate(problem, sequence, boundary).memory_bytes
    steps = sorted(range(len(sequence)), key=lambda t: (-memory[t], t))
    by_profile = [sequence[t] for t in steps]
    static = _static_bytes(problem)
    by_static = sorted(static, key=lambda op: (-static[op], op))
    readers, virtual = problem.readers(), virtual_values(problem)
    needed = needed_operations(problem)
    result: dict[OpId, None] = {}
    for pair in zip(by_profile, by_static, strict=True):
        for op in pair:
            solid, _ = results_at(problem, readers, virtual, needed, op)
            if solid and len(result) < count:
                result[op] = None
    return tuple(result)


def given_order(problem: Problem) -> tuple[tuple[OpId, ...], int]:
    """Return the sequence that executes needed operations once, and its boundary.

    The forward in the given order, then the others in theirs. It saves everything,
    also values that are not savable: a reference to measure, not always a valid plan.
    """
    needed = sorted(needed_operations(problem))
    operations = problem.operations
    forward = [op for op in needed if operations[op].phase is Phase.FORWARD]
    rest = [op for op in needed if operations[op].phase is not Phase.FORWARD]
    return tuple(forward + rest), len(forward)


def _static_bytes(problem: Problem) -> dict[OpId, int]:
    """Return bytes surely alive at the first execution of each needed operation.

    Less than `Moment.fixed_bytes` but for all operations at once, in O(edges + held):
    results, workspace, materialized reads, what the forward holds, tangents that the
    operation or a later one reads, and gradients held by its ancestors.
    """
    writers = problem.writers()
    readers, virtual = problem.readers(), virtual_values(problem)
    needed = needed_operations(problem)
    before = _held_before(problem)
    after = _tangents_after(problem)
    forward_held = sum(
        1 << value
        for op in problem.operations
        if op.phase is Phase.FORWARD
        for value in op.writes
        if problem.values[value].held
    )
    result = {}
    for op_id in sorted(needed):
        op = problem.operations[op_id]
        results, later = results_at(problem, readers, virtual, needed, op_id)
        alive = before[op_id]
        for value in (*results, *materialized_reads(problem, writers, virtual, op_id)):
            alive |= 1 << value
        if op.phase is Phase.BACKWARD:
            alive |= forward_held
            for value in op.reads:
                alive |= (problem.values[value].origin is Origin.TANGENT) << value
            for reader in later:
                alive |= after[reader]
        result[op_id] = _bytes_of(problem, alive) + op.workspace_bytes
        result[op_id] -= in_place_bytes(problem, writers, virtual, op_id)
    return result


def _held_before(problem: Problem) -> list[int]:
    """Return, by operation, the held values that its ancestors write, as bits."""
    by_value = [0] * len(problem.values)
    result = []
    for op in problem.operations:
        bits = 0
        for value in op.reads:
            bits |= by_value[value]
        result.append(bits)
        for value in op.writes:
            bits |= problem.values[value].held << value
        for value in op.writes:
            by_value[value] = bits
    return result


def _tangents_after(problem: Problem) -> list[int]:
    """Return, by operation, the tangents that it or its descendants read, as bits."""
    by_value = [0] * len(problem.values)
    result = [0] * len(problem.operations)
    for op_id in range(len(problem.operations) - 1, -1, -1):
        op = problem.operations[op_id]
        bits = 0
        for value in op.writes:
            bits |= by_value[value]
        for value in op.reads:
            bits |= (problem.values[value].origin is Origin.TANGENT) << value
        result[op_id] = bits
        for value in op.reads:
            by_value[value] |= bits
    return result


def _bytes_of(problem: Problem, bits: int) -> int:
    total = 0
    while bits:
        lowest = bits & -bits
        total += problem.values[lowest.bit_length() - 1].size_bytes
        bits ^= lowest
    return total
