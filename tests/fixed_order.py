"""Exact search for one fixed order: an oracle that shares no solver code.

Dijkstra over (stage, next operation that may run again, values in memory, copies of
held values). Stage t ends with the first execution of operation t of the order; before
it earlier operations may run again, each at most once, ascending. Values may be dropped
at any time, which is free: every subset of what is not needed is tried. For problems
without fusion and up to 8 operations.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from typing import NamedTuple

from gcpass.solvers.bound import given_order
from gcpass.solvers.problem import OpId, Origin, Problem


class State(NamedTuple):
    """Stage, first place that may run, values in memory, copied bytes, first run."""

    stage: int
    place: int
    live: frozenset[int]
    copies: int
    fresh: bool


def fixed_order_optimum(problem: Problem, budget_bytes: int) -> float | None:
    """Return the least cost within the budget, None if there is none."""
    order, boundary = given_order(problem)
    start = State(0, 0, frozenset(), 0, False)
    best = {start: 0.0}
    count = itertools.count()
    queue = [(0.0, next(count), start)]
    while queue:
        cost, _, state = heapq.heappop(queue)
        if cost > best[state]:
            continue
        if state.stage == len(order) and (state.fresh or boundary < len(order)):
            return cost
        for seconds, after in _steps(problem, order, boundary, state, budget_bytes):
            if cost + seconds < best.get(after, float("inf")):
                best[after] = cost + seconds
                heapq.heappush(queue, (cost + seconds, next(count), after))
    return None


def _steps(
    problem: Problem,
    order: tuple[OpId, ...],
    boundary: int,
    state: State,
    budget_bytes: int,
) -> Iterator[tuple[float, State]]:
    """Yield (seconds, state): passing the boundary, or one execution.

    `fresh` is True from the boundary to the first execution behind it, when tangents
    must be there.
    """
    if state.stage == boundary and state.place == 0 and not state.fresh:
        yield from ((0.0, s) for s in _cross(problem, state, budget_bytes))
        return
    for place in range(state.place, state.stage + 1):
        if place == len(order):
            return
        op = problem.operations[order[place]]
        again = place < state.stage
        if again and (state.stage < boundary or not op.recomputable):
            continue
        there = state.live | {
            v for v in op.reads if problem.values[v].origin is Origin.INPUT
        }
        if there.issuperset(op.reads):
            for after in _run(problem, order, state, place, budget_bytes):
                yield op.cost_seconds, after


def _run(
    problem: Problem,
    order: tuple[OpId, ...],
    state: State,
    place: int,
    budget_bytes: int,
) -> Iterator[State]:
    op, values = problem.operations[order[place]], problem.values
    again = place < state.stage
    copies = state.copies
    if again:
        copies += sum(values[v].size_bytes for v in op.writes if values[v].held)
    must = {v for v in state.live if values[v].held or v in op.reads}
    if state.fresh:
        readers = problem.readers()
        tangents = (v for v in state.live if values[v].origin is Origin.TANGENT)
        must |= {v for v in tangents if readers[v]}
    must -= set(op.writes)
    rest = sorted(state.live - must - set(op.writes))
    for size in range(len(rest) + 1):
        for kept in itertools.combinations(rest, size):
            live = frozenset((*must, *kept, *op.writes))
            need = sum(values[v].size_bytes for v in live) + copies
            if need + op.workspace_bytes <= budget_bytes:
                stage = state.stage + (not again)
                yield State(stage, place + 1 if again else 0, live, copies, False)


def _cross(problem: Problem, state: State, budget_bytes: int) -> Iterator[State]:
    values = problem.values
    tangents = {v for v, x in enumerate(values) if x.origin is Origin.TANGENT}
    held = {v for v in state.live if values[v].held}
    rest = sorted(v for v in state.live - held if values[v].savable)
    for size in range(len(rest) + 1):
        for kept in itertools.combinations(rest, size):
            live = frozenset((*held, *kept, *tangents))
            need = sum(values[v].size_bytes for v in live) + problem.between_bytes
            if need <= budget_bytes:
                yield State(state.stage, state.place, live, state.copies, True)
