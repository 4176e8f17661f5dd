"""Edits of a timeline: executions placed, inserted and removed."""

from __future__ import annotations

import numpy as np

from gcpass.solvers.accelerate import compiled
from gcpass.solvers.network import NONE, IntArray, Network
from gcpass.solvers.timeline import (
    BARRED_BYTES,
    Timeline,
    add_bytes,
    at_or_before,
    change_bytes,
    last_read,
    move_end,
)
from gcpass.solvers.virtual import READERS, WRITER, mark, settle, settle_all


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
            column = net.column[value]
            line.end[at, column] = max(line.end[at, column], slot)
    line.number[0] = length
    if net.fuses:
        settle_all(net, line)
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
    line.virtual[:, :] = False
    line.reach[:] = NONE
    line.in_place[:] = 0
    line.saving[0] = 0.0
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
        taken = net.workspace[op] - line.in_place[slot]
        delta[slot] += taken
        delta[slot + 1] -= taken
        for k in range(net.writes_from[op], net.writes_from[op + 1]):
            value = net.writes[k]
            end = line.end[slot, k - net.writes_from[op]]
            delta[slot] += net.size[value]
            delta[end + 1] -= net.size[value]
            if net.barred[value] and slot < turn and turn < end:
                delta[turn] += BARRED_BYTES
                delta[turn + 1] -= BARRED_BYTES
            if net.toll[value] and slot < turn and turn < end:
                line.saving[0] += net.toll[value]
    alive = 0
    for slot in range(slots):
        alive += delta[slot]
        line.peak[slots + slot] = alive
    for node in range(slots - 1, 0, -1):
        line.peak[node] = max(line.peak[2 * node], line.peak[2 * node + 1])


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
        if _is_settled(net, value):
            line.virtual[slot, k - net.writes_from[op]] = False
            line.end[slot, k - net.writes_from[op]] = slot - 1
            continue
        end = slots - 1
        if not net.held[value]:
            end = slot
            if before == NONE or line.end[before, k - net.writes_from[op]] > slot:
                end = last_read(net, line, value, slot, limit)
                if before != NONE:
                    cut = last_read(net, line, value, before, slot)
                    move_end(net, line, before, value, cut)
        line.end[slot, k - net.writes_from[op]] = end
        change_bytes(net, line, value, slot, end, 1)
    for k in range(net.reads_from[op], net.reads_from[op + 1]):
        value = net.reads[k]
        at = at_or_before(line, net.writer[value], slot)
        if not _is_settled(net, value) and line.end[at, net.column[value]] < slot:
            move_end(net, line, at, value, slot)
    if net.fuses:
        line.reach[slot] = slot
        count = mark(line, 0, slot, WRITER)
        if before != NONE:
            count = mark(line, count, before, WRITER)
        for k in range(net.reads_from[op], net.reads_from[op + 1]):
            value = net.reads[k]
            if not net.token[value]:
                at = at_or_before(line, net.writer[value], slot)
                count = mark(line, count, at, READERS)
        settle(net, line, count)


@compiled
def _is_settled(net: Network, value: int) -> bool:
    """Whether `gcpass.solvers.virtual` decides until when a value is alive."""
    return net.fuses and not net.token[value]


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
    count = 0
    for k in range(net.reads_from[op], net.reads_from[op + 1]):
        value = net.reads[k]
        writer = net.writer[value]
        at = at_or_before(line, writer, slot)
        if _is_settled(net, value):
            count = mark(line, count, at, READERS)
        elif line.end[at, net.column[value]] == slot and not net.held[value]:
            move_end(net, line, at, value, last_read(net, line, value, at, slot))
    for k in range(net.writes_from[op], net.writes_from[op + 1]):
        value = net.writes[k]
        end = line.end[slot, k - net.writes_from[op]]
        change_bytes(net, line, value, slot, end, -1)
        settled = _is_settled(net, value)
        if before != NONE and not settled and not net.held[value] and end > slot:
            move_end(net, line, before, value, end)
        line.end[slot, k - net.writes_from[op]] = NONE
    taken = net.workspace[op] - line.in_place[slot]
    if taken:
        add_bytes(line, slot, slot, -taken)
    line.in_place[slot] = 0
    if before == NONE:
        line.first[op] = after
    else:
        line.later[before] = after
    if after != NONE:
        line.earlier[after] = before
    line.virtual[slot, :] = False
    line.reach[slot] = NONE
    line.operation[slot] = NONE
    line.earlier[slot] = NONE
    line.later[slot] = NONE
    line.times[op] -= 1
    line.number[0] -= 1
    moved = line.slots[line.number[0]]
    line.slots[line.place[slot]] = moved
    line.place[moved] = line.place[slot]
    line.place[slot] = NONE
    if net.fuses:
        if before != NONE:
            count = mark(line, count, before, WRITER)
        settle(net, line, count)
