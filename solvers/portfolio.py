"""Annealing runs side by side: hot ones explore, cold ones refine the best so far.

Irregular graphs want hot runs, which also change the order of everything; deep
repeated ones are ruined by heat and want a cold run from a constructed sequence. A
first short round does both on two threads, and the rest of the work goes to the kind
that came out cheaper. Work is counted in moves, so the same limit gives the same
result; the deadline only stops between runs.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from gcpass.solvers.anneal import anneal, settings_for, thresholds
from gcpass.solvers.construct import Found, slots_for
from gcpass.solvers.network import IntArray, Network
from gcpass.solvers.timeline import new_timeline

WORKERS = 2
SLOTS_PER_OPERATION = 12  # sparser than for construction: shifts find a gap at once
SCOUTING = 0.2  # of the moves go to the first round
MOVES_PER_OPERATION = 10_000  # a run that is longer finds little more
HOT = (6.0, 14.0, 9.0, 20.0)  # mean operation costs, by run
COLD = (0.3, 1.0, 0.6, 1.5)


@dataclass(frozen=True, slots=True, eq=False)
class _Run:
    start: IntArray
    seed: int
    moves: int
    hot: float


def improve(
    net: Network,
    starts: Sequence[Found],
    budget_bytes: int,
    moves: int,
    deadline: float,
) -> tuple[Found, bool]:
    """Return the cheapest sequence found, and whether the deadline stopped it.

    Args:
        net: the network.
        starts: sequences; the first is the given order. If none fits and no run finds
            one that does, the one of the lowest peak is returned.
        budget_bytes: bytes.
        moves: moves of each worker.
        deadline: `time.monotonic()` at which no further run starts.
    """
    best = min(starts, key=lambda found: rank(found, budget_bytes))
    given = starts[0].sequence
    scouting = int(moves * SCOUTING)
    first = [
        _Run(given, 1, scouting, HOT[0]),
        _Run(best.sequence, 2, scouting, COLD[0]),
    ]
    hot, cold = _together(net, first, budget_bytes)
    explore = rank(hot, budget_bytes) < rank(cold, budget_bytes)
    best = min(best, hot, cold, key=lambda found: rank(found, budget_bytes))
    rest = moves - scouting
    rounds = max(1, rest // max(1, MOVES_PER_OPERATION * len(net.cost)))
    for i in range(rounds):
        if time.monotonic() > deadline:
            return best, True
        runs = []
        for worker in range(WORKERS):
            at = WORKERS * i + worker
            heat = (HOT if explore else COLD)[at % 4]
            start = given if explore and at % 3 == 2 else best.sequence
            runs.append(_Run(start, 3 + at, rest // rounds, heat))
        found = _together(net, runs, budget_bytes)
        best = min(best, *found, key=lambda found: rank(found, budget_bytes))
    return best, False


def rank(found: Found, budget_bytes: int) -> tuple[bool, float, int]:
    """Return what to minimize: fitting before cheap, the lower peak if none fits."""
    fits = found.peak_bytes <= budget_bytes
    value = found.cost_seconds if fits else float(found.peak_bytes)
    return not fits, value, found.peak_bytes


def _together(net: Network, runs: Sequence[_Run], budget_bytes: int) -> list[Found]:
    with ThreadPoolExecutor(WORKERS) as pool:
        tasks = [pool.submit(_anneal, net, run, budget_bytes) for run in runs]
        return [task.result() for task in tasks]


def _anneal(net: Network, run: _Run, budget_bytes: int) -> Found:
    longest = max(len(net.cost), len(run.start))
    slots = slots_for(longest, SLOTS_PER_OPERATION)
    settings = settings_for(net, budget_bytes, run.moves, run.hot, slots)
    line = new_timeline(net, slots)
    cost, peak, sequence = anneal(
        net, line, run.start, run.seed, settings, thresholds()
    )
    return Found(np.asarray(sequence), float(cost), int(peak), "annealing")
