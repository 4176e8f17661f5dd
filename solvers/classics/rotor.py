"""Optimal persistent schedules for chains of unequal stages, by dynamic programming.

A schedule is **persistent** when a checkpoint stays until the backward of its stage.
Each sub-chain s ... t starts with its checkpoint there and m bytes besides, and begins
in one of two ways:

    C(s, t, m) = min of
      all: u_s + C(s + 1, t, m - w_s)
           F_all of s, the rest, and at last B of s
      ck:  min over s' of sum(u_k, s <= k < s') + C(s', t, m - w_s,s') + C(s, s' - 1, m)
           F_ck of s, F_none of s + 1 ... s' - 1, the part behind s', then the part
           before it, again from the checkpoint of s
    C(s, s, m) = u_s
           F_all of s, then its B

if the peaks on the way fit into m (the paper's recursion for C_BP). u are seconds of a
stage's forward; w_s the bytes that F_all leaves, w_s,s' those of the checkpoint of s'
that the one of s has not. Backward times are the same in all plans and left out. Two
changes against the paper: the figures of a stage are those of the forward or of a
repeat, which runs no more than its goal needs (`gcpass.solvers.classics.figures`), and
values that several checkpoints contain are counted once.

Bytes are counted in `SLOTS` slots of the peak without recomputation, sizes and peaks
rounded up, so what fits in slots fits in bytes; exact when that peak is below `SLOTS`.
Each m gives a schedule; the cheapest one whose *simulated* peak fits is returned. So
the result is optimal among persistent schedules where the chain model is exact (chains,
nothing fusible), up to the rounding.

Source: O. Beaumont, L. Eyraud-Dubois, J. Herrmann, A. Joly, A. Shilova, "Optimal
checkpointing for heterogeneous chains: how to train deep neural networks with limited
memory", 2019, arXiv:1911.13214. They also show that persistent schedules are not always
optimal. Not modelled: what `gcpass.solvers.classics.figures` leaves out; offloading.
O(stages^3 * slots) with numpy vectors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gcpass.solvers.classics.choose import Knob, cheapest
from gcpass.solvers.classics.figures import Figures, Run, bytes_of, figures_of
from gcpass.solvers.classics.stages import Move, Stages, emit_schedule, stages_of
from gcpass.solvers.problem import Plan, Problem, Solution
from gcpass.solvers.turn import turned

SLOTS = 500  # a size is rounded up by 0.2 % of the peak at most
MOST_STAGES = 128  # tables of 128 * 128 * 626 numbers: 80 MB, 3 seconds
HEADROOM = 1.25  # slots for schedules that the model takes for larger than they are
CHEAPER = 1e-12  # relative: two costs that differ less are the same

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
_Run = tuple[Floats, Ints]  # seconds and peak bytes of F s ... s' - 1, by s'
_Passing = tuple[_Run, _Run]  # executed again, and in the forward


def rotor(problem: Problem, budget_bytes: int | None) -> Solution:
    """Return the cheapest persistent schedule within the budget.

    Raises:
        SolverError: the constraints exclude every plan.
    """
    return cheapest(problem, *by_level(problem), budget_bytes)


def by_level(problem: Problem) -> tuple[Knob, int]:
    """Return what builds the plan for ever less modelled memory, and of how many.

    Raises:
        SolverError: see `rotor`.
    """
    step = turned(problem)
    stages = stages_of(step, MOST_STAGES)
    top = len(stages) - 1
    moves = [Move(i) for i in range(top + 1)]
    moves += [Move(i, back=True) for i in range(top, -1, -1)]
    stored = emit_schedule(turned(step.training), stages, moves, "rotor")
    tables = tables_of(step.training, stages, stored)
    levels = tables.levels()

    def at_level(position: int) -> Plan:
        schedule = tables.schedule(0, top, levels[position - 1]) if position else moves
        return emit_schedule(step, stages, schedule, "rotor")

    return at_level, 1 + len(levels)


@dataclass(slots=True, kw_only=True)
class Tables:
    """C and the choices behind it; s, t, s' are stages, m counts slots.

    Attributes:
        figures: of the stages.
        unit: bytes of a slot.
        cost: C, float64 of shape (stages, stages, slots + 1), seconds.
        choice: int16 of that shape: 0 for *all*, s' - s for *ck*.
        ahead_bytes: int64 of shape (stages, stages): w_s,s' in bytes.
        taped: int64 of shape (stages,): w_s in slots.
    """

    figures: Figures
    unit: int
    cost: Floats
    choice: npt.NDArray[np.int16]
    ahead_bytes: Ints
    taped: Ints

    def slots(self, size_bytes: int | Ints) -> Ints:
        """Return bytes in slots, rounded up."""
        return -(-np.asarray(size_bytes, dtype=np.int64) // self.unit)

    def levels(self) -> list[int]:
        """Return the fewest slots for each cost of the whole chain, cheapest first."""
        row = self.cost[0, -1]
        result: list[int] = []
        for m in range(len(row)):
            before = row[result[-1]] if result else np.inf
            if row[m] < before * (1 - CHEAPER) or (not result and np.isfinite(row[m])):
                result.append(m)
        return result[::-1]

    def schedule(self, s: int, t: int, m: int) -> Iterator[Move]:
        """Yield the moves behind a finite C(s, t, m)."""
        ahead = int(self.choice[s, t, m])
        if s == t or ahead == 0:
            yield Move(s)
            if s < t:
                yield from self.schedule(s + 1, t, m - int(self.taped[s]))
            yield Move(s, back=True)
            return
        yield from (Move(stage) for stage in range(s, s + ahead))
        room = m - int(self.slots(self.ahead_bytes[s, s + ahead]))
        yield from self.schedule(s + ahead, t, room)
        yield from self.schedule(s, s + ahead - 1, m)


def tables_of(problem: Problem, stages: Stages, stored: Plan) -> Tables:
    """Return the filled tables of a chain.

    Args:
        problem: a training problem.
        stages: its chain.
        stored: a plan of it that recomputes nothing and runs the stages in order.
    """
    tables = _empty(problem, stages, stored)
    count = len(stages)
    passing = [_passing(tables, s) for s in range(count)]
    for s in range(count):
        _alone(tables, s)
    for length in range(1, count):
        for s in range(count - length):
            _fill(tables, s, s + length, passing[s])
    return tables


def _empty(problem: Problem, stages: Stages, stored: Plan) -> Tables:
    count = len(stages)
    unit = max(1, -(-stored.peak_bytes // SLOTS))
    slots = int(HEADROOM * -(-stored.peak_bytes // unit)) + 1
    ahead = np.zeros((count, count), dtype=np.int64)
    for s in range(count):
        for behind in range(s + 1, count):
            more = stages.checkpoint[behind] - stages.checkpoint[s]
            ahead[s, behind] = bytes_of(problem, more)
    taped = []
    for s in range(count):
        left = stages.tape[s].union(*stages.checkpoint[s + 1 : s + 2])
        taped.append(-(-bytes_of(problem, left - stages.checkpoint[s]) // unit))
    return Tables(
        figures=figures_of(problem, stages, stored),
        unit=unit,
        cost=np.full((count, count, slots + 1), np.inf),
        choice=np.zeros((count, count, slots + 1), dtype=np.int16),
        ahead_bytes=ahead,
        taped=np.array(taped, dtype=np.int64),
    )


def _fill(tables: Tables, s: int, t: int, passing: _Passing) -> None:
    """Fill C(s, t, m) from shorter sub-chains."""
    again, first = passing
    taping = _all(tables, s, t)
    ahead, checkpoint = _ck(tables, s, t, first if t == len(tables.cost) - 1 else again)
    better = checkpoint < taping
    tables.cost[s, t] = np.where(better, checkpoint, taping)
    tables.choice[s, t] = np.where(better, ahead, 0)


def _alone(tables: Tables, s: int) -> None:
    """Fill C(s, s, m); the last stage follows the forward, the others run again."""
    figures = tables.figures
    last = s == len(tables.cost) - 1
    run = figures.first_all[s] if last else figures.tape[s]
    besides = 0 if last else figures.other_bytes[s]
    need = max(run.peak_bytes + besides, figures.back_bytes[s])
    if last:
        left = int(tables.taped[s]) * tables.unit
        need = max(need, figures.between_bytes + left)
    tables.cost[s, s, int(tables.slots(need)) :] = run.seconds


def _all(tables: Tables, s: int, t: int) -> Floats:
    """Return the cost of *all* by m: the tape of s stays until its backward."""
    figures = tables.figures
    first = t == len(tables.cost) - 1
    run = (figures.first_all if first else figures.all)[s]
    besides = 0 if first else figures.other_bytes[t]
    need = int(tables.slots(max(run.peak_bytes + besides, figures.back_bytes[s])))
    taped = int(tables.taped[s])
    result = np.full(tables.cost.shape[2], np.inf)
    start = max(need, taped)
    inner = tables.cost[s + 1, t]
    result[start:] = run.seconds + inner[start - taped : len(inner) - taped]
    return result


def _ck(tables: Tables, s: int, t: int, passing: _Run) -> tuple[Ints, Floats]:
    """Return s' - s and the cost of *ck* by m, over all s' from s + 1 to t."""
    seconds, peaks = passing
    first = t == len(tables.cost) - 1
    besides = 0 if first else tables.figures.other_bytes[t]
    need = tables.slots(peaks[: t - s] + besides)
    room = np.arange(tables.cost.shape[2])[None, :]
    kept = tables.slots(tables.ahead_bytes[s, s + 1 : t + 1])
    rest = room - kept[:, None]
    behind = np.take_along_axis(tables.cost[s + 1 : t + 1, t], np.maximum(rest, 0), 1)
    total = seconds[: t - s, None] + behind + tables.cost[s, s:t]
    total[(rest < 0) | (room < need[:, None])] = np.inf
    best = total.argmin(axis=0)
    return best + 1, np.take_along_axis(total, best[None, :], 0)[0]


def _passing(tables: Tables, s: int) -> _Passing:
    """Return (seconds, peak bytes) of F s ... s' - 1 by s', again and in the forward.

    The peak counts what is alive besides the checkpoint of s, which stays; that of
    every other stage goes when the next one is there.
    """
    figures = tables.figures
    first = _cumulated(tables, figures.first_none, s)
    return _cumulated(tables, figures.none, s), first


def _cumulated(tables: Tables, runs: Sequence[Run], s: int) -> _Run:
    seconds = np.cumsum([run.seconds for run in runs[s:]])
    own = np.array([run.peak_bytes for run in runs[s:]], dtype=np.int64)
    return seconds, np.maximum.accumulate(own + tables.ahead_bytes[s, s:])
