"""What every plan has in common at one moment of the step.

A moment is the first execution of a pivot operation x (that materializes a value, where
x can be fused into others), or the boundary between forward and backward (pivot None).
For every valid plan, in any order and with any number of
recomputations, this module derives from the problem alone:

- **before**: operations that surely ran before the moment: the ancestors of x, every
  forward operation when x is a backward one (or the moment is the boundary), and the
  random draws of the forward that come before one of these, which keep their order;
- **later**: operations whose first execution surely comes after it: what must run and
  draws on x (on the materialized value), or every backward operation at the boundary;
- **fixed**: values that are surely materialized and alive during it;
- **required**: values read at or after the moment that are not fixed;
- **costs**: time a plan surely loses when an operation is executed after the moment,
  or when its value is virtual across it;
- **tolls**: time a plan surely loses when a value is alive at the moment.

The proofs are in `gcpass.solvers.bound`. Plans only save less and lose more than this.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from gcpass.solvers.problem import OpId, Origin, Phase, Problem, ValueId

Writers = tuple[OpId | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """See the module docstring; all tuples of ids ascend.

    Attributes:
        pivot: the operation, None for the boundary.
        fixed: values surely alive.
        fixed_bytes: their bytes and the pivot's workspace, or `between_bytes`, less
            what the pivot may write in place (so it can be negative).
        free: inputs and fixed values: they can be read later at no price.
        required: values read at or after the moment that are not free.
        writers: writer of each value, None for inputs and tangents.
        costs: seconds by operation; inf: it cannot be executed after the moment.
        tolls: seconds by value; inf: it cannot be alive at the moment.
    """

    pivot: OpId | None
    fixed: tuple[ValueId, ...]
    fixed_bytes: int
    free: tuple[ValueId, ...]
    required: tuple[ValueId, ...]
    writers: Writers
    costs: tuple[float, ...]
    tolls: tuple[float, ...]


def needed_operations(problem: Problem) -> frozenset[OpId]:
    """Return the operations that every plan executes, in O(edges).

    All of the forward and the backward, and those of `Phase.EITHER` that write a held
    value or that one of the others draws on.
    """
    writers = problem.writers()
    held = [value.held for value in problem.values]
    roots = (
        OpId(op_id)
        for op_id, op in enumerate(problem.operations)
        if op.phase is not Phase.EITHER or any(held[value] for value in op.writes)
    )
    return _ancestors(problem, writers, roots)


def virtual_values(problem: Problem) -> tuple[bool, ...]:
    """Return, by value, whether an instance of it can be virtual, in O(edges).

    It is not held, a fusible operation writes it, and a reader can absorb it: a virtual
    instance is read, and by such operations only.
    """
    result = [False] * len(problem.values)
    fusible = {v for op in problem.operations if op.fusible for v in op.writes}
    for op in problem.operations:
        for value in op.reads if op.absorbing else ():
            result[value] = value in fusible and not problem.values[value].held
    return tuple(result)


def at_boundary(problem: Problem) -> Moment:
    """Return the moment between forward and backward, in O(edges)."""
    operations, values = problem.operations, problem.values
    later = [
        OpId(op_id) for op_id, op in enumerate(operations) if op.phase is Phase.BACKWARD
    ]
    writers = problem.writers()
    fixed = set()
    for value_id, value in enumerate(values):
        writer = writers[value_id]
        forward = writer is not None and operations[writer].phase is Phase.FORWARD
        if value.origin is Origin.TANGENT or (forward and value.held):
            fixed.add(ValueId(value_id))
    costs = [
        _again(problem, OpId(i)) if op.phase is Phase.FORWARD else 0.0
        for i, op in enumerate(operations)
    ]
    tolls = _crossing_tolls(problem, writers)
    read = _read_from_outside(problem, later)
    return _moment(problem, None, writers, fixed, read, costs, tolls)


def at_pivot(problem: Problem, pivot: OpId) -> Moment:
    """Return the moment of the first execution of `pivot`, in O(edges)."""
    operations = problem.operations
    writers = problem.writers()
    backward = operations[pivot].phase is Phase.BACKWARD
    before = set(_ancestors(problem, writers, (pivot,))) - {pivot}
    if backward:
        before.update(_of_phase(problem, Phase.FORWARD))
    before |= _earlier_draws(problem, writers, {pivot, *before})
    virtual = virtual_values(problem)
    needed = needed_operations(problem)
    results, after = results_at(problem, problem.readers(), virtual, needed, pivot)
    later = _descendants(problem, writers, after) & needed - {pivot}
    fixed = _fixed(problem, writers, virtual, pivot, before, later) | set(results)
    costs = [0.0] * len(operations)
    for op_id in before:
        op = operations[op_id]
        # A virtual value of the forward cannot cross the boundary, so it was computed
        # a second time; any other can be virtual across the moment at no time.
        inlined = any(virtual[value] for value in op.writes)
        if not inlined or (backward and op.phase is Phase.FORWARD):
            costs[op_id] = _again(problem, op_id)
    tolls = [0.0] * len(problem.values)
    if backward:
        tolls = _kept_tolls(problem, writers)
    read = _read_from_outside(problem, (pivot, *later))
    in_place = in_place_bytes(problem, writers, virtual, pivot)
    return _moment(problem, pivot, writers, fixed, read, costs, tolls, in_place)


def _earlier_draws(
    problem: Problem, writers: Writers, ran: set[OpId]
) -> frozenset[OpId]:
    """Return what ran before because random draws of the forward keep their order."""
    draws = [
        op_id
        for op_id in _of_phase(problem, Phase.FORWARD)
        if not problem.operations[op_id].recomputable
    ]
    latest = max((op_id for op_id in draws if op_id in ran), default=OpId(0))
    return _ancestors(problem, writers, (o for o in draws if o < latest))


def _moment(
    problem: Problem,
    pivot: OpId | None,
    writers: Writers,
    fixed: set[ValueId],
    read: set[ValueId],
    costs: Sequence[float],
    tolls: Sequence[float],
    in_place: int = 0,
) -> Moment:
    values = problem.values
    workspace = problem.between_bytes
    if pivot is not None:
        workspace = problem.operations[pivot].workspace_bytes
        workspace -= in_place
    free = fixed | {
        ValueId(v) for v, value in enumerate(values) if value.origin is Origin.INPUT
    }
    if pivot is not None and problem.operations[pivot].phase is not Phase.BACKWARD:
        free |= set(_tangents(problem))
    return Moment(
        pivot=pivot,
        fixed=tuple(sorted(fixed)),
        fixed_bytes=sum(values[v].size_bytes for v in fixed) + workspace,
        free=tuple(sorted(free)),
        required=tuple(sorted(read - free)),
        writers=writers,
        costs=tuple(costs),
        tolls=tuple(tolls),
    )


def _fixed(
    problem: Problem,
    writers: Writers,
    virtual: Sequence[bool],
    pivot: OpId,
    before: set[OpId],
    later: frozenset[OpId],
) -> set[ValueId]:
    operations, values = problem.operations, problem.values
    x = operations[pivot]
    fixed = set(materialized_reads(problem, writers, virtual, pivot))
    fixed.update(v for op in before for v in operations[op].writes if values[v].held)
    if x.phase is Phase.BACKWARD:
        fixed.update(v for v in _tangents(problem) if values[v].held)
        for op in (pivot, *later):
            fixed.update(
                v for v in operations[op].reads if values[v].origin is Origin.TANGENT
            )
    return fixed


def _read_from_outside(problem: Problem, ops: Iterable[OpId]) -> set[ValueId]:
    """Return the values that these operations read and none of them writes."""
    read: set[ValueId] = set()
    written: set[ValueId] = set()
    for op_id in ops:
        read.update(problem.operations[op_id].reads)
        written.update(problem.operations[op_id].writes)
    return read - written


def results_at(
    problem: Problem,
    readers: Sequence[Sequence[OpId]],
    virtual: Sequence[bool],
    needed: frozenset[OpId],
    op_id: OpId,
) -> tuple[tuple[ValueId, ...], tuple[OpId, ...]]:
    """Return what an operation surely writes at the moment that it is the pivot of.

    If all that it writes may be virtual, that is the first value that some operation
    must read which cannot absorb it, if any: the moment is then the first execution
    that materializes this value.

    Returns:
        These values, and operations such that they and all that draws on them run first
        after the moment: itself, or those that cannot absorb the value.
    """
    writes = problem.operations[op_id].writes
    solid = tuple(value for value in writes if not virtual[value])
    if solid:
        return solid, (op_id,)
    for value in writes:
        outside = [
            reader
            for reader in readers[value]
            if reader in needed and not problem.operations[reader].absorbing
        ]
        if outside:
            return (value,), tuple(outside)
    return (), (op_id,)


def materialized_reads(
    problem: Problem, writers: Writers, virtual: Sequence[bool], op_id: OpId
) -> Iterator[ValueId]:
    """Yield computed values that cannot be virtual when this operation reads them."""
    op = problem.operations[op_id]
    for value in op.reads:
        if writers[value] is not None and not (virtual[value] and op.absorbing):
            yield value


def in_place_bytes(
    problem: Problem, writers: Writers, virtual: Sequence[bool], op_id: OpId
) -> int:
    """Return the most bytes that an execution of an operation writes in place."""
    operations, values = problem.operations, problem.values
    if not operations[op_id].aligned:
        return 0
    size = values[operations[op_id].writes[0]].size_bytes
    stack, seen = [op_id], {op_id}
    while stack:
        for value in operations[stack.pop()].aligned:
            writer = writers[value]
            if writer is None or values[value].held:
                continue
            if values[value].size_bytes == size:
                return size
            if virtual[value] and writer not in seen:
                seen.add(writer)
                stack.append(writer)
    return 0


def _again(problem: Problem, op_id: OpId) -> float:
    op = problem.operations[op_id]
    return op.cost_seconds if op.recomputable else math.inf


def _crossing_tolls(problem: Problem, writers: Writers) -> list[float]:
    """Return the seconds lost when values are written before and read after."""
    return [
        seconds if value.savable or value.held or writer is None else math.inf
        for seconds, value, writer in zip(
            problem.saving_seconds(), problem.values, writers, strict=True
        )
    ]


def _kept_tolls(problem: Problem, writers: Writers) -> list[float]:
    """Return the seconds lost when values are alive in the backward.

    One of the forward was saved, or computed again; an execution that writes several
    values is shared between them.
    """
    tolls = _crossing_tolls(problem, writers)
    for value_id, writer in enumerate(writers):
        if writer is None or problem.operations[writer].phase is not Phase.FORWARD:
            tolls[value_id] = 0.0
        else:
            again = _again(problem, writer) / len(problem.operations[writer].writes)
            tolls[value_id] = min(tolls[value_id], again)
    return tolls


def _tangents(problem: Problem) -> Iterator[ValueId]:
    for value_id, value in enumerate(problem.values):
        if value.origin is Origin.TANGENT:
            yield ValueId(value_id)


def _of_phase(problem: Problem, phase: Phase) -> Iterator[OpId]:
    for op_id, op in enumerate(problem.operations):
        if op.phase is phase:
            yield OpId(op_id)


def _ancestors(
    problem: Problem, writers: Writers, roots: Iterable[OpId]
) -> frozenset[OpId]:
    """Return the roots and every operation they draw on."""
    found = set(roots)
    stack = list(found)
    while stack:
        for value in problem.operations[stack.pop()].reads:
            writer = writers[value]
            if writer is not None and writer not in found:
                found.add(writer)
                stack.append(writer)
    return frozenset(found)


def _descendants(
    problem: Problem, writers: Writers, roots: Sequence[OpId]
) -> frozenset[OpId]:
    """Return the roots and the operations that draw on them."""
    found = set(roots)
    for op_id in range(min(roots) + 1, len(problem.operations)):
        reads = problem.operations[op_id].reads
        if any(writers[value] in found for value in reads):
            found.add(OpId(op_id))
    return frozenset(found)
