"""A sequence of executions that can be edited, with its peak known after every edit.

Executions sit in numbered slots with gaps between them; a segment tree holds the bytes
alive at every slot. Inserting or removing an execution changes the intervals on which
a few values are alive, so an edit costs O(degree * log slots), not a simulation.

Memory is that of `gcpass.solvers.liveness` without virtual values: a value is alive
from the execution that writes it to the last one that reads it before it is written
again (to the end when it is held), and an execution has a workspace.

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
from gcpass.solvers.network import NONE, IntArray, Network


class Timeline(NamedTuple):
    """The executions in their slots.

    Attributes:
        operation: by slot, the operation executed there or -1.
        earlier, later: by slot, the slots of the same operation's neighbours or -1.
        first: by operation, the slot of its first execution or -1.
        times: by operation, the number of its executions.
        end: by slot and written value, the last slot at which the instance is alive.
        peak, added: the tree: largest bytes below a node, bytes added to all below.
        slots: occupied slots, in no order; the first `number[0]` entries.
        place: by slot, its index in `slots` or -1.
        number: [executions].
    """

    operation: IntArray
    earlier: IntArray
    later: IntArray
    first: IntArray
    times: IntArray
    end: IntArray
    peak: IntArray
    added: IntArray
    slots: IntArray
    place: IntArray
    number: IntArray


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
        peak=np.zeros(2 * slots, dtype=np.int64),
        added=np.zeros(2 * slots, dtype=np.int64),
        slots=np.zeros(slots, dtype=np.int64),
        place=np.full(slots, NONE, dtype=np.int64),
        number=np.zeros(1, dtype=np.int64),
    )


@compiled
def place_all(net: Network, line: Timeline, sequence: IntArray) -> None:
    """Replace all executions by a valid sequence, spread evenly; O(K + slots)."""
    place_with_gap(net, line, sequence, len(sequence), 0)


@compiled
def place_with_gap(
    net: Network, line: Timeline, sequence: IntArray, position: int, gap: int
) -> None:
    """Likewise, with `gap` more empty slots before the execution number `position`."""
    slots = len(line.operation)
    clear(line)
    length = len(sequence)
    last = np.full(len(net.cost), NONE, dtype=np.int64)
    for t in range(length):
        slot = (2 * t + 1) * (slots - gap) // (2 * length)
        if t >= position:
            slot += gap
        op = sequence[t]
        line.operation[slot] = op
        before = last[op]
        line.earlier[slot] = before
        if before == NONE:
            line.first[op] = slot
        else:
            line.later[before] = slot
        last[op] = slot
        line.times[op] += 1
        line.slots[t] = slot
        line.place[slot] = t
        for k in range(net.writes_from[op], net.writes_from[op + 1]):
            held = net.held[net.writes[k]]
            line.end[slot, k - net.writes_from[op]] = slots - 1 if held else slot
        for k in range(net.reads_from[op], net.reads_from[op + 1]):
            value = net.reads[k]
            writer = net.writer[value]
            at = last[writer]
            column = _column(net, value)
            line.end[at, column] = max(line.end[at, column], slot)
    line.number[0] = length
    _fill_tree(net, line)


@compiled
def clear(line: Timeline) -> None:
    """Remove all executions."""
    line.operation[:] = NONE
    line.earlier[:] = NONE
    line.later[:] = NONE
    line.first[:] = NONE
    line.times[:] = 0
    line.end[:, :] = NONE
    line.peak[:] = 0
    line.added[:] = 0
    line.place[:] = NONE
    line.number[0] = 0


@compiled
def _fill_tree(net: Network, line: Timeline) -> None:
    slots = len(line.operation)
    delta = np.zeros(slots + 1, dtype=np.int64)
    turn = line.first[net.turn] if net.turn != NONE else NONE
    for i in range(line.number[0]):
        slot = line.slots[i]
        op = line.operation[slot]
        delta[slot] += net.workspace[op]
        delta[slot + 1] -= net.workspace[op]
        for k in range(net.writes_from[op], net.writes_from[op + 1]):
            value = net.writes[k]
            end = line.end[slot, k - net.writes_from[op]]
            delta[slot] += net.size[value]
            delta[end + 1] -= net.size[value]
            if net.barred[value] and slot < turn and turn < end:
                delta[turn] += BARRED_BYTES
                delta[turn + 1] -= BARRED_BYTES
    alive = 0
    for slot in range(slots):
        alive += delta[slot]
        line.peak[slots + slot] = alive
    for node in range(slots - 1, 0, -1):
        line.peak[node] = max(line.peak[2 * node], line.peak[2 * node + 1])


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
    return cost


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
def _column(net: Network, value: int) -> int:
    """Return the place of a value among what its operation writes."""
    start = net.writes_from[net.writer[value]]
    k = start
    while net.writes[k] != value:
        k += 1
    return k - start  # type: ignore[no-any-return]


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
def next_read(net: Network, line: Timeline, value: int, low: int) -> int:
    """Return the first slot after `low` that reads a value, the slot count if none."""
    first = len(line.operation)
    for k in range(net.readers_from[value], net.readers_from[value + 1]):
        at = line.first[net.readers[k]]
        while at != NONE and at <= low:
            at = line.later[at]
        if at != NONE and at < first:
            first = at
    return first


@compiled
def _alive(
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


@compiled
def _move_end(net: Network, line: Timeline, slot: int, value: int, end: int) -> None:
    column = _column(net, value)
    old = line.end[slot, column]
    if end > old:
        _alive(net, line, value, old + 1, end, 1)
    elif end < old:
        _alive(net, line, value, end + 1, old, -1)
    line.end[slot, column] = end


@compiled
def insert(net: Network, line: Timeline, slot: int, op: int) -> None:
    """Execute an operation in an empty slot; what it reads was written before."""
    slots = len(line.operation)
    before = at_or_before(line, op, slot)
    after = line.first[op] if before == NONE else line.later[before]
    line.operation[slot] = op
    line.earlier[slot] = before
    line.later[slot] = after
    if before == NONE:
        line.first[op] = slot
    else:
        line.later[before] = slot
    if after != NONE:
        line.earlier[after] = slot
    line.times[op] += 1
    line.place[slot] = line.number[0]
    line.slots[line.number[0]] = slot
    line.number[0] += 1
    if net.workspace[op]:
        add_bytes(line, slot, slot, net.workspace[op])
    limit = slots if after == NONE else after
    for k in range(net.writes_from[op], net.writes_from[op + 1]):
        value = net.writes[k]
        end = slots - 1
        if not net.held[value]:
            end = slot
            if before == NONE or line.end[before, k - net.writes_from[op]] > slot:
                end = last_read(net, line, value, slot, limit)
                if before != NONE:
                    cut = last_read(net, line, value, before, slot)
                    _move_end(net, line, before, value, cut)
        line.end[slot, k - net.writes_from[op]] = end
        _alive(net, line, value, slot, end, 1)
    for k in range(net.reads_from[op], net.reads_from[op + 1]):
        value = net.reads[k]
        at = at_or_before(line, net.writer[value], slot)
        if line.end[at, _column(net, value)] < slot:
            _move_end(net, line, at, value, slot)


@compiled
def can_remove(net: Network, line: Timeline, slot: int) -> bool:
    """Whether what remains is valid: an earlier execution or no reader."""
    if line.earlier[slot] != NONE:
        return True
    if line.later[slot] == NONE:
        return False
    op = line.operation[slot]
    for k in range(net.writes_from[op], net.writes_from[op + 1]):
        value = net.writes[k]
        if last_read(net, line, value, slot, line.later[slot]) > slot:
            return False
    return True


@compiled
def remove(net: Network, line: Timeline, slot: int) -> None:
    """Undo the execution in a slot; `can_remove` must hold."""
    op = line.operation[slot]
    before = line.earlier[slot]
    after = line.later[slot]
    for k in range(net.reads_from[op], net.reads_from[op + 1]):
        value = net.reads[k]
        writer = net.writer[value]
        at = at_or_before(line, writer, slot)
        if line.end[at, _column(net, value)] == slot and not net.held[value]:
            _move_end(net, line, at, value, last_read(net, line, value, at, slot))
    for k in range(net.writes_from[op], net.writes_from[op + 1]):
        value = net.writes[k]
        end = line.end[slot, k - net.writes_from[op]]
        _alive(net, line, value, slot, end, -1)
        if before != NONE and not net.held[value] and end > slot:
            _move_end(net, line, before, value, end)
        line.end[slot, k - net.writes_from[op]] = NONE
    if net.workspace[op]:
        add_bytes(line, slot, slot, -net.workspace[op])
    if before == NONE:
        line.first[op] = after
    else:
        line.later[before] = after
    if after != NONE:
        line.earlier[after] = before
    line.operation[slot] = NONE
    line.earlier[slot] = NONE
    line.later[slot] = NONE
    line.times[op] -= 1
    line.number[0] -= 1
    moved = line.slots[line.number[0]]
    line.slots[line.place[slot]] = moved
    line.place[moved] = line.place[slot]
    line.place[slot] = NONE


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
