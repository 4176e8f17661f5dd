"""Narrow places of a graph: where a chain of blocks can be cut.

The bytes that cross a place are the sizes of the values written at or before it and
read behind it, among the operations that the pivot draws on. A place is narrow when
they are a local minimum and at most `TOLERANCE` times the larger of the two minima
within `WINDOW` operations before and behind: a network whose activations shrink keeps
its narrow places, and the inside of an attention block, wider than both its ends, has
none. Values that cross a narrow place are its **waist**.

Saving the waists of every k-th narrow place bounds what must be rebuilt at once; this
is the checkpointing of segments of T. Chen et al., "Training deep nets with sublinear
memory cost", 2016, arXiv:1604.06174, section 4, on any graph.
"""

from __future__ import annotations

import numpy as np

from gcpass.solvers.accelerate import compiled
from gcpass.solvers.network import NONE, BoolArray, IntArray, Network

TOLERANCE = 1.5  # a residual stream alone, or with half as much besides, is narrow
WINDOW = 24  # operations; the forward of a transformer block has 10 to 30
MOST_VALUES = 8  # of a waist; networks with long skips have up to 5


def waists(net: Network, before: BoolArray) -> list[IntArray]:
    """Return the values that cross each narrow place, in order, in O(edges + crossing).

    Args:
        net: the network.
        before: by operation, whether it belongs to the part to be cut.
    """
    order = np.flatnonzero(before)
    if len(order) < 3:
        return []
    last = _last_readers(net, before)
    rank = np.full(len(before), NONE, dtype=np.int64)
    rank[order] = np.arange(len(order))
    own = before[net.writer] & (last > net.writer) & (net.size > 0)
    values = np.flatnonzero(own)
    start, end = rank[net.writer[values]], rank[last[values]]
    delta = np.zeros(len(order) + 1, dtype=np.int64)
    np.add.at(delta, start, net.size[values])
    np.add.at(delta, end, -net.size[values])
    crossing = np.cumsum(delta)[: len(order) - 1]  # behind the operation of this rank
    by_start = np.argsort(start, kind="stable")
    result = []
    for place in _narrow(crossing):
        near = by_start[: np.searchsorted(start[by_start], place, side="right")]
        waist = values[near[end[near] > place]]
        if len(waist) <= MOST_VALUES:
            result.append(waist)
    return result


def _narrow(crossing: IntArray) -> list[int]:
    result = []
    for place, size in enumerate(crossing):
        low = crossing[max(0, place - WINDOW) : place]
        high = crossing[place + 1 : place + 1 + WINDOW]
        if not len(low) or not len(high) or size == 0:
            continue
        least = max(low.min(), high.min())
        if size <= TOLERANCE * least and size <= low[-1] and size < high[0]:
            result.append(place)
        elif size <= TOLERANCE * least and size == low[-1] == high[0]:
            result.append(place)  # a chain: every place is as narrow
    return result


@compiled
def _last_readers(net: Network, before: BoolArray) -> IntArray:
    """Return, by value, the last operation of the part that reads it, or -1."""
    last = np.full(len(net.size), NONE, dtype=np.int64)
    for value in range(len(net.size)):
        for k in range(net.readers_from[value], net.readers_from[value + 1]):
            reader = net.readers[k]
            if before[reader] and reader > last[value]:
                last[value] = reader
    return last
