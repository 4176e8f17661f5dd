"""Removes the repeats that a budget does not need, dearest first.

A sequence built for a cap at one moment recomputes more than the peak demands. Every
repeated execution is tried once, in the order of its operation's cost and from the end
of the sequence: it goes when the rest stays valid and within the budget, and not dearer
because the value must be saved. One try costs
O(degree * log slots), so the pass is near linear.
"""

from __future__ import annotations

import numpy as np

from gcpass.solvers.accelerate import compiled
from gcpass.solvers.edit import can_remove, insert, remove
from gcpass.solvers.network import NONE, Network
from gcpass.solvers.timeline import Timeline, peak_bytes


@compiled
def drop_repeats(net: Network, line: Timeline, budget: int) -> int:
    """Remove executions from a timeline within the budget; return how many."""
    order = np.argsort(-net.cost, kind="mergesort")
    dropped = 0
    for op in order:
        if line.times[op] > 1:
            dropped += _drop(net, line, op, budget)
    return dropped


@compiled
def _drop(net: Network, line: Timeline, op: int, budget: int) -> int:
    places = np.empty(line.times[op], dtype=np.int64)
    at = line.first[op]
    for i in range(len(places)):
        places[i] = at
        at = line.later[at]
    dropped = 0
    for i in range(len(places) - 1, NONE, -1):
        slot = places[i]
        if line.times[op] == 1 or not can_remove(net, line, slot):
            continue
        saving = line.saving[0]
        remove(net, line, slot)
        dearer = line.saving[0] - saving > net.cost[op]  # saved instead
        if dearer or peak_bytes(line) > budget:
            insert(net, line, slot, op)
        else:
            dropped += 1
    return dropped
