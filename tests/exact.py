"""Exact search on tiny problems without fusion: an oracle that shares no solver code.

Dijkstra over states (executed operations, values in memory, copies of held values,
side of the boundary). An edge executes one operation; values may be dropped before it,
which is free, so only the inclusion-minimal sets that make room are tried. Valid for
problems where nothing is fusible: then memory at an execution is what is kept, what it
reads and what it writes. Up to 9 operations.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from gcpass.solvers.liveness import simulate
from gcpass.solvers.problem import OpId, Origin, Phase, Problem


@dataclass(frozen=True, slots=True)
class State:
    """Where a partial sequence can go on from.

    Attributes:
        executed: operations that ran at least once, as bits.
        live: values in memory, as bits.
        copies: bytes of held values that were written again.
        backward: the boundary is passed.
    """

    executed: int
    live: int
    copies: int
    backward: bool


def optimum_seconds(problem: Problem, budget_bytes: int) -> float | None:
    """Return the least cost of a valid sequence within the budget, None if none."""
    start = State(executed=0, live=0, copies=0, backward=False)
    best = {start: 0.0}
    order = itertools.count()
    queue = [(0.0, next(order), start)]
    while queue:
        cost, _, state = heapq.heappop(queue)
        if cost > best[state]:
            continue
        if _complete(problem, state):
            return cost
        for seconds, after in _steps(problem, state, budget_bytes):
            if cost + seconds < best.get(after, float("inf")):
                best[after] = cost + seconds
                heapq.heappush(queue, (cost + seconds, next(order), after))
    return None


def _complete(problem: Problem, state: State) -> bool:
    for op_id, op in enumerate(problem.operations):
        held = any(problem.values[v].held for v in op.writes)
        if (op.phase is not Phase.EITHER or held) and not state.executed >> op_id & 1:
            return False
    return True


def _steps(
    problem: Problem, state: State, budget_bytes: int
) -> Iterator[tuple[float, State]]:
    sides = [state]
    forward = {
        i for i, op in enumerate(problem.operations) if op.phase is Phase.FORWARD
    }
    if not state.backward and all(state.executed >> i & 1 for i in forward):
        sides += _cross(problem, state, budget_bytes)
    for side in sides:
        arriving = side.backward and not state.backward
        for op_id, op in enumerate(problem.operations):
            if _allowed(problem, side, op_id):
                for after in _run(problem, side, op_id, budget_bytes, arriving):
                    yield op.cost_seconds, after


def _cross(problem: Problem, state: State, budget_bytes: int) -> Iterator[State]:
    values, tangents = problem.values, 0
    need = problem.between_bytes
    kept = []
    for v, value in enumerate(values):
        if state.live >> v & 1 and (value.savable or value.held):
            kept.append(v)
        if value.origin is Origin.TANGENT:
            tangents |= 1 << v
            need += value.size_bytes
    need += sum(values[v].size_bytes for v in kept)
    droppable = [v for v in kept if not values[v].held]
    for dropped in _minimal_sets(problem, droppable, need - budget_bytes):
        yield State(
            executed=state.executed,
            live=tangents | sum(1 << v for v in kept if v not in dropped),
            copies=state.copies,
            backward=True,
        )


def _allowed(problem: Problem, state: State, op_id: int) -> bool:
    op = problem.operations[op_id]
    again = state.executed >> op_id & 1
    if again and not op.recomputable:
        return False
    if op.phase is Phase.BACKWARD and not state.backward:
        return False
    later_draw = any(
        state.executed >> j & 1 and not problem.operations[j].recomputable
        for j in range(op_id + 1, len(problem.operations))
    )
    if not state.backward and not op.recomputable and later_draw:
        return False
    return all(
        problem.values[v].origin is Origin.INPUT or state.live >> v & 1
        for v in op.reads
    )


def _run(
    problem: Problem, state: State, op_id: int, budget_bytes: int, arriving: bool
) -> Iterator[State]:
    op, values = problem.operations[op_id], problem.values
    readers = problem.readers()
    copies = state.copies
    for v in op.writes:
        if values[v].held and state.executed >> op_id & 1:
            copies += values[v].size_bytes
    kept = [v for v in range(len(values)) if state.live >> v & 1 and v not in op.writes]
    need = copies + op.workspace_bytes
    need += sum(values[v].size_bytes for v in (*kept, *op.writes))
    droppable = [
        v
        for v in kept
        if not values[v].held
        and v not in op.reads
        and not (arriving and values[v].origin is Origin.TANGENT and readers[v])
    ]
    for dropped in _minimal_sets(problem, droppable, need - budget_bytes):
        live = sum(1 << v for v in (*kept, *op.writes) if v not in dropped)
        yield State(
            executed=state.executed | 1 << op_id,
            live=live,
            copies=copies,
            backward=state.backward,
        )


def _minimal_sets(
    problem: Problem, candidates: list[int], excess: int
) -> Iterator[tuple[int, ...]]:
    """Yield the sets whose bytes cover the excess and that need every member."""
    sizes = {v: problem.values[v].size_bytes for v in candidates}
    for count in range(len(candidates) + 1):
        for chosen in itertools.combinations(candidates, count):
            total = sum(sizes[v] for v in chosen)
            if total < excess:
                continue
            if all(total - sizes[v] < excess for v in chosen):
                yield chosen


def plans(
    problem: Problem, extra: int, limit: int
) -> Iterator[tuple[tuple[OpId, ...], int]]:
    """Yield valid sequences with up to `extra` repeats, and their boundaries.

    Depth first in a fixed order, `limit` sequences at most. Works with fusion, where
    every value that was ever written can be read.
    """
    found = itertools.islice(_grow(problem, (), None, extra), limit)
    yield from found


def _grow(
    problem: Problem, sequence: tuple[int, ...], boundary: int | None, extra: int
) -> Iterator[tuple[tuple[OpId, ...], int]]:
    live = sum(
        1 << v
        for v, value in enumerate(problem.values)
        if boundary is not None and value.origin is Origin.TANGENT
    )
    for t, i in enumerate(sequence):
        for v in problem.operations[i].writes:
            value = problem.values[v]
            lost = boundary is not None and t < boundary
            if value.savable or value.held or not lost:
                live |= 1 << v
    executed = sum(1 << i for i in set(sequence))
    state = State(executed=executed, live=live, copies=0, backward=boundary is not None)
    if boundary is not None and _complete(problem, state):
        yield tuple(OpId(i) for i in sequence), boundary
        return
    forward_done = all(
        op.phase is not Phase.FORWARD or executed >> i & 1
        for i, op in enumerate(problem.operations)
    )
    if boundary is None and forward_done:
        yield from _grow(problem, sequence, len(sequence), extra)
    for i in range(len(problem.operations)):
        again = executed >> i & 1
        if _allowed(problem, state, i) and (extra or not again):
            yield from _grow(problem, (*sequence, i), boundary, extra - again)


def pareto(
    problem: Problem, extra: int, limit: int
) -> dict[int, tuple[float, tuple[OpId, ...], int]]:
    """Return, by peak in bytes, the cheapest of the enumerated sequences."""
    result: dict[int, tuple[float, tuple[OpId, ...], int]] = {}
    for sequence, boundary in plans(problem, extra, limit):
        profile = simulate(problem, sequence, boundary)
        peak, cost = profile.peak_bytes, profile.cost_seconds
        if cost < result.get(peak, (float("inf"),))[0]:
            result[peak] = (cost, sequence, boundary)
    return result
