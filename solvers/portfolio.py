"""Annealing runs side by side: hot ones explore, cold ones refine the best so far.

Irregular graphs want hot runs, which also change the order of everything; deep
repeated ones are ruined by heat and want cold runs from a constructed sequence. A
first short round does both on two threads. When the cold run came out cheaper, all the
others are cold; else one worker goes on exploring and the other refines.

Work is counted in moves, so the same number gives the same result; the deadline only
stops between rounds.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from gcpass.solvers.anneal import anneal, settings_for, thresholds
from gcpass.solvers.construct import Found, rank, slots_for
from gcpass.solvers.network import IntArray, Network
from gcpass.solvers.timeline import new_timeline

WORKERS = 2
SLOTS_PER_OPERATION = 12  # sparser than for construction: shifts find a gap at once
SCOUTING = 0.08  # of the moves go to the first round
FINISHING = 0.15  # and to the last, which refines
MOVES_PER_OPERATION = 4_000  # of a run: restarts find more than longer ones
# First temperature in mean operation costs and weight of an excess, by run. Their ratio
# says how far over the budget a run wanders at first.
HOT = ((3.0, 1.0), (4.0, 2.0), (2.0, 1.0), (8.0, 3.0))
COLD = ((0.5, 0.2), (1.0, 0.33), (0.3, 0.3), (1.5, 0.6))


@dataclass(frozen=True, slots=True, eq=False)
class _Run:
    start: IntArray
    seed: int
    moves: int
    heat: tuple[float, float]


def improve(
    net: Network,
    starts: Sequence[Found],
    budget_bytes: int,
    moves: int,
    deadline: float,
    enough_seconds: float = 0.0,
) -> tuple[Found, bool]:
    """Return the cheapest sequence found, and whether the deadline stopped it.

    Args:
        net: the network.
        starts: sequences; the first is the given order. If none fits and no run finds
            one that does, the one of the lowest peak is returned.
        budget_bytes: bytes.
        moves: moves of each worker.
        deadline: `time.monotonic()` at which no further run starts.
        enough_seconds: a cost at which to stop, such as a proven bound.
    """
    best = min(starts, key=lambda found: rank(found, budget_bytes))
    explores = True
    for number, (length, hot) in enumerate(_rounds(net, moves)):
        if best.peak_bytes <= budget_bytes and best.cost_seconds <= enough_seconds:
            return best, False
        if time.monotonic() > deadline:
            return best, True
        runs = [
            _hot(starts[0], WORKERS * number + worker, length)
            if hot[worker] and explores
            else _cold(best, WORKERS * number + worker, length)
            for worker in range(WORKERS)
        ]
        found = _together(net, runs, budget_bytes)
        if number == 0:
            explores = rank(found[0], budget_bytes) < rank(found[1], budget_bytes)
        best = min(best, *found, key=lambda found: rank(found, budget_bytes))
    return best, False


def _rounds(net: Network, moves: int) -> Iterator[tuple[int, tuple[bool, bool]]]:
    """Yield the moves of each round, and which workers are to explore."""
    yield int(moves * SCOUTING), (True, False)
    rest = moves * (1 - SCOUTING - FINISHING)
    count = max(1, round(rest / (MOVES_PER_OPERATION * len(net.cost) + 1)))
    for i in range(count):
        yield int(rest / count), (True, i == 0)
    yield int(moves * FINISHING), (False, False)


def _hot(given: Found, seed: int, moves: int) -> _Run:
    return _Run(given.sequence, seed, moves, HOT[seed // WORKERS % len(HOT)])


def _cold(best: Found, seed: int, moves: int) -> _Run:
    return _Run(best.sequence, seed, moves, COLD[seed % len(COLD)])


def _together(net: Network, runs: Sequence[_Run], budget_bytes: int) -> list[Found]:
    with ThreadPoolExecutor(WORKERS) as pool:
        tasks = [pool.submit(_anneal, net, run, budget_bytes) for run in runs]
        return [task.result() for task in tasks]


def _anneal(net: Network, run: _Run, budget_bytes: int) -> Found:
    longest = max(len(net.cost), len(run.start))
    slots = slots_for(longest, SLOTS_PER_OPERATION)
    settings = settings_for(net, budget_bytes, run.moves, run.heat, slots)
    line = new_timeline(net, slots)
    cost, peak, sequence = anneal(
        net, line, run.start, run.seed, settings, thresholds()
    )
    return Found(np.asarray(sequence), float(cost), int(peak), "annealing")
