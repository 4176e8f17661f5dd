"""A 0/1 knapsack over what to save: a limit on saved bytes, no peak in it.

    maximize sum over saved v of seconds(v) with sum over saved v of bytes(v) <= limit

over the values that the backward can draw on and that can be recomputed, where
seconds(v) is the time of the operation that writes v. What is not chosen is recomputed
once, just before its first use in the backward, and kept until its last. This is what
torch's `activation_memory_budget` does (its budget is the limit as a fraction). It is
here for comparison: the peak of such a plan is not monotone in the limit, because with
little saved on the residual path the first backward operation rebuilds the whole
forward (pytorch#197838).

Solved exactly by dynamic programming over `SLOTS` slots of bytes, sizes rounded up: one
table for every limit. `knapsack` takes a budget for the peak as the other methods do
and looks for a limit whose simulated peak is within it.

Sources: R. Bellman, "Dynamic Programming", 1957; H. Kellerer, U. Pferschy, D. Pisinger,
"Knapsack Problems", 2004, section 2.3, doi:10.1007/978-3-540-24777-7. Not modelled: the
second minimum cut that torch runs over the values that were not chosen; that a value is
worth less when its neighbours are saved.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gcpass.solvers.classics.choose import cheapest
from gcpass.solvers.classics.emit import pinned_operations, saving
from gcpass.solvers.cut import boundary_cut
from gcpass.solvers.problem import OpId, Phase, Plan, Problem, Solution, ValueId
from gcpass.solvers.turn import turned

SLOTS = 2000  # of the bytes of all items; torch uses 10,000
LIMITS = 128  # limits to choose from, evenly from all bytes down to none


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Knapsack:
    """The table of all limits.

    Attributes:
        items: values that can be saved or recomputed, ascending.
        sizes: int64 of shape (items,), in slots, rounded up.
        taken: bool of shape (items, slots + 1): the best choice among the first i + 1
            items within so many slots takes item i.
        unit: bytes of a slot.
    """

    items: tuple[ValueId, ...]
    sizes: npt.NDArray[np.int64]
    taken: npt.NDArray[np.bool_]
    unit: int

    def chosen(self, limit_bytes: int) -> frozenset[ValueId]:
        """Return the values to save within a limit."""
        room = min(limit_bytes // self.unit, self.taken.shape[1] - 1)
        result = []
        for i in range(len(self.items) - 1, -1, -1):
            if self.taken[i, room]:
                result.append(self.items[i])
                room -= int(self.sizes[i])
        return frozenset(result)


def knapsack(problem: Problem, budget_bytes: int | None) -> Solution:
    """Return the cheapest plan of a saved-bytes limit whose peak is within the budget.

    Raises:
        SolverError: the constraints exclude every plan, or ortools is missing.
    """
    step = turned(problem)
    table = knapsack_of(step.training)
    total = sum(step.training.values[v].size_bytes for v in table.items)
    total += len(table.items) * table.unit  # sizes are rounded up

    def within(position: int) -> Plan:
        limit = total * (LIMITS - 1 - position) // (LIMITS - 1)
        return saving(step, table.chosen(limit), "knapsack")

    return cheapest(problem, within, LIMITS, budget_bytes)


def saving_bytes(problem: Problem, limit_bytes: int) -> Plan:
    """Return the plan that saves the best values within a limit on saved bytes.

    Values that must be saved (held or not recomputable ones) do not count.

    Raises:
        SolverError: the constraints exclude every plan, or ortools is missing.
    """
    step = turned(problem)
    chosen = knapsack_of(step.training).chosen(limit_bytes)
    return saving(step, chosen, "knapsack")


def knapsack_of(problem: Problem) -> Knapsack:
    """Return the table of a training problem, in O(items * SLOTS)."""
    items = _items(problem)
    writers = problem.writers()
    sizes_bytes = [problem.values[v].size_bytes for v in items]
    unit = max(1, -(-sum(sizes_bytes) // SLOTS))
    sizes = np.array([-(-size // unit) for size in sizes_bytes], dtype=np.int64)
    slots = int(sizes.sum())
    best = np.zeros(slots + 1)
    taken = np.zeros((len(items), slots + 1), dtype=np.bool_)
    for i, (value, size) in enumerate(zip(items, sizes, strict=True)):
        with_it = np.full(slots + 1, -1.0)
        with_it[size:] = best[: slots + 1 - size] + _seconds(problem, writers[value])
        taken[i] = with_it > best
        best = np.maximum(best, with_it)
    return Knapsack(items=items, sizes=sizes, taken=taken, unit=unit)


def _items(problem: Problem) -> tuple[ValueId, ...]:
    network = boundary_cut(problem)
    pinned = pinned_operations(problem)
    result = []
    for value in network.values:
        writer = network.moment.writers[value]
        if writer is None or not problem.values[value].savable:
            continue
        forward = problem.operations[writer].phase is Phase.FORWARD
        if forward and writer not in pinned:
            result.append(value)
    return tuple(result)


def _seconds(problem: Problem, writer: OpId | None) -> float:
    """Return the time that saving a value is worth; several results share theirs."""
    assert writer is not None, "items are computed"
    op = problem.operations[writer]
    return op.cost_seconds / len(op.writes)
