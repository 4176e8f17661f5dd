"""Makes a sequence fit a budget: at the peak, values are dropped and computed again.

While the budget is exceeded, look at the first slot of most bytes. Of the values that
are alive there without being read there, drop the one with the least

    seconds to compute it again / (bytes * slots until its next use)

(or by another of the `RULES`) and compute it again just before that use, together with
what it draws on and is not alive then. This is the rule of dynamic tensor
rematerialization (M. Kirisame et al., 2021, arXiv:2006.09616) with the future known
instead of guessed; taking the point of most bytes first is how XLA's rematerialization
proceeds. A value may be dropped any number of times, so it goes on where one repeat of
each operation is not enough. One that nothing has read yet is not repeated: its
operation moves. Where a value is alive for a kernel that computes virtual values from
it, these are computed again as well.
"""

from __future__ import annotations

import numpy as np

from gcpass.solvers.accelerate import compiled
from gcpass.solvers.edit import can_remove, insert, place_all, place_with_gap, remove
from gcpass.solvers.network import NONE, BoolArray, IntArray, Network
from gcpass.solvers.timeline import (
    Timeline,
    at_or_before,
    first_after,
    next_read,
    peak_bytes,
    peak_slot,
    sequence_of,
)

LONGEST_CHAIN = 128  # operations computed again for one value
# Powers of bytes and of distance in the rule; no one of them is best on all graphs.
RULES = ((1.0, 1.0), (1.0, 0.5), (1.0, 0.0), (0.0, 1.0))
PATIENCE = (64, 0.1)  # evictions without a lower peak, and more per operation
WORTH = 1e-3  # relative: a peak that much lower is written down


@compiled
def evict(
    net: Network,
    line: Timeline,
    budget: int,
    work: int,
    rule: tuple[float, float] = RULES[0],
) -> bool:
    """Edit the timeline until it fits; False when that cannot be done.

    It then holds the sequence of the lowest peak seen. The search gives up when the
    work is done, or when `PATIENCE` evictions have not lowered the peak.

    Args:
        net: the network.
        line: changed.
        budget: bytes.
        work: executions looked at for a value to drop, and values for rebuilding one.
        rule: one of `RULES`.
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
            slot, use = _cheapest(net, line, at, rule, chain, stack, marked, left)
        if slot == NONE:
            place_all(net, line, lowest)
            return False
        dropped, _ = _drawn_on(net, line, slot, at, chain)
        forced = np.sort(chain[:dropped])
        count = _chain(net, line, dropped, use, chain, stack, marked, left)
        _insert_before(net, line, use, chain[:count])
        for i in range(dropped - 1, NONE, -1):
            _forget(net, line, forced[i])
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
    rule: tuple[float, float],
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
        size = _droppable(net, line, slot, at)
        if size == 0:
            continue
        op = line.operation[slot]
        dropped, use = _drawn_on(net, line, slot, at, chain)
        unread = op != net.turn and dropped == 1  # the turn must stay where it is
        for k in range(net.writes_from[op], net.writes_from[op + 1]):
            unread = unread and next_read(net, line, net.writes[k], slot) >= use
        if use == at or dropped == 0 or (net.once[op] and not unread):
            continue
        count = _chain(net, line, dropped, use, chain, stack, marked, left)
        if count == 0:
            continue
        seconds = 0.0
        for k in range(count):
            seconds += net.cost[chain[k]]
        if unread:
            seconds -= net.cost[op]  # it moves
        score = seconds / (_power(float(size), rule[0]) * _power(use - at, rule[1]))
        if score < best or (score == best and slot < best_slot):
            best = score
            best_slot = slot
            best_use = use
    return best_slot, best_use


@compiled
def _power(base: float, exponent: float) -> float:
    """Return the power for 0, 1/2 and 1, rounded alike with and without numba."""
    if exponent == 1.0:
        return base
    return np.sqrt(base) if exponent == 0.5 else 1.0


@compiled
def _droppable(net: Network, line: Timeline, slot: int, at: int) -> int:
    """Return the bytes of an execution's values that are alive beyond a slot."""
    op = line.operation[slot]
    size = 0
    for k in range(net.writes_from[op], net.writes_from[op + 1]):
        value = net.writes[k]
        if line.end[slot, k - net.writes_from[op]] > at and not net.held[value]:
            size += net.size[value]
    return size


@compiled
def _drawn_on(
    net: Network, line: Timeline, slot: int, at: int, dropped: IntArray
) -> tuple[int, int]:
    """Find what must run again when an execution's values are dropped at a slot.

    Returns:
        How many operations, put into `dropped`: its own, and those before `at` whose
        virtual values draw on it and are read behind; 0 if they are too many or one of
        these must not run again. And the first slot from `at` on that needs them.
    """
    use = len(line.operation)
    slots = np.empty(LONGEST_CHAIN, dtype=np.int64)
    slots[0] = slot
    count = 1
    done = 0
    while done < count:
        step = slots[done]
        op = line.operation[step]
        after = line.later[step]
        limit = len(line.operation) if after == NONE else after
        for k in range(net.writes_from[op], net.writes_from[op + 1]):
            value = net.writes[k]
            column = k - net.writes_from[op]
            if net.held[value] or not net.size[value]:
                continue
            if not line.virtual[step, column] and line.end[step, column] <= at:
                continue
            behind = next_read(net, line, value, at - 1)
            if behind < limit:
                use = min(use, behind)
            if net.fuses:
                last = min(limit, at)
                count = _add_kernels(net, line, value, last, at, slots, done, count)
                if count == 0:
                    return 0, use
        done += 1
    for i in range(count):
        dropped[i] = line.operation[slots[i]]
    return count, use


@compiled
def _add_kernels(
    net: Network,
    line: Timeline,
    value: int,
    last: int,
    at: int,
    slots: IntArray,
    source: int,
    count: int,
) -> int:
    """Add what reads an instance before `last` and is needed behind `at`.

    The instance is that of slots[source]. Returns the number of slots, 0 if they are
    too many or one of them must not run again.
    """
    for r in range(net.readers_from[value], net.readers_from[value + 1]):
        reader = first_after(line, net.readers[r], slots[source])
        while reader != NONE and reader < last:
            if line.reach[reader] >= at and not (slots[:count] == reader).any():
                if count == LONGEST_CHAIN or net.once[net.readers[r]]:
                    return 0
                slots[count] = reader
                count += 1
            reader = line.later[reader]
    return count


@compiled
def _chain(
    net: Network,
    line: Timeline,
    count: int,
    use: int,
    chain: IntArray,
    stack: IntArray,
    marked: BoolArray,
    left: IntArray,
) -> int:
    """List what to run before `use`, given its first `count`; 0 if impossible."""
    depth = count
    for i in range(count):
        stack[i] = chain[i]
        marked[chain[i]] = True
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
    column = net.column[value]
    if line.virtual[at, column]:
        return bool(line.reach[at] >= slot)
    return bool(line.end[at, column] >= slot or not net.size[value])


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
