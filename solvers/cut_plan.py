"""A sequence from a choice of a cut: what is saved at the pivot, what is recomputed.

Everything the pivot draws on runs first, then the pivot, then the rest in the given
order; what a later operation reads and the cut did not save is recomputed just before,
transitively, and kept until its last reader. The pure cut flips all identical layers
at one price, so the choice between two neighbouring points of the frontier is mixed:
connected components of the operations that only the smaller one recomputes are saved
again, dearest per byte first, while the cap allows.

The result respects a cap at the pivot only; `gcpass.solvers.evict` makes it fit at the
other moments.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gcpass.solvers.accelerate import compiled
from gcpass.solvers.cut import CutProblem, CutResult
from gcpass.solvers.network import (
    NONE,
    BoolArray,
    FloatArray,
    IntArray,
    Network,
    Numbering,
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PivotNetwork:
    """A cut problem in the numbers of the network.

    Attributes:
        pivot: operation of the network.
        free: by value, whether it is alive at the pivot anyway.
        required: by value, whether something after the pivot reads it.
        before: by operation, whether the pivot draws on it.
    """

    pivot: int
    free: BoolArray
    required: BoolArray
    before: BoolArray


def pivot_network(
    net: Network, numbering: Numbering, problem: CutProblem
) -> PivotNetwork:
    """Return the cut problem's moment in the numbers of the network."""
    moment = problem.moment
    pivot = numbering.turn
    if moment.pivot is not None:
        pivot = numbering.operation_of[moment.pivot]
    free = np.zeros(len(net.size), dtype=np.bool_)
    required = np.zeros(len(net.size), dtype=np.bool_)
    for ids, mask in ((moment.free, free), (moment.required, required)):
        numbers = [numbering.value_of[v] for v in ids]
        mask[[v for v in numbers if v != NONE]] = True
    return PivotNetwork(
        pivot=pivot,
        free=free,
        required=required,
        before=_ancestors(net, pivot),
    )


def recomputed(net: Network, numbering: Numbering, choice: CutResult) -> BoolArray:
    """Return, by operation of the network, whether a choice recomputes it."""
    mask = np.zeros(len(net.cost), dtype=np.bool_)
    numbers = [numbering.operation_of[o] for o in choice.recomputed]
    mask[[o for o in numbers if o != NONE]] = True
    return mask


def mix(
    net: Network, at: PivotNetwork, more: BoolArray, less: BoolArray, cap_bytes: int
) -> BoolArray:
    """Return `less` without the components of less - more that the cap can save.

    Args:
        net: the network.
        at: the moment.
        more: operations recomputed by the choice that saves more.
        less: operations recomputed by the choice that fits.
        cap_bytes: bytes that may be saved, besides the free values.
    """
    again = less.copy()
    part = _components(net, less & ~more)
    parts = np.unique(part[part != NONE])
    if not len(parts):
        return again
    start = saved_bytes(net, again, at.required, at.free)
    gains = np.zeros(len(parts))
    for i, name in enumerate(parts):
        member = part == name
        cost = float(net.cost[member & at.before].sum())
        grown = saved_bytes(net, again & ~member, at.required, at.free) - start
        gains[i] = cost / max(grown, 1) if grown > 0 else np.inf
    # Of equal layers save the last: their bytes are free again when the backward gets
    # to recompute the first.
    for i in np.lexsort((-parts, -_rounded(gains))):
        smaller = again & (part != parts[i])
        if saved_bytes(net, smaller, at.required, at.free) <= cap_bytes:
            again = smaller
    return again


def _rounded(gains: FloatArray) -> FloatArray:
    """Return the numbers with 20 bits of mantissa: equal layers become equal."""
    mantissa, exponent = np.frexp(gains)
    return np.asarray(np.ldexp(np.round(mantissa * 2**20), exponent - 20))


@compiled
def saved_bytes(
    net: Network, again: BoolArray, required: BoolArray, free: BoolArray
) -> int:
    """Return the bytes saved at the pivot when these operations are recomputed."""
    total = 0
    for value in range(len(net.size)):
        if free[value] or again[net.writer[value]]:
            continue
        wanted = required[value]
        for k in range(net.readers_from[value], net.readers_from[value + 1]):
            wanted = wanted or again[net.readers[k]]
        if wanted:
            total += net.size[value]
    return total


@compiled
def _ancestors(net: Network, pivot: int) -> BoolArray:
    found = np.zeros(len(net.cost), dtype=np.bool_)
    found[pivot] = True
    for op in range(len(net.cost) - 1, -1, -1):
        if found[op]:
            for k in range(net.reads_from[op], net.reads_from[op + 1]):
                found[net.writer[net.reads[k]]] = True
    found[pivot] = False
    return found


@compiled
def _components(net: Network, member: BoolArray) -> IntArray:
    """Return, by operation, the least member connected to it; -1 for the others."""
    part = np.full(len(member), NONE, dtype=np.int64)
    for op in range(len(member)):
        if not member[op]:
            continue
        part[op] = op
        for k in range(net.reads_from[op], net.reads_from[op + 1]):
            writer = net.writer[net.reads[k]]
            if part[writer] == NONE:
                continue
            one = _root(part, writer)
            other = _root(part, op)
            part[max(one, other)] = min(one, other)
    for op in range(len(member)):
        if part[op] != NONE:
            part[op] = _root(part, op)
    return part


@compiled
def _root(part: IntArray, op: int) -> int:
    root = op
    while part[root] != root:
        root = int(part[root])
    return root


@compiled
def lay_out(
    net: Network,
    pivot: int,
    before: BoolArray,
    again: BoolArray,
    free: BoolArray,
    required: BoolArray,
) -> IntArray:
    """Return the sequence; see the module docstring."""
    n = len(net.cost)
    head = _head(net, pivot, before, again, free, required)
    rebuilt = again & ~(net.once & head)  # what cannot run twice is kept
    rank = np.zeros(n, dtype=np.float64)
    for op in range(n):
        rank[op] = op
        if head[op] and op > pivot:  # saved early: right behind what it reads
            rank[op] = 0.0
            for k in range(net.reads_from[op], net.reads_from[op + 1]):
                rank[op] = max(rank[op], rank[net.writer[net.reads[k]]])
            rank[op] += 1e-6
    first = np.flatnonzero(head)
    first = first[np.argsort(rank[first], kind="mergesort")]
    there = np.zeros(len(net.size), dtype=np.bool_)
    done = np.zeros(n, dtype=np.bool_)
    sequence = np.empty(4 * n + 16, dtype=np.int64)
    length = 0
    for step in first:
        sequence[length] = step
        length += 1
        done[step] = True
    for value in range(len(net.size)):
        writer = net.writer[value]
        there[value] = done[writer] and (free[value] or not rebuilt[writer])
    stack = np.empty(n, dtype=np.int64)
    missing = np.empty(n, dtype=np.int64)
    marked = np.zeros(n, dtype=np.bool_)
    for op in range(n):
        if done[op] or (again[op] and not before[op] and _is_read(net, op)):
            continue  # the latter run first when something reads them
        count = _missing(net, op, there, stack, missing, marked)
        if length + count + 1 > len(sequence):
            grown = np.empty(2 * (length + count + 1), dtype=np.int64)
            grown[:length] = sequence[:length]
            sequence = grown
        for i in range(count):
            late = missing[i]
            sequence[length] = late
            length += 1
            done[late] = True
            marked[late] = False
            for k in range(net.writes_from[late], net.writes_from[late + 1]):
                there[net.writes[k]] = True
    return sequence[:length].copy()


@compiled
def _is_read(net: Network, op: int) -> bool:
    for k in range(net.writes_from[op], net.writes_from[op + 1]):
        value = net.writes[k]
        if net.readers_from[value + 1] > net.readers_from[value]:
            return True
    return False


@compiled
def _head(
    net: Network,
    pivot: int,
    before: BoolArray,
    again: BoolArray,
    free: BoolArray,
    required: BoolArray,
) -> BoolArray:
    """Return what runs up to the pivot: its ancestors, and what is saved there."""
    head = before.copy()
    head[pivot] = True
    for value in range(len(net.size)):
        writer = net.writer[value]
        if free[value] or again[writer] or head[writer] or writer == pivot:
            continue
        wanted = required[value]
        for k in range(net.readers_from[value], net.readers_from[value + 1]):
            wanted = wanted or again[net.readers[k]]
        if wanted:
            head[writer] = True
    for op in range(len(head) - 1, -1, -1):
        if head[op]:
            for k in range(net.reads_from[op], net.reads_from[op + 1]):
                head[net.writer[net.reads[k]]] = True
    for op in range(pivot):
        ready = not again[op] and not head[op]
        for k in range(net.reads_from[op], net.reads_from[op + 1]):
            ready = ready and head[net.writer[net.reads[k]]]
        if ready:
            head[op] = True
    return head


@compiled
def _missing(
    net: Network,
    op: int,
    there: BoolArray,
    stack: IntArray,
    missing: IntArray,
    marked: BoolArray,
) -> int:
    """List the operation and what must run before it, ascending; return how many."""
    count = 1
    depth = 1
    missing[0] = op
    stack[0] = op
    marked[op] = True
    while depth:
        depth -= 1
        at = stack[depth]
        for k in range(net.reads_from[at], net.reads_from[at + 1]):
            value = net.reads[k]
            writer = net.writer[value]
            if not there[value] and not marked[writer]:
                marked[writer] = True
                missing[count] = writer
                count += 1
                stack[depth] = writer
                depth += 1
    missing[:count].sort()
    return count
