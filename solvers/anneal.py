"""Local search over sequences: executions are added, removed and shifted.

Simulated annealing on the relative cost plus a weight times the relative excess over
the budget. A move is one of

- *evict*: compute a value that is alive at the peak, but not used there, once more
  just before its next use;
- *add*: execute an operation again just before a random use;
- *remove*: drop an execution that is not needed;
- *shift*: move an execution to another place, which changes the order.

The work is counted in moves, so the result does not depend on the machine's speed.

Sources: annealing, S. Kirkpatrick et al., Science 220, 1983; add, remove and shift,
A. Imanishi et al., NeurIPS 2023. The evicting move is what makes it find a way out of
an infeasible start. Thresholds come from a table, so no move takes a logarithm, whose
last bit depends on the library; powers occur only where the temperature changes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gcpass.solvers.accelerate import compiled
from gcpass.solvers.edit import can_remove, insert, place_all, remove
from gcpass.solvers.network import NONE, FloatArray, IntArray, Network
from gcpass.solvers.timeline import (
    Timeline,
    at_or_before,
    can_run,
    empty_slot,
    next_read,
    peak_bytes,
    peak_slot,
    reads_value,
    sequence_of,
    total_cost,
)

COOLING = 0.03  # last temperature / first
HARDENING = 0.5  # the weight of an excess grows 6 times while a run cools
_THRESHOLDS: FloatArray = -np.log((np.arange(4096) + 0.5) / 4096.0)
_CHUNK = 4096  # moves at one temperature
_WORTH = 1e-5  # relative gain for which a sequence is written down on the way
_MODULUS = 2147483647  # MINSTD, S. Park and K. Miller, CACM 31(10), 1988
_FACTOR = 48271


class Settings(NamedTuple):
    """How to anneal.

    Attributes:
        budget: bytes.
        moves: number of moves tried.
        hot, cold: first and last temperature, in relative cost.
        weight: relative cost of an excess as large as the budget, at first.
        hardening: the weight grows by this power of the fall in temperature.
        evict, add, drop: shares of these moves in 1; the rest are shifts.
        reach: largest shift in slots, as a power of two.
    """

    budget: int
    moves: int
    hot: float
    cold: float
    weight: float
    hardening: float
    evict: float
    add: float
    drop: float
    reach: int


@compiled
def _random(state: IntArray) -> float:
    """Return a number in (0, 1)."""
    state[0] = state[0] * _FACTOR % _MODULUS
    return state[0] / _MODULUS  # type: ignore[no-any-return]


@compiled
def _below(state: IntArray, count: int) -> int:
    return int(_random(state) * count)


@compiled
def anneal(
    net: Network,
    line: Timeline,
    start: IntArray,
    seed: int,
    settings: Settings,
    thresholds: FloatArray,
) -> tuple[float, int, IntArray]:
    """Return (cost, peak, sequence) of the cheapest seen that fits.

    When none fits it is the one of the lowest peak that was kept.
    """
    state = np.zeros(1, dtype=np.int64)
    state[0] = seed * 7919 % (_MODULUS - 1) + 1
    base = max(np.sum(net.cost), 1e-300)
    place_all(net, line, start)
    budget = settings.budget
    cost = total_cost(net, line)
    peak = peak_bytes(line)
    best, best_cost, best_peak = start.copy(), cost, peak
    edits = np.zeros(3, dtype=np.int64)  # slot to empty, slot to fill, operation
    temperature = settings.hot
    steps = max(1, settings.moves // _CHUNK)
    cooling = (settings.cold / settings.hot) ** (1.0 / steps)
    weight = settings.weight
    energy = cost / base + weight * max(0.0, (peak - budget) / budget)
    for move in range(settings.moves):
        if move % _CHUNK == 0 and move:
            temperature *= cooling
            weight /= cooling**settings.hardening
            cost = total_cost(net, line)  # without the rounding of many sums
            energy = cost / base + weight * max(0.0, (peak - budget) / budget)
        if not _propose(net, line, state, settings, edits):
            continue
        saving = line.saving[0]
        if not _apply(net, line, edits):
            continue
        new_cost = cost + (line.saving[0] - saving)
        if edits[0] == NONE:
            new_cost += net.cost[edits[2]]
        elif edits[1] == NONE:
            new_cost -= net.cost[edits[2]]
        new_peak = peak_bytes(line)
        over = max(0.0, (new_peak - budget) / budget)
        new_energy = new_cost / base + weight * over
        limit = temperature * thresholds[_below(state, len(thresholds))]
        if new_energy - energy > limit:
            _undo(net, line, edits)
            continue
        cost, peak, energy = new_cost, new_peak, new_energy
        if _worth_keeping(cost, peak, best_cost, best_peak, budget):
            best, best_cost, best_peak = sequence_of(line), cost, peak
    if (peak <= budget and cost < best_cost) or best_peak > max(peak, budget):
        best, best_peak = sequence_of(line), peak
    place_all(net, line, best)
    return total_cost(net, line), best_peak, best


@compiled
def _worth_keeping(
    cost: float, peak: int, best_cost: float, best_peak: int, budget: int
) -> bool:
    """Whether a sequence is better by enough to be written down."""
    if peak > budget:
        return best_peak > budget and peak < best_peak * (1 - _WORTH)
    return best_peak > budget or cost < best_cost * (1 - _WORTH)


@compiled
def _apply(net: Network, line: Timeline, edits: IntArray) -> bool:
    if edits[1] != NONE:
        insert(net, line, edits[1], edits[2])
    if edits[0] == NONE:
        return True
    if can_remove(net, line, edits[0]):
        remove(net, line, edits[0])
        return True
    if edits[1] != NONE:
        remove(net, line, edits[1])
    return False


@compiled
def _undo(net: Network, line: Timeline, edits: IntArray) -> None:
    if edits[0] != NONE:
        insert(net, line, edits[0], edits[2])
    if edits[1] != NONE:
        remove(net, line, edits[1])


@compiled
def _propose(
    net: Network, line: Timeline, state: IntArray, settings: Settings, edits: IntArray
) -> bool:
    """Fill `edits` with a move: slot to empty, slot to fill, operation."""
    edits[0] = NONE
    edits[1] = NONE
    kind = _random(state)
    if kind < settings.evict:
        return _evict(net, line, state, edits)
    if kind < settings.evict + settings.add:
        return _add(net, line, state, edits)
    slot = line.slots[_below(state, line.number[0])]
    op = line.operation[slot]
    edits[0] = slot
    edits[2] = op
    if kind < settings.evict + settings.add + settings.drop:
        for _ in range(8):
            if line.times[op] > 1:
                break
            slot = line.slots[_below(state, line.number[0])]
            op = line.operation[slot]
        edits[0] = slot
        edits[2] = op
        return line.times[op] > 1 and can_remove(net, line, slot)
    if op == net.turn:
        return False
    target = _target(net, line, state, slot, settings.reach)
    if target < 0 or target >= len(line.operation):
        return False
    if line.operation[target] != NONE:
        target = empty_slot(line, max(target - 64, -1), target)
        if target == NONE:
            return False
    edits[1] = target
    return can_run(net, line, target, op)


@compiled
def _target(
    net: Network, line: Timeline, state: IntArray, slot: int, reach: int
) -> int:
    """Return a slot to move an execution to: in its window, or some way off."""
    if _random(state) < 0.5:
        low, high = NONE, len(line.operation)
        op = line.operation[slot]
        for k in range(net.reads_from[op], net.reads_from[op + 1]):
            low = max(low, line.first[net.writer[net.reads[k]]])
        for k in range(net.writes_from[op], net.writes_from[op + 1]):
            high = min(high, next_read(net, line, net.writes[k], slot))
        return low + 1 + _below(state, high - low - 1)
    away = 1 + _below(state, 1 << (1 + _below(state, reach)))
    return slot - away if _random(state) < 0.5 else slot + away


@compiled
def _evict(net: Network, line: Timeline, state: IntArray, edits: IntArray) -> bool:
    at = peak_slot(line)
    for _ in range(16):
        slot = line.slots[_below(state, line.number[0])]
        if slot >= at:
            continue
        op = line.operation[slot]
        if net.once[op]:
            continue
        for k in range(net.writes_from[op], net.writes_from[op + 1]):
            if line.end[slot, k - net.writes_from[op]] <= at:
                continue
            value = net.writes[k]
            if net.held[value] or not net.size[value]:
                continue
            use = next_read(net, line, value, at)
            if use == len(line.operation):
                continue  # alive for what draws on it without its own bytes
            if line.operation[at] != NONE and reads_value(
                net, line.operation[at], value
            ):
                continue
            return _before(net, line, op, at, use, edits)
    return False


@compiled
def _add(net: Network, line: Timeline, state: IntArray, edits: IntArray) -> bool:
    """Choose a random use of a value, and compute the value again before it."""
    slot = line.slots[_below(state, line.number[0])]
    op = line.operation[slot]
    degree = net.reads_from[op + 1] - net.reads_from[op]
    if degree == 0:
        return False
    value = net.reads[net.reads_from[op] + _below(state, degree)]
    writer = net.writer[value]
    if net.once[writer]:
        return False
    low = at_or_before(line, writer, slot)
    return _before(net, line, writer, low, slot, edits)


@compiled
def _before(
    net: Network, line: Timeline, op: int, low: int, high: int, edits: IntArray
) -> bool:
    target = empty_slot(line, max(low, high - 64), high)
    if target == NONE:
        return False
    edits[1] = target
    edits[2] = op
    return can_run(net, line, target, op)


def settings_for(
    net: Network,
    budget_bytes: int,
    moves: int,
    heat: tuple[float, float],
    slots: int,
) -> Settings:
    """Return settings with the usual shares of moves.

    Args:
        net: the network.
        budget_bytes: bytes.
        moves: number of moves.
        heat: first temperature in mean operation costs, and first weight.
        slots: of the timeline.
    """
    share = heat[0] / max(1, len(net.cost))
    return Settings(
        budget=budget_bytes,
        moves=moves,
        hot=share,
        cold=share * COOLING,
        weight=heat[1],
        hardening=HARDENING,
        evict=0.1,
        add=0.08,
        drop=0.2,
        reach=max(2, slots.bit_length() - 2),
    )


def thresholds() -> FloatArray:
    """Return -log of 4096 evenly spaced probabilities, the table of `anneal`."""
    return _THRESHOLDS
