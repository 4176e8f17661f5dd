"""Bytes and seconds of the stages of a chain, as the rotor's recursion needs them.

Everything is measured on the graph: what a stage has alive at most besides its own
checkpoint when it is executed, in the forward (where all of it runs) or again (where
only what its goal draws on runs), and what its backward has alive at most when its tape
is there. What does not depend on the plan (gradients, tangents, held and pinned values,
temporaries of the backward) is taken from the profile of the plan that stores
everything, at the moment it is needed.

Not modelled: fusion (all values are counted), values that may not be saved, checkpoint
values that only stages read whose backward is over, or that die inside the backward of
their stage (so a stage with a wide checkpoint seems to need more than it does), and
late operations of `Phase.EITHER` that run again. Methods simulate every plan's peak.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from gcpass.solvers.classics.stages import Stages
from gcpass.solvers.liveness import Profile, simulate
from gcpass.solvers.problem import OpId, Origin, Plan, Problem, ValueId


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One way to execute the forward of a stage.

    Attributes:
        seconds: time.
        peak_bytes: most bytes alive besides the checkpoint of the stage.
    """

    seconds: float
    peak_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """All tuples are indexed by stage; *none*, *all*, *tape* name what a run leaves.

    Attributes:
        first_none: in the forward, leaving the next checkpoint.
        first_all: in the forward, leaving the next checkpoint and the tape.
        none: again, likewise.
        all: again, likewise.
        tape: again, leaving the tape only.
        back_bytes: peak of the backward with its tape, besides the checkpoint.
        other_bytes: alive when the backward of the stage starts, whatever the plan.
        between_bytes: the same at the boundary.
    """

    first_none: tuple[Run, ...]
    first_all: tuple[Run, ...]
    none: tuple[Run, ...]
    all: tuple[Run, ...]
    tape: tuple[Run, ...]
    back_bytes: tuple[int, ...]
    other_bytes: tuple[int, ...]
    between_bytes: int


def figures_of(problem: Problem, stages: Stages, stored: Plan) -> Figures:
    """Return the figures of a chain.

    Args:
        problem: a training problem.
        stages: its chain.
        stored: a plan of it that recomputes nothing and runs the stages in order.
    """
    profile = simulate(problem, stored.sequence, stored.boundary)
    other = _other_bytes(problem, stages, stored, profile)
    at: dict[OpId, int] = {}
    for t, op_id in enumerate(stored.sequence):
        at.setdefault(op_id, other[t])
    spans = _spans(stages, stored)
    entrances = [_alive_before(problem, stages, profile, t) for t, _ in spans]
    goals = [_goals(stages, i) for i in range(len(stages))]
    count = range(len(stages))

    def first(i: int, keep: AbstractSet[ValueId]) -> Run:
        return _run(problem, stages.decided, stages.forward[i], keep, at)

    def again(i: int, keep: AbstractSet[ValueId]) -> Run:
        ops = _drawn_on(problem, stages.decided, stages.forward[i], keep)
        own = {o: problem.operations[o].workspace_bytes for o in ops}
        return _run(problem, stages.decided, ops, keep, own)

    return Figures(
        first_none=tuple(first(i, goals[i][0]) for i in count),
        first_all=tuple(first(i, goals[i][1]) for i in count),
        none=tuple(again(i, goals[i][0]) for i in count),
        all=tuple(again(i, goals[i][1]) for i in count),
        tape=tuple(again(i, stages.tape[i]) for i in count),
        back_bytes=_backward_peaks(problem, stages, profile, spans, other),
        other_bytes=tuple(entrances),
        between_bytes=entrances[-1] + problem.between_bytes,
    )


def bytes_of(problem: Problem, values: AbstractSet[ValueId]) -> int:
    """Return the bytes of a set of values."""
    return sum(problem.values[value].size_bytes for value in values)


def _goals(stages: Stages, i: int) -> tuple[frozenset[ValueId], frozenset[ValueId]]:
    """Return what F_i leaves of its own for the next stage, and with its tape."""
    ahead = stages.checkpoint[i + 1] if i + 1 < len(stages) else frozenset()
    ahead -= stages.checkpoint[i]
    return ahead, ahead | stages.tape[i]


def _run(
    problem: Problem,
    decided: frozenset[ValueId],
    ops: Sequence[OpId],
    keep: AbstractSet[ValueId],
    besides: Mapping[OpId, int],
) -> Run:
    """Return the figures of executing operations whose kept values stay to the end."""
    last: dict[ValueId, int] = {}
    for place, op_id in enumerate(ops):
        last.update((value, place) for value in problem.operations[op_id].reads)
    freed = [0] * len(ops)
    alive, peak, seconds = 0, 0, 0.0
    for place, op_id in enumerate(ops):
        op = problem.operations[op_id]
        seconds += op.cost_seconds
        for value in (v for v in op.writes if v in decided):
            size = problem.values[value].size_bytes
            alive += size
            if value not in keep:
                freed[max(place, last.get(value, place))] += size
        peak = max(peak, alive + besides[op_id])
        alive -= freed[place]
    return Run(seconds=seconds, peak_bytes=peak)


def _drawn_on(
    problem: Problem,
    decided: frozenset[ValueId],
    ops: Sequence[OpId],
    goal: AbstractSet[ValueId],
) -> tuple[OpId, ...]:
    """Return the operations that computing the goal takes, pinned ones left out."""
    wanted = set(goal)
    chosen = []
    for op_id in reversed(ops):
        op = problem.operations[op_id]
        if not wanted.isdisjoint(decided.intersection(op.writes)):
            chosen.append(op_id)
            wanted.update(op.reads)
    return tuple(reversed(chosen))


def _other_bytes(
    problem: Problem, stages: Stages, stored: Plan, profile: Profile
) -> list[int]:
    """Return, by execution, the bytes that no plan decides about."""
    change = [0] * (len(stored.sequence) + 1)
    for instance in profile.instances:
        if instance.value in stages.decided and not instance.virtual:
            size = problem.values[instance.value].size_bytes
            change[instance.start] += size
            change[instance.end + 1] -= size
    result, alive = [], 0
    for t, total in enumerate(profile.memory_bytes):
        alive += change[t]
        result.append(total - alive)
    return result


def _backward_peaks(
    problem: Problem,
    stages: Stages,
    profile: Profile,
    spans: Sequence[tuple[int, int]],
    other: Sequence[int],
) -> tuple[int, ...]:
    last = {instance.value: instance.end for instance in profile.instances}
    result = []
    for i, (begin, end) in enumerate(spans):
        own = stages.tape[i] - stages.checkpoint[i]
        tape = [
            bytes_of(problem, {v for v in own if last[v] >= t})
            for t in range(begin, end)
        ]
        peaks = (
            other[t] + alive for t, alive in zip(range(begin, end), tape, strict=True)
        )
        result.append(max(peaks, default=0))
    return tuple(result)


def _spans(stages: Stages, stored: Plan) -> list[tuple[int, int]]:
    """Return, by stage, the first execution of its backward and the one behind it."""
    times = {op_id: t for t, op_id in enumerate(stored.sequence)}
    result = []
    begin = stored.boundary
    for tail in reversed(stages.backward):
        end = times[tail[-1]] + 1 if tail else begin
        result.append((begin, end))
        begin = end
    return result[::-1]


def _alive_before(problem: Problem, stages: Stages, profile: Profile, time: int) -> int:
    """Return the bytes that no plan decides about, just before an execution."""
    total = 0
    for instance in profile.instances:
        tangent = problem.values[instance.value].origin is Origin.TANGENT
        alive = (instance.start < time or tangent) and instance.end >= time
        if alive and not instance.virtual and instance.value not in stages.decided:
            total += problem.values[instance.value].size_bytes
    return total
