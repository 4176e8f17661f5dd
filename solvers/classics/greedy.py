"""Greedy rematerialization: lower the highest step, again and again.

At the step of highest memory, values are alive that nobody reads there. One of them can
be **evicted**: its operation is executed again just before its next reader, and the
bytes are free in between. Per round those with the least

    recompute seconds / bytes saved at the peak

are taken, where an operand that would otherwise be dead at the peak, and now must wait
there for the repeat, counts against the bytes saved. A round takes several independent
values while they are worth up to `ROUND` of the peak; if the simulated peak does not
improve, half of them, and at last one alone. Improving means a lower peak or fewer
steps at it, so the method ends. Evicting what a repeat reads makes longer recomputed
stretches, several copies of a value included.

The rounds do not depend on the budget: the cheapest plan on the way down that fits is
the answer (the first one that fits, unless saving takes time), and where nothing
improves any more is the floor.

Source: the pass `HloRematerialization` of XLA (openxla/xla, xla/hlo/transforms/
simplifiers/hlo_rematerialization.h) as its comments describe it: sequential order,
memory reduced per cost. Not modelled: its compression by layout, its offloading to the
host, and its blocks of several instructions: where a value's operand is dead and no
smaller, the value cannot be evicted, although the two together could. The order is that
of the given sequence.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gcpass.solvers.classics.choose import cheapest_of
from gcpass.solvers.classics.emit import everything, saving, without_unread
from gcpass.solvers.liveness import Instance, Profile, simulate
from gcpass.solvers.problem import OpId, Origin, Plan, Problem, Solution, ValueId
from gcpass.solvers.turn import turned

ROUND = 0.02  # of the peak, freed at once: some 100 rounds down to the floor
TRIES = 16  # values tried alone in a round before the method gives up


@dataclass(frozen=True, slots=True, kw_only=True)
class Eviction:
    """A value to free at the peak.

    Attributes:
        op_id: the operation to execute again.
        before: the execution to put it in front of.
        saved_bytes: bytes less at the peak, > 0.
        seconds_per_byte: the price.
    """

    op_id: OpId
    before: int
    saved_bytes: int
    seconds_per_byte: float


def greedy(problem: Problem, budget_bytes: int | None) -> Solution:
    """Return the cheapest plan on the greedy way down that fits the budget.

    Raises:
        SolverError: the constraints exclude every plan.
    """
    step = turned(problem)
    start = saving(step, everything(step.training), "greedy")
    return cheapest_of(problem, tuple(_way_down(problem, start)), budget_bytes)


def _way_down(problem: Problem, plan: Plan) -> Iterator[Plan]:
    """Yield the plan and then each better one, until nothing improves."""
    profile = simulate(problem, plan.sequence, plan.boundary)
    while True:
        yield plan
        better = _round(problem, plan, profile)
        if better is None:
            return
        plan, profile = better


def _round(
    problem: Problem, plan: Plan, profile: Profile
) -> tuple[Plan, Profile] | None:
    """Return the plan after one round, None when nothing improves."""
    ranked = sorted(
        _evictions(problem, plan, profile),
        key=lambda e: (e.seconds_per_byte, e.op_id, e.before),
    )
    chosen = _together(problem, ranked, round(ROUND * plan.peak_bytes))
    while len(chosen) > 1:
        better = _improved(problem, plan, profile, chosen)
        if better is not None:
            return better
        chosen = chosen[: len(chosen) // 2]
    for eviction in ranked[:TRIES]:
        better = _improved(problem, plan, profile, [eviction])
        if better is not None:
            return better
    return None


def _evictions(problem: Problem, plan: Plan, profile: Profile) -> Iterator[Eviction]:
    """Yield what can be evicted at the step of highest memory, by value."""
    peak = profile.peak_step
    # A peak between forward and backward is no execution: the next one may come after.
    soonest = peak if profile.peak_bytes not in profile.memory_bytes else peak + 1
    readers = _readers(problem, plan.sequence)
    starts: dict[ValueId, list[Instance]] = {}
    for instance in profile.instances:
        starts.setdefault(instance.value, []).append(instance)
    writers = problem.writers()
    for instance, times in zip(profile.instances, readers, strict=True):
        writer = writers[instance.value]
        alive = instance.start < peak <= instance.end and not instance.virtual
        if writer is None or not alive or problem.values[instance.value].held:
            continue
        at = bisect_left(times, soonest)
        if at == len(times) or peak in times[:at]:
            continue
        op = problem.operations[writer]
        before = times[at]
        lost = _waiting_bytes(problem, plan, starts, writer, peak, before)
        if not op.recomputable or before < plan.boundary or lost is None:
            continue
        saved = problem.values[instance.value].size_bytes - lost
        if saved > 0:
            yield Eviction(
                op_id=writer,
                before=before,
                saved_bytes=saved,
                seconds_per_byte=op.cost_seconds / saved,
            )


def _readers(problem: Problem, sequence: Sequence[OpId]) -> list[list[int]]:
    """Return the readers of each instance, in the order of `Profile.instances`."""
    current: dict[ValueId, list[int]] = {}
    result: list[list[int]] = []
    for value_id, value in enumerate(problem.values):
        if value.origin is Origin.TANGENT:
            result.append([])
            current[ValueId(value_id)] = result[-1]
    for t, op_id in enumerate(sequence):
        op = problem.operations[op_id]
        for read in op.reads:
            if read in current:
                current[read].append(t)
        for written in op.writes:
            result.append([])
            current[written] = result[-1]
    return result


def _waiting_bytes(
    problem: Problem,
    plan: Plan,
    instances: dict[ValueId, list[Instance]],
    op_id: OpId,
    peak: int,
    before: int,
) -> int | None:
    """Return the bytes that wait at the peak for a repeat, None if they may not."""
    total = 0
    for value_id in problem.operations[op_id].reads:
        value = problem.values[value_id]
        if value.origin is Origin.INPUT:
            continue
        written = [i for i in instances[value_id] if i.start < before]
        if value.origin is Origin.TANGENT:
            written = instances[value_id]
        source = written[-1]
        crosses = source.start < plan.boundary and value.origin is Origin.COMPUTED
        if crosses and not (value.savable or value.held):
            return None
        if source.start <= peak and (source.end < peak or source.virtual):
            total += value.size_bytes
    return total


def _together(
    problem: Problem, ranked: Sequence[Eviction], enough_bytes: int
) -> list[Eviction]:
    """Return the best evictions of which none reads what another one frees."""
    chosen: list[Eviction] = []
    freed: set[ValueId] = set()
    read: set[ValueId] = set()
    left = enough_bytes
    for eviction in ranked:
        op = problem.operations[eviction.op_id]
        if not freed.isdisjoint((*op.reads, *op.writes)):
            continue
        if not read.isdisjoint(op.writes):
            continue
        chosen.append(eviction)
        freed.update(op.writes)
        read.update(op.reads)
        left -= eviction.saved_bytes
        if left <= 0:
            break
    return chosen


def _improved(
    problem: Problem, plan: Plan, profile: Profile, evictions: Sequence[Eviction]
) -> tuple[Plan, Profile] | None:
    """Return the plan with these repeats, None when its peak is not better."""
    inserted: dict[int, list[OpId]] = {}
    for eviction in sorted(evictions, key=lambda e: e.op_id):
        inserted.setdefault(eviction.before, []).append(eviction.op_id)
    sequence: list[OpId] = []
    for t, op_id in enumerate(plan.sequence):
        sequence += inserted.get(t, [])
        sequence.append(op_id)
    shorter, boundary = without_unread(problem, sequence, plan.boundary)
    after = simulate(problem, shorter, boundary)
    if _height(after) >= _height(profile):
        return None
    better = Plan(
        sequence=shorter,
        boundary=boundary,
        cost_seconds=after.cost_seconds,
        peak_bytes=after.peak_bytes,
        origin=plan.origin,
    )
    return better, after


def _height(profile: Profile) -> tuple[int, int]:
    """Return what a round lowers: the peak, and how many steps are as high."""
    return profile.peak_bytes, profile.memory_bytes.count(profile.peak_bytes)
