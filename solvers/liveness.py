"""Bytes over time and cost of a sequence of executions.

Definitions (t indexes executions; an *instance* is one execution's writing of one
value; its readers are the executions that read the value before it is written
again):

1. An instance whose value is held lives from t to the end of the step.
2. An instance that is read on the other side of the boundary is *saved*.
3. An instance of a fusible operation is *virtual* when it is neither held nor saved,
   every reader is absorbing, and it draws on few enough distinct materialized
   instances (`INLINE_READS_SINGLE` with one reader, else `INLINE_READS_MANY`; inputs
   do not count). It takes no bytes: each reader's kernel computes it again.
4. The end of execution t is t when it writes anything materialized (or nothing), and
   the latest end of the readers of its virtual instances otherwise or beyond.
5. A materialized instance lives from t to the latest end of its readers; without
   readers it lives during its own execution.
6. A tangent lives from the boundary to the latest end of its readers; without readers
   it is there between forward and backward only.
7. An execution writes a materialized instance in place when a materialized instance of
   the same size has its end there, which it reads at the same places, itself or through
   virtual instances (`Operation.aligned` at each step), and which is neither held nor a
   tangent.
8. Memory during execution t is the sum of what is alive, plus its workspace, less what
   it writes in place. Between forward and backward it is what crosses, tangents
   included, plus `between_bytes`. The peak is the largest of all these.
9. The cost is the sum of the executions' seconds, plus `Problem.saving_seconds` of
   every saved instance.

Not modelled: padding and fragmentation of an allocator; that a fused kernel reads all
at once what its parts read one after another.

Source of 7: `decide_inplace_update` of Inductor's scheduler, torch 2.13.0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gcpass.solvers.problem import OpId, Origin, Plan, Problem, ValueId

# Inductor's defaults: a pointwise value read by several kernels is materialized when
# it draws on more than `realize_reads_threshold` = 4 buffers; one that accumulates
# more than `realize_acc_reads_threshold` = 8 is materialized in any case.
INLINE_READS_MANY = 4
INLINE_READS_SINGLE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """One execution's writing of one value: bytes are alive on [start, end]."""

    value: ValueId
    start: int
    end: int
    saved: bool
    virtual: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Memory of a sequence.

    Attributes:
        memory_bytes: bytes alive during each execution.
        peak_bytes: the largest of them (0 for an empty sequence).
        peak_step: the first execution that reaches it.
        saved_bytes: bytes of the saved instances (inputs are free).
        cost_seconds: definition 9 above.
        instances: in order of writing, tangents first.
        overwritten: the value in whose memory each execution writes, see definition 7;
            None where it writes elsewhere.
    """

    memory_bytes: tuple[int, ...]
    peak_bytes: int
    peak_step: int
    saved_bytes: int
    cost_seconds: float
    instances: tuple[Instance, ...]
    overwritten: tuple[ValueId | None, ...]


def simulate(problem: Problem, sequence: Sequence[OpId], boundary: int) -> Profile:
    """Return the memory profile of a valid sequence in O(executions * arity)."""
    trace = _trace(problem, sequence, boundary)
    memory = _memory(problem, trace, sequence)
    peak = max((*memory, trace.between_bytes), default=0)
    saved = trace.saved
    return Profile(
        memory_bytes=tuple(memory),
        peak_bytes=peak,
        peak_step=memory.index(peak) if peak in memory else min(boundary, len(memory)),
        saved_bytes=sum(
            problem.values[trace.value[slot]].size_bytes
            for slot in range(len(saved))
            if saved[slot]
        ),
        cost_seconds=_cost(problem, trace, sequence),
        instances=tuple(
            Instance(
                value=ValueId(trace.value[slot]),
                start=trace.start[slot],
                end=trace.end[slot],
                saved=saved[slot],
                virtual=trace.virtual[slot],
            )
            for slot in range(len(saved))
        ),
        overwritten=tuple(trace.overwritten),
    )


def make_plan(
    problem: Problem, sequence: Sequence[OpId], boundary: int, origin: str
) -> Plan:
    """Return the plan of a sequence, priced as `simulate` does."""
    trace = _trace(problem, sequence, boundary)
    memory = _memory(problem, trace, sequence)
    return Plan(
        sequence=tuple(sequence),
        boundary=boundary,
        cost_seconds=_cost(problem, trace, sequence),
        peak_bytes=max((*memory, trace.between_bytes), default=0),
        origin=origin,
    )


@dataclass(slots=True)
class _Trace:
    """Instances as columns; slots number them, tangents first."""

    value: list[int]
    start: list[int]
    end: list[int]
    saved: list[bool]
    virtual: list[bool]
    in_place: list[int]  # bytes by execution
    overwritten: list[ValueId | None]  # by execution
    between_bytes: int


def _trace(problem: Problem, sequence: Sequence[OpId], boundary: int) -> _Trace:
    operations, values = problem.operations, problem.values
    length = len(sequence)
    value: list[int] = []
    start: list[int] = []
    readers: list[list[int]] = []
    current: dict[int, int] = {}  # value -> slot
    for value_id, data in enumerate(values):
        if data.origin is Origin.TANGENT:
            current[value_id] = len(value)
            value.append(value_id)
            start.append(boundary)
            readers.append([])
    tangents = len(value)
    reads: list[list[int]] = []
    writes: list[range] = []
    for t, op_id in enumerate(sequence):
        op = operations[op_id]
        slots = [current[v] for v in op.reads if v in current]
        for slot in slots:
            readers[slot].append(t)
        reads.append(slots)
        first = len(value)
        for value_id in op.writes:
            current[value_id] = len(value)
            value.append(value_id)
            start.append(t)
            readers.append([])
        writes.append(range(first, len(value)))
    saved, virtual = _classify(
        problem, sequence, boundary, value, readers, reads, writes
    )

    end_of = list(range(length))
    for t in range(length - 1, -1, -1):
        for slot in writes[t]:
            if virtual[slot]:
                end_of[t] = max(end_of[t], *[end_of[r] for r in readers[slot]])
    end = []
    between = problem.between_bytes
    for slot, value_id in enumerate(value):
        data = values[value_id]
        if data.held:
            last = length - 1
        else:
            last = start[slot] if start[slot] < length else length - 1
            if slot < tangents and not readers[slot]:
                last = start[slot] - 1
            for r in readers[slot]:
                if end_of[r] > last:
                    last = end_of[r]
        end.append(last)
        crosses = slot < tangents or (start[slot] < boundary <= last)
        if crosses and not virtual[slot]:
            between += data.size_bytes
        elif data.held and start[slot] < boundary and not virtual[slot]:
            between += data.size_bytes  # an empty backward
    fixed = [data.held or data.origin is Origin.TANGENT for data in values]
    in_place = [0] * length
    overwritten: list[ValueId | None] = [None] * length
    for t, op_id in enumerate(sequence):
        if operations[op_id].aligned and not virtual[writes[t][0]]:
            size = values[value[writes[t][0]]].size_bytes
            stack, seen = [t], {t}
            while stack and not in_place[t]:
                at = stack.pop()
                for slot in reads[at]:
                    if value[slot] not in operations[sequence[at]].aligned:
                        continue
                    if virtual[slot]:
                        if start[slot] not in seen:
                            seen.add(start[slot])
                            stack.append(start[slot])
                    elif end[slot] == t and not fixed[value[slot]]:
                        if values[value[slot]].size_bytes == size:
                            in_place[t] = size
                            overwritten[t] = ValueId(value[slot])
    return _Trace(value, start, end, saved, virtual, in_place, overwritten, between)


def _classify(
    problem: Problem,
    sequence: Sequence[OpId],
    boundary: int,
    value: Sequence[int],
    readers: Sequence[Sequence[int]],
    reads: Sequence[Sequence[int]],
    writes: Sequence[range],
) -> tuple[list[bool], list[bool]]:
    """Return (saved, virtual) of each instance: definitions 2 and 3."""
    operations, values = problem.operations, problem.values
    saved = [False] * len(value)
    virtual = [False] * len(value)
    drawn: dict[int, frozenset[int]] = {}  # virtual instance -> materialized sources
    for t, op_id in enumerate(sequence):
        op = operations[op_id]
        for slot in writes[t]:
            at = readers[slot]
            if t < boundary and at and at[-1] >= boundary:
                saved[slot] = True
            elif op.fusible and at and not values[value[slot]].held:
                if all(operations[sequence[r]].absorbing for r in at):
                    sources = _sources(reads[t], drawn)
                    many = len(at) > 1
                    if len(sources) <= (
                        INLINE_READS_MANY if many else INLINE_READS_SINGLE
                    ):
                        virtual[slot] = True
                        drawn[slot] = sources
    return saved, virtual


def _sources(
    slots: Sequence[int], drawn: Mapping[int, frozenset[int]]
) -> frozenset[int]:
    result: set[int] = set()
    for slot in slots:
        inner = drawn.get(slot)
        if inner is None:
            result.add(slot)
        else:
            result |= inner
    return frozenset(result)


def _memory(problem: Problem, trace: _Trace, sequence: Sequence[OpId]) -> list[int]:
    """Return the bytes alive during each execution."""
    length = len(sequence)
    delta = [0] * (length + 1)
    for slot, value_id in enumerate(trace.value):
        if not trace.virtual[slot] and trace.start[slot] < length:
            size = problem.values[value_id].size_bytes
            delta[trace.start[slot]] += size
            delta[trace.end[slot] + 1] -= size
    memory = []
    alive = 0
    for t, op_id in enumerate(sequence):
        alive += delta[t]
        workspace = problem.operations[op_id].workspace_bytes
        memory.append(alive + workspace - trace.in_place[t])
    return memory


def _cost(problem: Problem, trace: _Trace, sequence: Sequence[OpId]) -> float:
    cost = math.fsum(problem.operations[o].cost_seconds for o in sequence)
    if not problem.save_seconds_per_byte:
        return cost
    tolls = problem.saving_seconds()
    saved = zip(trace.value, trace.saved, strict=True)
    return cost + math.fsum(tolls[value] for value, is_saved in saved if is_saved)
