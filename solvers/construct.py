"""Sequences for a budget, built from cuts at the moments where memory is short.

For a few pivots, and with no, every, every second, fourth ... waist forced to be saved
(`gcpass.solvers.narrow`), the choice for the budget is laid out
(`gcpass.solvers.cut_plan`), made to fit where it exceeds the budget elsewhere
(`gcpass.solvers.evict`) and freed of repeats that are not needed
(`gcpass.solvers.tighten`). Without forced waists this is within a few hundredths of a
percentage point of the bound on transformers down to a third of their memory; below,
where rebuilding must itself be cut into segments, the forced ones are cheaper.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from gcpass.solvers.bound import Moments
from gcpass.solvers.cut_plan import (
    PivotNetwork,
    lay_out,
    mix,
    pivot_network,
    recomputed,
)
from gcpass.solvers.edit import place_all
from gcpass.solvers.evict import LONGEST_CHAIN, RULES, evict
from gcpass.solvers.frontier import Frontier
from gcpass.solvers.narrow import waists
from gcpass.solvers.network import NONE, IntArray, Network, Numbering
from gcpass.solvers.problem import OpId
from gcpass.solvers.tighten import drop_repeats
from gcpass.solvers.timeline import (
    Timeline,
    new_timeline,
    peak_bytes,
    sequence_of,
    total_cost,
)

EVICTION_WORK = (4_000_000, 1_000)  # values looked at, and more per operation
STARTS_PER_RULE = 2  # sequences, of those that need evictions, to which all rules go
SLOTS_PER_OPERATION = 8  # gaps for insertions; the tree is twice as large


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """A sequence of the network with what it costs and needs, and who built it."""

    sequence: IntArray
    cost_seconds: float
    peak_bytes: int
    origin: str


@dataclass(slots=True, kw_only=True, eq=False)
class Builder:
    """Builds sequences of one problem for any number of budgets.

    Attributes:
        net: the network.
        numbering: how it belongs to the problem.
        moments: the cut problems of the problem.
    """

    net: Network
    numbering: Numbering
    moments: Moments
    line: Timeline = field(init=False)
    _at: dict[OpId | None, PivotNetwork] = field(init=False, default_factory=dict)
    _narrow: dict[OpId | None, list[IntArray]] = field(init=False, default_factory=dict)
    _forced: dict[tuple[OpId | None, int], Frontier] = field(
        init=False, default_factory=dict
    )

    def __post_init__(self) -> None:
        self.line = new_timeline(
            self.net, slots_for(len(self.net.cost), SLOTS_PER_OPERATION)
        )

    def given(self) -> Found:
        """Return the given order, which recomputes nothing."""
        return self.measure(np.arange(len(self.net.cost), dtype=np.int64))

    def measure(self, sequence: IntArray) -> Found:
        """Return the sequence with its cost and peak."""
        self._place(sequence)
        return self._found("given order")

    def build(self, budget_bytes: int, *, all_rules: bool) -> Iterator[Found]:
        """Yield sequences for the budget; not every one fits.

        Args:
            budget_bytes: bytes.
            all_rules: evict by every rule from the best starts, else by the first only.
        """
        given = np.arange(len(self.net.cost), dtype=np.int64)
        tried: list[tuple[tuple[bool, float, int], int, IntArray]] = []
        for laid_out in itertools.chain(self._laid_out(budget_bytes), [given]):
            found = self.fit(laid_out, budget_bytes)
            if found.origin == "eviction":
                tried.append((rank(found, budget_bytes), len(tried), laid_out))
            yield found
        for _, _, laid_out in sorted(tried, key=lambda x: x[:2])[:STARTS_PER_RULE]:
            for rule in RULES[1:] if all_rules else ():
                yield self.fit(laid_out, budget_bytes, rule)

    def fit(
        self,
        sequence: IntArray,
        budget_bytes: int,
        rule: tuple[float, float] = RULES[0],
    ) -> Found:
        """Return the sequence after evicting and dropping repeats."""
        self._place(sequence)
        evicts = peak_bytes(self.line) > budget_bytes
        if evict(self.net, self.line, budget_bytes, self._eviction_work(), rule):
            drop_repeats(self.net, self.line, budget_bytes)
        return self._found("eviction" if evicts else "cut")

    def _laid_out(self, budget_bytes: int) -> Iterator[IntArray]:
        """Yield sequences of cuts, with forced waists where the plain does not fit."""
        for pivot in self._pivots(budget_bytes):
            plain = self._from_cut(pivot, 0, budget_bytes)
            if plain is None:
                continue
            yield plain
            self._place(plain)
            if peak_bytes(self.line) <= budget_bytes:
                continue
            for every in self._strides(pivot):
                forced = self._from_cut(pivot, every, budget_bytes)
                if forced is not None:
                    yield forced

    def from_recomputed(self, operations: Iterable[OpId]) -> IntArray:
        """Return the sequence in which these run again after the turn."""
        at = self._moment(None)
        again = np.zeros(len(self.net.cost), dtype=np.bool_)
        numbers = [self.numbering.operation_of[o] for o in operations]
        again[[o for o in numbers if o != NONE]] = True
        return lay_out(self.net, at.pivot, at.before, again, at.free, at.required)

    def narrow_places(self, budget_bytes: int) -> int:
        """Return how many places could be cut where memory is shortest."""
        counts = (len(self._waists(pivot)) for pivot in self._pivots(budget_bytes))
        return max(counts, default=0)

    def _from_cut(
        self, pivot: OpId | None, every: int, budget_bytes: int
    ) -> IntArray | None:
        """Return the sequence of the choice for the budget, None if there is none."""
        choices = self._choices(pivot, every)
        at = self._moment(pivot)
        cap = budget_bytes - choices.network.moment.fixed_bytes
        if not choices.points:
            return None
        if choices.can_fit(cap):
            more, less = choices.neighbours(cap)
            again = mix(
                self.net,
                at,
                recomputed(self.net, self.numbering, more),
                recomputed(self.net, self.numbering, less),
                cap,
            )
        else:
            again = recomputed(self.net, self.numbering, choices.points[-1])
        return lay_out(self.net, at.pivot, at.before, again, at.free, at.required)

    def _choices(self, pivot: OpId | None, every: int) -> Frontier:
        """Return the frontier of a moment, with waists that cannot be recomputed."""
        if every == 0:
            return self.moments.frontier(pivot)
        if (pivot, every) not in self._forced:
            network = self.moments.frontier(pivot).network
            places = self._waists(pivot)[::-1][::every]
            writers = {int(o) for values in places for o in self.net.writer[values]}
            costs = network.costs.copy()
            for i, op_id in enumerate(network.operations):
                if self.numbering.operation_of[op_id] in writers:
                    costs[i] = math.inf
            forced = dataclasses.replace(network, costs=costs)
            self._forced[pivot, every] = Frontier(forced)
        return self._forced[pivot, every]

    def _strides(self, pivot: OpId | None) -> list[int]:
        count = len(self._waists(pivot))
        return [1 << i for i in range(count.bit_length() - 1)]

    def _waists(self, pivot: OpId | None) -> list[IntArray]:
        if pivot not in self._narrow:
            self._narrow[pivot] = waists(self.net, self._moment(pivot).before)
        return self._narrow[pivot]

    def _pivots(self, budget_bytes: int) -> list[OpId | None]:
        """Return the moment that proves most, and the boundary if there is one."""
        chosen = [self.moments.bound(budget_bytes).pivot]
        if self.numbering.turn != NONE and None not in chosen:
            chosen.append(None)
        return [p for p in chosen if p is not None or self.numbering.turn != NONE]

    def _moment(self, pivot: OpId | None) -> PivotNetwork:
        if pivot not in self._at:
            network = self.moments.frontier(pivot).network
            self._at[pivot] = pivot_network(self.net, self.numbering, network)
        return self._at[pivot]

    def _eviction_work(self) -> int:
        base, more = EVICTION_WORK
        return base + more * len(self.net.cost)

    def _place(self, sequence: IntArray) -> None:
        """Put a sequence on the timeline, on a longer one if it is long."""
        if 2 * len(sequence) + LONGEST_CHAIN > len(self.line.operation):
            slots = slots_for(len(sequence), SLOTS_PER_OPERATION)
            self.line = new_timeline(self.net, slots)
        place_all(self.net, self.line, sequence)

    def _found(self, origin: str) -> Found:
        return Found(
            sequence_of(self.line),
            float(total_cost(self.net, self.line)),
            int(peak_bytes(self.line)),
            origin,
        )


def rank(found: Found, budget_bytes: int) -> tuple[bool, float, int]:
    """Return what to minimize: fitting before cheap, the lower peak if none fits."""
    fits = found.peak_bytes <= budget_bytes
    value = found.cost_seconds if fits else float(found.peak_bytes)
    return not fits, value, found.peak_bytes


def slots_for(executions: int, per_execution: int) -> int:
    """Return the number of slots, a power of two."""
    return 1 << max(6, (per_execution * executions + LONGEST_CHAIN).bit_length())
