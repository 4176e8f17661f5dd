"""A training graph as a chain of stages: what the methods for chains work on.

Checkpointing for chains knows stages F_0 ... F_L-1 and their backwards B_L-1 ... B_0.
An arbitrary graph becomes one like this:

1. The forward, in the given order, is cut at articulations, places that one value
   crosses into the later forward (on a chain every place: one operation, one stage),
   and at places that few bytes cross: a local minimum, and no more than `TOLERANCE`
   times the larger of the two minima within `WINDOW` operations before and after. So
   networks whose activations shrink and that have values crossing everything are cut as
   well, and the inside of an attention block, wider than both its ends, is not.
2. The backward, in the given order, is cut where what it reads changes from one stage
   to the one before. An operation is in the way of a cut when it reads, before it, what
   makes a checkpoint larger or, behind it, what a higher stage wrote; each cut is put
   where the fewest are.
3. The **checkpoint** of the boundary before stage i is what was written before it and
   is read behind it, by F_i ... or by B_L-1 ... B_i. So a value that skips stages
   belongs to every checkpoint it crosses.
4. The **tape** of stage i is what F_i writes and B_i, or a later backward, reads.

Values of pinned operations (`gcpass.solvers.classics.emit`) and held ones are alive
anyway and in neither. A **schedule** is a sequence of moves F_i and B_i, first all of
the forward; `emit_schedule` turns it into a plan.

Sources: the chain with checkpoints and tapes is that of O. Beaumont, L. Eyraud-Dubois,
J. Herrmann, A. Joly, A. Shilova, "Optimal checkpointing for heterogeneous chains: how
to train deep neural networks with limited memory", 2019, arXiv:1911.13214;
cutting the graph into a chain of segments is that of T. Chen, B. Xu, C. Zhang, C.
Guestrin, "Training Deep Nets with Sublinear Memory Cost", 2016, arXiv:1604.06174.
Not modelled: branches that run in parallel for a whole network have no narrow place and
are one stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from gcpass.solvers.classics.emit import (
    Emitter,
    backward_operations,
    forward_operations,
    pinned_operations,
)
from gcpass.solvers.problem import OpId, Phase, Plan, Problem, ValueId
from gcpass.solvers.turn import Turned

TOLERANCE = 1.5  # a residual stream alone, or with half as much besides, is narrow
WINDOW = 24  # operations; a transformer block's forward has 10 to 30

Parts = tuple[tuple[OpId, ...], ...]
Sets = tuple[frozenset[ValueId], ...]


class Move(NamedTuple):
    """F_stage, or B_stage when `back`."""

    stage: int
    back: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """A chain; all tuples are indexed by stage, of which there is at least one.

    Attributes:
        forward: the operations of F_i, ascending.
        backward: the operations of B_i, ascending.
        checkpoint: values of the boundary before stage i; empty for stage 0.
        tape: values of F_i that B_i or a later backward reads.
        decided: all values of stages that are not pinned or held.
    """

    forward: Parts
    backward: Parts
    checkpoint: Sets
    tape: Sets
    decided: frozenset[ValueId]

    def __len__(self) -> int:
        return len(self.forward)


def stages_of(step: Turned, most: int | None = None) -> Stages:
    """Return the chain of a problem, in O(edges + operations * stages).

    Args:
        step: the problem.
        most: neighbouring stages are joined until there are no more than this, with
            about equal bytes of tape; None: no limit.
    """
    problem = step.training
    pinned = pinned_operations(problem)
    forward = forward_operations(problem)
    places = _narrow_places(*_crossing(problem, forward, pinned))
    if most is not None and len(places) >= most:
        places = _spread(problem, forward, places, most)
    parts = _split(forward, places)
    backward = backward_operations(problem)
    reads = _reads(problem, forward, backward)
    stage_of = {
        value: i
        for i, part in enumerate(parts)
        for op_id in part
        if op_id not in pinned
        for value in problem.operations[op_id].writes
    }
    reach = _reach(problem, parts, stage_of)
    cuts = _backward_places([reads[o] for o in backward], stage_of, reach, len(parts))
    tails = tuple(reversed(_split(backward, cuts)))
    tail_reads = [
        frozenset[ValueId]().union(*(reads[o] for o in tail)) for tail in tails
    ]
    return Stages(
        forward=parts,
        backward=tails,
        checkpoint=_checkpoints(stage_of, reach, tail_reads),
        tape=_tapes(stage_of, tail_reads),
        decided=frozenset(stage_of),
    )


def emit_schedule(
    step: Turned, stages: Stages, schedule: Iterable[Move], origin: str
) -> Plan:
    """Return the plan of a schedule.

    Args:
        step: the problem.
        stages: its chain.
        schedule: F_0 ... F_L-1, then B_L-1 ... B_0 with further F between them, such
            that each F_i follows F_i-1 or finds its checkpoint, and each B_i finds its
            tape. What a schedule gets wrong costs time or bytes, never validity.
        origin: the method's name.

    Raises:
        SolverError: see `gcpass.solvers.classics.emit.Emitter.run`.
    """
    emitter = Emitter(step)
    crossed = False
    for move in schedule:
        if move.back and not crossed:
            emitter.cross()
            crossed = True
        for op_id in (stages.backward if move.back else stages.forward)[move.stage]:
            if move.back:
                emitter.run_once(op_id)
            elif crossed:
                emitter.run_again(op_id)
            else:
                emitter.run_once(op_id)
    return emitter.finish(origin)


def _split(ops: Sequence[OpId], places: Sequence[int]) -> Parts:
    ends = (0, *places, len(ops))
    return tuple(tuple(ops[a:b]) for a, b in pairwise(ends))


def _narrow_places(width: list[int], count: list[int]) -> list[int]:
    """Return the places to cut, strictly between the first and the last.

    Args:
        width: bytes that cross, by place.
        count: values that cross, by place.
    """
    result = []
    for place in range(1, len(width) - 1):
        here = width[place]
        before = width[max(1, place - WINDOW) : place]
        behind = width[place + 1 : min(len(width) - 1, place + 1 + WINDOW)]
        local = here <= min(before[-1:] + behind[:1], default=here)
        least = max((min(side) for side in (before, behind) if side), default=here)
        narrow = local and here <= TOLERANCE * least
        if narrow or count[place] <= 1:
            result.append(place)
    return result


def _crossing(
    problem: Problem, forward: Sequence[OpId], pinned: frozenset[OpId]
) -> tuple[list[int], list[int]]:
    """Return, by place in the forward, bytes and values that cross it.

    They are written before it and read by the forward behind it; pinned ones do not
    count. Place p is before its operation p; the last one is behind all of them.
    """
    last: dict[int, int] = {}
    for place, op_id in enumerate(forward):
        last.update((value, place) for value in problem.operations[op_id].reads)
    change = np.zeros((2, len(forward) + 2), dtype=np.int64)
    for place, op_id in enumerate(forward):
        if op_id in pinned:
            continue
        for value in problem.operations[op_id].writes:
            crossing = (problem.values[value].size_bytes, 1)
            change[:, place + 1] += crossing
            change[:, max(place, last.get(value, place)) + 1] -= crossing
    width, count = np.cumsum(change[:, :-1], axis=1).tolist()
    return width, count


def _spread(
    problem: Problem, forward: Sequence[OpId], places: Sequence[int], most: int
) -> list[int]:
    """Return `most` - 1 places that divide the bytes written evenly."""
    sizes = [
        1 + sum(problem.values[v].size_bytes for v in problem.operations[o].writes)
        for o in forward
    ]
    before = np.cumsum(sizes)[np.asarray(places) - 1]
    wanted = np.arange(1, most) * sum(sizes) / most
    nearest = np.abs(before[:, None] - wanted[None, :]).argmin(axis=0)
    return [places[i] for i in sorted({int(n) for n in nearest})]


def _reads(
    problem: Problem, forward: Sequence[OpId], backward: Sequence[OpId]
) -> dict[OpId, frozenset[ValueId]]:
    """Return what each backward operation reads, itself or through late operations."""
    writers = problem.writers()
    early = frozenset(forward)
    behind: dict[ValueId, frozenset[ValueId]] = {}  # value of a late one -> its reads
    for op_id, op in enumerate(problem.operations):
        if op.phase is Phase.EITHER and op_id not in early:
            own = _through(op.reads, behind)
            behind.update((value, own) for value in op.writes)
    direct = {o: _through(problem.operations[o].reads, behind) for o in backward}
    return {
        op_id: frozenset(v for v in values if writers[v] in early)
        for op_id, values in direct.items()
    }


def _through(
    values: Iterable[ValueId], behind: Mapping[ValueId, frozenset[ValueId]]
) -> frozenset[ValueId]:
    result: set[ValueId] = set()
    for value in values:
        result |= behind.get(value, frozenset((value,)))
    return frozenset(result)


def _reach(
    problem: Problem, parts: Parts, stage_of: Mapping[ValueId, int]
) -> dict[ValueId, int]:
    """Return the last stage whose forward reads or writes each value."""
    reach = dict(stage_of)
    for i, part in enumerate(parts):
        for op_id in part:
            reads = problem.operations[op_id].reads
            reach.update((value, i) for value in reads if value in stage_of)
    return reach


def _backward_places(
    reads: Sequence[frozenset[ValueId]],
    stage_of: Mapping[ValueId, int],
    reach: Mapping[ValueId, int],
    count: int,
) -> list[int]:
    """Return where the backward passes from stage i to i - 1, for i = count-1 ... 1.

    In the way of place p for stage i are operations before p that read a value which no
    forward from i on does, and operations from p on that read what stage i or a higher
    one wrote. Of the best places the last is taken.
    """
    lowest = np.array(
        [min((reach[v] for v in r if v in reach), default=count) for r in reads]
    )
    highest = np.array(
        [max((stage_of.get(v, -1) for v in r), default=-1) for r in reads]
    )
    result = []
    for stage in range(count - 1, 0, -1):
        low = np.concatenate(([0], np.cumsum(lowest < stage)))
        high = np.concatenate(([0], np.cumsum(highest >= stage)))
        wrong = low + (high[-1] - high)
        result.append(len(wrong) - 1 - int(wrong[::-1].argmin()))
    return result


def _checkpoints(
    stage_of: Mapping[ValueId, int],
    reach: Mapping[ValueId, int],
    tail_reads: Sequence[frozenset[ValueId]],
) -> Sets:
    last = dict(reach)
    for i, values in enumerate(tail_reads):
        last.update((v, max(i, last[v])) for v in values if v in stage_of)
    result: list[set[ValueId]] = [set() for _ in tail_reads]
    for value, first in stage_of.items():
        for i in range(first + 1, last[value] + 1):
            result[i].add(value)
    return tuple(frozenset(values) for values in result)


def _tapes(
    stage_of: Mapping[ValueId, int], tail_reads: Sequence[frozenset[ValueId]]
) -> Sets:
    result: list[set[ValueId]] = [set() for _ in tail_reads]
    for i, values in enumerate(tail_reads):
        for value in values:
            if stage_of.get(value, -1) >= i:
                result[stage_of[value]].add(value)
    return tuple(frozenset(values) for values in result)
