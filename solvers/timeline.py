"""A sequence of executions that can be edited, with its peak known after every edit.

Executions sit in numbered slots with gaps between them; a segment tree holds the bytes
alive at every slot. Inserting or removing an execution changes the intervals on which
a few values are alive, so an edit costs O(degree * log slots), not a simulation.

Memory is that of `gcpass.solvers.liveness`: a value is alive from the execution that
writes it to the last one that reads it before it is written again (to the end when it
is held), and an execution has a workspace. Where values can be virtual, what such a
reader reads is alive until its kernel's last reader (`gcpass.solvers.virtual`). Edits
are in `gcpass.solvers.edit`.

The functions take two tuples of arrays: the `Network`, which they only read, and the
`Timeline`, which they change. They are functions over arrays and not methods because
numba compiles them where it is installed (`gcpass.solvers.accelerate`).

Source: executions in sparse slots under a tree with range additions are from
A. Imanishi et al., "A fast heuristic to optimize time-space tradeoff for large models",
NeurIPS 2023.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gcpass.solvers.accelerate import compiled
from gcpass.solvers.network import NONE, BoolArray, FloatArray, IntArray, Network


class Timeline(NamedTuple):
    """The executions in their slots.

    Attributes:
        operation: by slot, the operation executed there or -1.
        earlier, later: by slot, the slots of the same operation's neighbours or -1.
        first: by operation, the slot of its first execution or -1.
        times: by operation, the number of its executions.
        end: by slot and written value, the last slot at which the instance is alive;
            where it is virtual, the slot before its own.
        virtual: by slot and written value.
        reach: by slot, the last slot at which what it reads must be alive; kept only
            where values can be virtual.
        in_place: by slot, the bytes written in place.
        saving: [seconds to save what crosses the turn].
        peak, added: the tree: largest bytes below a node, bytes added to all below.
        slots: occupied slots, in no order; the first `number[0]` entries.
        place: by slot, its index in `slots` or -1.
        number: [executions].
        queue, queued, why, seen, clock, stale: working space of
            `gcpass.solvers.virtual`.
    """

    operation: IntArray
    earlier: IntArray
    later: IntArray
    first: IntArray
    times: IntArray
    end: IntArray
    virtual: BoolArray
    reach: IntArray
    in_place: IntArray
    saving: FloatArray
    peak: IntArray
    added: IntArray
    slots: IntArray
    place: IntArray
    number: IntArray
    queue: IntArray
    queued: BoolArray
    why: IntArray
    seen: IntArray
    clock: IntArray
    stale: BoolArray


BARRED_BYTES = 1 << 55  # what a barred value weighs at the turn


def new_timeline(net: Network, slots: int) -> Timeline:
    """Return a timeline without executions; `slots` is a power of two."""
    n = len(net.cost)
    width = int(np.max(np.diff(net.writes_from), initial=1))
    return Timeline(
        operation=np.full(slots, NONE, dtype=np.int64),
        earlier=np.full(slots, NONE, dtype=np.int64),
        later=np.full(slots, NONE, dtype=np.int64),
        first=np.full(n, NONE, dtype=np.int64),
        times=np.zeros(n, dtype=np.int64),
        end=np.full((slots, width), NONE, dtype=np.int64),
        virtual=np.zeros((slots, width), dtype=np.bool_),
        reach=np.full(slots, NONE, dtype=np.int64),
        in_place=np.zeros(slots, dtype=np.int64),
        saving=np.zeros(1, dtype=np.float64),
        peak=np.zeros(2 * slots, dtype=np.int64),
        added=np.zeros(2 * slots, dtype=np.int64),
        slots=np.zeros(slots, dtype=np.int64),
        place=np.full(slots, NONE, dtype=np.int64),
        number=np.zeros(1, dtype=np.int64),
        queue=np.zeros((4, slots if net.fuses else 1), dtype=np.int64),
        queued=np.zeros((2, slots if net.fuses else 1), dtype=np.bool_),
        why=np.zeros(slots if net.fuses else 1, dtype=np.int64),
        seen=np.zeros((slots if net.fuses else 1, width), dtype=np.int64),
        clock=np.zeros(1, dtype=np.int64),
        stale=np.zeros(slots if net.fuses else 1, dtype=np.bool_),
    )


@compiled
def sequence_of(line: Timeline) -> IntArray:
    """Return the operations in execution order."""
    result = np.empty(line.number[0], dtype=np.int64)
    t = 0
    for slot in range(len(line.operation)):
        if line.operation[slot] != NONE:
            result[t] = line.operation[slot]
            t += 1
    return result


@compiled
def total_cost(net: Network, line: Timeline) -> float:
    """Return the seconds of all executions, summed by operation."""
    cost = 0.0
    for op in range(len(net.cost)):
        cost += net.cost[op] * line.times[op]
    for value in range(len(net.size)):
        if net.toll[value] and crosses(net, line, value):
            cost += net.toll[value]
    return cost


@compiled
def crosses(net: Network, line: Timeline, value: int) -> bool:
    """Whether a value is alive across the turn."""
    turn = line.first[net.turn] if net.turn != NONE else NONE
    slot = at_or_before(line, net.writer[value], turn)
    return bool(slot != NONE and line.end[slot, net.column[value]] > turn)


@compiled
def peak_bytes(line: Timeline) -> int:
    """Return the largest number of bytes alive."""
    return line.peak[1]  # type: ignore[no-any-return]


@compiled
def peak_slot(line: Timeline) -> int:
    """Return the first slot at which the peak is reached."""
    slots = len(line.operation)
    node = 1
    while node < slots:
        node *= 2
        if line.peak[node] < line.peak[node + 1]:
            node += 1
    return node - slots


@compiled
def add_bytes(line: Timeline, first: int, last: int, size: int) -> None:
    """Add bytes to the slots first .. last."""
    slots = len(line.operation)
    low = first + slots
    high = last + slots + 1
    left = low
    right = high - 1
    while low < high:
        if low & 1:
            line.peak[low] += size
            line.added[low] += size
            low += 1
        if high & 1:
            high -= 1
            line.peak[high] += size
            line.added[high] += size
        low >>= 1
        high >>= 1
    left >>= 1
    while left > 0:
        top = max(line.peak[2 * left], line.peak[2 * left + 1])
        line.peak[left] = top + line.added[left]
        left >>= 1
    right >>= 1
    while right > 0:
        top = max(line.peak[2 * right], line.peak[2 * right + 1])
        line.peak[right] = top + line.added[right]
        right >>= 1


@compiled
def at_or_before(line: Timeline, op: int, slot: int) -> int:
    """Return the last execution of an operation at or before a slot, -1 if none."""
    at = line.first[op]
    if at == NONE or at > slot:
        return NONE
    while line.later[at] != NONE and line.later[at] <= slot:
        at = line.later[at]
    return at  # type: ignore[no-any-return]


@compiled
def last_read(net: Network, line: Timeline, value: int, low: int, high: int) -> int:
    """Return the last slot in low < slot < high that reads a value, `low` if none."""
    last = low
    for k in range(net.readers_from[value], net.readers_from[value + 1]):
        at = at_or_before(line, net.readers[k], high - 1)
        if at > last:
            last = at
    return last


@compiled
def first_after(line: Timeline, op: int, slot: int) -> int:
    """Return the first execution of an operation after a slot, -1 if none."""
    at = line.first[op]
    while at != NONE and at <= slot:
        at = line.later[at]
    return at  # type: ignore[no-any-return]


@compiled
def next_read(net: Network, line: Timeline, value: int, low: int) -> int:
    """Return the first slot after `low` that reads a value, the slot count if none."""
    first = len(line.operation)
    for k in range(net.readers_from[value], net.readers_from[value + 1]):
        at = first_after(line, net.readers[k], low)
        if at != NONE and at < first:
            first = at
    return first


@compiled
def change_bytes(
    net: Network, line: Timeline, value: int, first: int, last: int, sign: int
) -> None:
    """Add (sign 1) or take away (-1) a value's bytes on first .. last."""
    if first > last:
        return
    if net.size[value]:
        add_bytes(line, first, last, sign * net.size[value])
    if net.barred[value]:
        turn = line.first[net.turn]
        if turn != NONE and first <= turn and turn <= last:
            add_bytes(line, turn, turn, sign * BARRED_BYTES)
    if net.toll[value]:
        turn = line.first[net.turn]
        if first <= turn and turn <= last:
            line.saving[0] += sign * net.toll[value]


@compiled
def move_end(net: Network, line: Timeline, slot: int, value: int, end: int) -> None:
    column = net.column[value]
    old = line.end[slot, column]
    if end > old:
        change_bytes(net, line, value, old + 1, end, 1)
    elif end < old:
        change_bytes(net, line, value, end + 1, old, -1)
    line.end[slot, column] = end


@compiled
def reads_value(net: Network, op: int, value: int) -> bool:
    """Whether an operation reads a value."""
    for k in range(net.reads_from[op], net.reads_from[op + 1]):
        if net.reads[k] == value:
            return True
    return False


@compiled
def can_run(net: Network, line: Timeline, slot: int, op: int) -> bool:
    """Whether all that an operation reads has been written before a slot."""
    for k in range(net.reads_from[op], net.reads_from[op + 1]):
        first = line.first[net.writer[net.reads[k]]]
        if first == NONE or first >= slot:
            return False
    return True


@compiled
def empty_slot(line: Timeline, low: int, high: int) -> int:
    """Return the last empty slot in low < slot < high, -1 if none."""
    slot = high - 1
    while slot > low and line.operation[slot] != NONE:
        slot -= 1
    return slot if slot > low else NONE
