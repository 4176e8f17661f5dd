"""Makes a sequence fit a budget: at the peak, values are dropped and computed again.

While the budget is exceeded, look at the first slot of most bytes. Of the values that
are alive there without being read there, drop the one with the least

    seconds to compute it again / (bytes * slots until its next use)

and compute it again just before that use, together with what it draws on and is not
alive then. This is the rule of dynamic tensor rematerialization (M. Kirisame et al.,
2021, arXiv:2006.09616) with the future known instead of guessed; taking the point of
most bytes first is how XLA's rematerialization proceeds. A value may be dropped any
number of times, so it goes on where one repeat of each operation is not enough. One
that nothing has read yet is not repeated: its operation moves.
"""

from __future__ import annotations

import numpy as np

from gcpass.solvers.accelerate import compiled
from gcpass.solvers.network import NONE, BoolArray, IntArray, Network
from gcpass.solvers.timeline import (
    Timeline,
    at_or_before,
    can_remove,
    insert,
    next_read,
    peak_bytes,
    peak_slot,
    place_all,
    place_with_gap,
    reads_value,
    remove,
    sequence_of,
)

LONGEST_CHAIN = 128  # operations computed again for one value
PATIENCE = (64, 0.1)  # evictions without a lower peak, and more per operation
WORTH = 1e-3  # relative: a peak that much lower is written down


@compiled
def evict(net: Network, line: Timeline, budget: int, work: int) -> bool:
    """Edit the timeline until it fits; False when that cannot be done.

    It then holds the sequence of the lowest peak seen. The search gives up when the
    work is done, or when `PATIENCE` evictions have not lowered the peak.

    Args:
        net: the network.
        line: changed.
        budget: bytes.
        work: executions looked at for a value to drop, and values for rebuilding one.
    """
    left = np.array([work], dtype=np.int64)
    chain = np.empty(LONGEST_CHAIN, dtype=np.int64)
    stack = np.empty(LONGEST_CHAIN, dtype=np.int64)
    marked = np.zeros(len(net.cost), dtype=np.bool_)
    lowest = sequence_of(line)
    lowest_peak = peak_bytes(line)
    idle = 0
    patience = PATIENCE[0] + PATIENCE[1] * len(net.cost)
    while peak_bytes(line) > budget:
        full = line.number[0] + LONGEST_CHAIN > len(line.operation) * 3 // 4
        slot, use = NONE, NONE
        if left[0] >= 0 and not full and idle <= patience:
            at = peak_slot(line)
            slot, use = _cheapest(net, line, at, chain, stack, marked, left)
        if slot == NONE:
            place_all(net, line, lowest)
            return False
        op = line.operation[slot]
        count = _chain(net, line, op, use, chain, stack, marked, left)
        _insert_before(net, line, use, chain[:count])
        _forget(net, line, op)
        idle += 1
        if peak_bytes(line) < lowest_peak:
            idle = 0
            if peak_bytes(line) < lowest_peak * (1 - WORTH):
                lowest = sequence_of(line)
                lowest_peak = peak_bytes(line)
    return True


@compiled
def _forget(net: Network, line: Timeline, op: int) -> None:
    """Remove executions of an operation whose values nothing reads."""
    slot = line.first[op]
    while slot != NONE:
        after = line.later[slot]
        useless = line.times[op] > 1
        for k in range(net.writes_from[op], net.writes_from[op + 1]):
            column = k - net.writes_from[op]
            useless = useless and line.end[slot, column] == slot
        if useless and can_remove(net, line, slot):
            remove(net, line, slot)
        slot = after


@compiled
def _cheapest(
    net: Network,
    line: Timeline,
    at: int,
    chain: IntArray,
    stack: IntArray,
    marked: BoolArray,
    left: IntArray,
) -> tuple[int, int]:
    """Return (execution whose value to drop, its next use), or -1."""
    best = np.inf
    best_slot = NONE
    best_use = NONE
    left[0] -= line.number[0]
    for i in range(line.number[0]):
        slot = line.slots[i]
        if slot >= at:
            continue
        op = line.operation[slot]
        use = len(line.operation)
        size = 0
        unread = op != net.turn  # which must stay where it is
        for k in range(net.writes_from[op], net.writes_from[op + 1]):
            value = net.writes[k]
            if line.end[slot, k - net.writes_from[op]] <= at or net.held[value]:
                continue
            if not net.size[value]:
                continue  # a token: it can stay
            if line.operation[at] != NONE and reads_value(
                net, line.operation[at], value
            ):
                continue
            size += net.size[value]
            use = min(use, next_read(net, line, value, at))
        for k in range(net.writes_from[op], net.writes_from[op + 1]):
            unread = unread and next_read(net, line, net.writes[k], slot) >= use
        if size == 0 or (net.once[op] and not unread):
            continue
        count = _chain(net, line, op, use, chain, stack, marked, left)
        if count == 0:
            continue
        seconds = 0.0
        for k in range(count):
            seconds += net.cost[chain[k]]
        if unread:
            seconds -= net.cost[op]  # it moves
        score = seconds / (float(size) * (use - at))
        if score < best or (score == best and slot < best_slot):
            best = score
            best_slot = slot
            best_use = use
    return best_slot, best_use


@compiled
def _chain(
    net: Network,
    line: Timeline,
    op: int,
    use: int,
    chain: IntArray,
    stack: IntArray,
    marked: BoolArray,
    left: IntArray,
) -> int:
    """List what to run before `use` to have an operation's values; 0 if impossible."""
    count = 1
    depth = 1
    chain[0] = op
    stack[0] = op
    marked[op] = True
    possible = True
    while depth and possible:
        depth -= 1
        step = stack[depth]
        left[0] -= net.reads_from[step + 1] - net.reads_from[step]
        for k in range(net.reads_from[step], net.reads_from[step + 1]):
            value = net.reads[k]
            writer = net.writer[value]
            if marked[writer] or _alive_at(net, line, value, use):
                continue
            if net.once[writer] or count == LONGEST_CHAIN:
                possible = False
                break
            marked[writer] = True
            chain[count] = writer
            count += 1
            stack[depth] = writer
            depth += 1
    for i in range(count):
        marked[chain[i]] = False
    if not possible:
        return 0
    chain[:count].sort()
    return count


@compiled
def _alive_at(net: Network, line: Timeline, value: int, slot: int) -> bool:
    """Whether a value is there for a new reader just before a slot, at no bytes."""
    writer = net.writer[value]
    at = at_or_before(line, writer, slot - 1)
    if at == NONE:
        return False
    k = net.writes_from[writer]
    while net.writes[k] != value:
        k += 1
    return bool(
        line.end[at, k - net.writes_from[writer]] >= slot or not net.size[value]
    )


@compiled
def _insert_before(net: Network, line: Timeline, use: int, ops: IntArray) -> None:
    """Insert operations in this order directly before an occupied slot."""
    room = 0
    while use - room - 1 >= 0 and line.operation[use - room - 1] == NONE:
        room += 1
    count = len(ops)
    if room < count:
        sequence = sequence_of(line)
        position = 0
        for slot in range(use):
            position += line.operation[slot] != NONE
        place_with_gap(net, line, sequence, position, count)
        use = _slot_of(line, position)
    for i in range(count):
        insert(net, line, use - count + i, ops[i])


@compiled
def _slot_of(line: Timeline, position: int) -> int:
    """Return the slot of the execution number `position`."""
    seen = NONE
    for slot in range(len(line.operation)):
        seen += line.operation[slot] != NONE
        if seen == position:
            return slot
    return NONE
