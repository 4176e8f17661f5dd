"""What is virtual or written in place on a timeline, and what that keeps alive.

A value of a fusible operation takes no memory when the kernels of its readers compute
it, and then what it reads must be alive until the last of these has run; a value that
nobody reads afterwards may be written over: definitions 2 to 7 of
`gcpass.solvers.liveness`. Whether an instance is virtual depends on its readers
and on what it draws on, hence on executions before it; how long a value is alive
depends on executions after it. So an edit is settled in two passes over the executions
that it may concern: in their order for the first, against it for the second. Both go on
only where something changed, which is within a few kernels of the edit. Writing in
place can change where a value starts or ends, or did, and where a kernel reads through
other values than before.
"""

from __future__ import annotations

from gcpass.solvers.accelerate import compiled
from gcpass.solvers.liveness import INLINE_READS_MANY, INLINE_READS_SINGLE
from gcpass.solvers.network import NONE, Network
from gcpass.solvers.timeline import (
    Timeline,
    add_bytes,
    at_or_before,
    first_after,
    move_end,
)

READERS = 1  # why an execution is in the queue: other readers than before,
SOURCES = 2  # other sources of what it reads,
WRITER = 3  # or its values are now read instead of another execution's

_FIRST, _SECOND = 0, 1  # rows of the queue: a heap for each pass,
_STACK, _STALE = 2, 3  # working space, and where writing in place may have changed


@compiled
def mark(line: Timeline, count: int, slot: int, why: int) -> int:
    """Add an execution to the queue of an edit; return the length of the queue."""
    line.why[slot] = max(line.why[slot], why)
    return _push(line, _FIRST, count, slot)


@compiled
def settle(net: Network, line: Timeline, count: int) -> None:
    """Bring up to date what depends on the `count` executions in the queue."""
    touched = 0
    stale = 0
    while count:
        slot = _pop(line, _FIRST, count)
        why = line.why[slot]
        line.why[slot] = 0
        count, stale = _decide(net, line, slot, why, count - 1, stale)
        touched = _push(line, _SECOND, touched, -slot)  # the latest first
    while touched:
        slot = -_pop(line, _SECOND, touched)
        touched -= 1
        changed, stale = _extend(net, line, slot, stale)
        if not changed:
            continue
        op = line.operation[slot]
        for k in range(net.reads_from[op], net.reads_from[op + 1]):
            value = net.reads[k]
            if not net.token[value]:
                at = at_or_before(line, net.writer[value], slot - 1)
                touched = _push(line, _SECOND, touched, -at)
    for i in range(stale):
        slot = line.queue[_STALE, i]
        line.stale[slot] = False
        now = _bytes_in_place(net, line, slot)
        if now != line.in_place[slot]:
            add_bytes(line, slot, slot, line.in_place[slot] - now)
            line.in_place[slot] = now


@compiled
def settle_all(net: Network, line: Timeline) -> None:
    """Decide for all executions at once; bytes are left to the caller."""
    slots = len(line.operation)
    for slot in range(slots):
        op = line.operation[slot]
        if op == NONE:
            continue
        for k in range(net.writes_from[op], net.writes_from[op + 1]):
            value = net.writes[k]
            line.virtual[slot, net.column[value]] = _is_virtual(net, line, slot, value)
    for slot in range(slots - 1, -1, -1):
        op = line.operation[slot]
        if op == NONE:
            continue
        reach = slot
        for k in range(net.writes_from[op], net.writes_from[op + 1]):
            value = net.writes[k]
            column = net.column[value]
            if net.token[value]:
                continue
            last = _last_reach(net, line, slot, value)
            if line.virtual[slot, column]:
                reach = max(reach, last)
                line.end[slot, column] = slot - 1
            elif not net.held[value]:
                line.end[slot, column] = last
        line.reach[slot] = reach
    for slot in range(slots):
        line.in_place[slot] = _bytes_in_place(net, line, slot)


@compiled
def _decide(
    net: Network, line: Timeline, slot: int, why: int, count: int, stale: int
) -> tuple[int, int]:
    """Find out what is virtual; enqueue readers whose sources may differ now.

    Returns:
        the length of the queue, and of the list of slots at which writing in place may
        have changed: what a reader writes over it may reach through this value.
    """
    op = line.operation[slot]
    for k in range(net.writes_from[op], net.writes_from[op + 1]):
        value = net.writes[k]
        if net.token[value]:
            continue
        column = net.column[value]
        before = line.virtual[slot, column]
        now = _is_virtual(net, line, slot, value)
        line.virtual[slot, column] = now
        if now == before and why != WRITER and not (now and why == SOURCES):
            continue
        limit = _next_write(line, slot)
        for r in range(net.readers_from[value], net.readers_from[value + 1]):
            inlines = _inlines(net, net.readers[r])
            at = first_after(line, net.readers[r], slot)
            while at != NONE and at < limit:
                stale = _note_stale(line, stale, at)
                if inlines:
                    count = mark(line, count, at, SOURCES)
                at = line.later[at]
    return count, stale


@compiled
def _extend(net: Network, line: Timeline, slot: int, stale: int) -> tuple[bool, int]:
    """Set until when values are alive.

    Returns:
        whether what is read is concerned, and the length of the list of slots at which
        writing in place may have changed.
    """
    op = line.operation[slot]
    reach = slot
    for k in range(net.writes_from[op], net.writes_from[op + 1]):
        value = net.writes[k]
        if net.token[value]:
            continue
        last = _last_reach(net, line, slot, value)
        before = line.end[slot, net.column[value]]
        if line.virtual[slot, net.column[value]]:
            reach = max(reach, last)
            move_end(net, line, slot, value, slot - 1)
        elif net.held[value]:
            move_end(net, line, slot, value, len(line.operation) - 1)
        else:
            move_end(net, line, slot, value, last)
        now = line.end[slot, net.column[value]]
        if now != before:
            for at in (slot, before, now):
                stale = _note_stale(line, stale, at)
    changed = reach != line.reach[slot]
    line.reach[slot] = reach
    return bool(changed), stale


@compiled
def _note_stale(line: Timeline, stale: int, slot: int) -> int:
    if slot == NONE or line.operation[slot] == NONE or line.stale[slot]:
        return stale
    line.stale[slot] = True
    line.queue[_STALE, stale] = slot
    return stale + 1


@compiled
def _bytes_in_place(net: Network, line: Timeline, slot: int) -> int:
    """Return the bytes that an execution writes over what ends there."""
    op = line.operation[slot]
    if op == NONE or net.aligned_from[op] == net.aligned_from[op + 1]:
        return 0
    if line.virtual[slot, 0]:
        return 0
    size = net.size[net.writes[net.writes_from[op]]]
    line.clock[0] += 1
    stamp = line.clock[0]
    stack = line.queue[_STACK]
    stack[0] = slot
    depth = 1
    while depth:
        depth -= 1
        step = stack[depth]
        op = line.operation[step]
        for k in range(net.aligned_from[op], net.aligned_from[op + 1]):
            value = net.aligned[k]
            at = at_or_before(line, net.writer[value], step - 1)
            column = net.column[value]
            if line.virtual[at, column]:
                if line.seen[at, column] != stamp:
                    line.seen[at, column] = stamp
                    stack[depth] = at
                    depth += 1
            elif line.end[at, column] == slot and net.size[value] == size:
                return size  # type: ignore[no-any-return]
    return 0


@compiled
def _is_virtual(net: Network, line: Timeline, slot: int, value: int) -> bool:
    if not net.inlines[value]:
        return False
    turn = line.first[net.turn] if net.turn != NONE else NONE
    limit = _next_write(line, slot)
    count = 0
    for k in range(net.readers_from[value], net.readers_from[value + 1]):
        at = first_after(line, net.readers[k], slot)
        while at != NONE and at < limit:
            if not net.absorbs[net.readers[k]] or (slot < turn and turn < at):
                return False
            count += 1
            at = line.later[at]
    if count == 0:
        return False
    most = INLINE_READS_MANY if count > 1 else INLINE_READS_SINGLE
    return _draws_on_at_most(net, line, slot, most)


@compiled
def _draws_on_at_most(net: Network, line: Timeline, slot: int, most: int) -> bool:
    """Whether an execution draws on few enough materialized instances."""
    line.clock[0] += 1
    stamp = line.clock[0]
    stack = line.queue[_STACK]
    stack[0] = slot
    depth = 1
    count = 0
    while depth:
        depth -= 1
        step = stack[depth]
        op = line.operation[step]
        for k in range(net.reads_from[op], net.reads_from[op + 1]):
            value = net.reads[k]
            if net.token[value]:
                continue
            at = at_or_before(line, net.writer[value], step - 1)
            column = net.column[value]
            if line.seen[at, column] == stamp:
                continue
            line.seen[at, column] = stamp
            if line.virtual[at, column]:
                stack[depth] = at
                depth += 1
                continue
            count += 1
            if count > most:
                return False
    return True


@compiled
def _last_reach(net: Network, line: Timeline, slot: int, value: int) -> int:
    """Return the last slot at which the kernels of an instance's readers run."""
    limit = _next_write(line, slot)
    last = slot
    for k in range(net.readers_from[value], net.readers_from[value + 1]):
        at = first_after(line, net.readers[k], slot)
        while at != NONE and at < limit:
            last = max(last, line.reach[at])
            at = line.later[at]
    return last


@compiled
def _next_write(line: Timeline, slot: int) -> int:
    """Return the slot at which the operation runs again, the slot count if never."""
    after = line.later[slot]
    return len(line.operation) if after == NONE else after


@compiled
def _inlines(net: Network, op: int) -> bool:
    for k in range(net.writes_from[op], net.writes_from[op + 1]):
        if net.inlines[net.writes[k]]:
            return True
    return False


@compiled
def _push(line: Timeline, which: int, count: int, key: int) -> int:
    """Add a key to a heap of `count`, unless it is there; return the new count."""
    slot = abs(key)
    if line.queued[which, slot]:
        return count
    line.queued[which, slot] = True
    heap = line.queue[which]
    at = count
    while at and heap[(at - 1) // 2] > key:
        heap[at] = heap[(at - 1) // 2]
        at = (at - 1) // 2
    heap[at] = key
    return count + 1


@compiled
def _pop(line: Timeline, which: int, count: int) -> int:
    """Take the least key from a heap of `count`."""
    heap = line.queue[which]
    least = heap[0]
    line.queued[which, abs(least)] = False
    key = heap[count - 1]
    at = 0
    while 2 * at + 1 < count - 1:
        child = 2 * at + 1
        if child + 1 < count - 1 and heap[child + 1] < heap[child]:
            child += 1
        if heap[child] >= key:
            break
        heap[at] = heap[child]
        at = child
    heap[at] = key
    return least  # type: ignore[no-any-return]
