"""Bytes over time and cost of a sequence of executions.

Definitions (t indexes executions; an *instance* is one execution's writing of one
value; its readers are the executions that read the value before it is written
again):

1. An instance whose value is held lives from t to the end of the step.
2. An instance that is read on the other side of the boundary is *saved*.
3. An instance of a fusible operation is *virtual* when it is neither held nor saved,
   every reader is absorbing, and it draws on few enough materialized sources
   (`INLINE_READS_SINGLE`, `INLINE_READS_MANY`). It takes no bytes: each reader's
   kernel computes it again from its sources.
4. The end of execution t is t when it writes anything materialized (or nothing), and
   the latest end of the readers of its virtual instances otherwise or beyond.
5. A materialized instance lives from t to the latest end of its readers; without
   readers it lives during its own execution.
6. A tangent lives from the boundary to the latest end of its readers.
7. Memory during execution t is the sum of what is alive, plus its workspace. The
   peak is the largest over all t.
8. The cost is the sum of the executions' seconds, plus `save_seconds_per_byte` for
   every saved byte written by a fusible operation.

Not modelled: in-place writing and reuse of buffers (the real peak can be lower),
padding and fragmentation of an allocator.
"""

from __future__ import annotations

from collections.abc import Sequence
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
        cost_seconds: definition 8 above.
        instances: in order of writing, tangents first.
    """

    memory_bytes: tuple[int, ...]
    peak_bytes: int
    peak_step: int
    saved_bytes: int
    cost_seconds: float
    instances: tuple[Instance, ...]


def simulate(problem: Problem, sequence: Sequence[OpId], boundary: int) -> Profile:
    """Return the memory profile of a valid sequence in O(executions * arity)."""
    operations, values = problem.operations, problem.values
    length = len(sequence)
    writer_of: dict[int, tuple[int, int]] = {}  # value -> current (time, slot)
    instance_value: list[int] = []
    instance_time: list[int] = []
    instance_readers: list[list[int]] = []
    reads_of: list[list[int]] = []  # execution -> instances read
    writes_of: list[list[int]] = []  # execution -> instances written
    for value_id, value in enumerate(values):
        if value.origin is Origin.TANGENT:
            writer_of[value_id] = (boundary, len(instance_value))
            instance_value.append(value_id)
            instance_time.append(boundary)
            instance_readers.append([])
    tangents = len(instance_value)
    for t, op_id in enumerate(sequence):
        op = operations[op_id]
        read = []
        for value_id in op.reads:
            if value_id in writer_of:
                slot = writer_of[value_id][1]
                instance_readers[slot].append(t)
                read.append(slot)
        reads_of.append(read)
        written = []
        for value_id in op.writes:
            slot = len(instance_value)
            writer_of[value_id] = (t, slot)
            instance_value.append(value_id)
            instance_time.append(t)
            instance_readers.append([])
            written.append(slot)
        writes_of.append(written)

    count = len(instance_value)
    saved = [False] * count
    virtual = [False] * count
    sources = [1] * count  # materialized buffers that reading this instance reads
    for t, op_id in enumerate(sequence):
        op = operations[op_id]
        drawn = 0
        for slot in reads_of[t]:
            drawn += sources[slot]
        for slot in writes_of[t]:
            readers = instance_readers[slot]
            crosses = t < boundary and bool(readers) and readers[-1] >= boundary
            saved[slot] = crosses
            if not op.fusible or crosses or values[instance_value[slot]].held:
                continue
            limit = INLINE_READS_SINGLE if len(readers) == 1 else INLINE_READS_MANY
            if readers and drawn <= limit:
                virtual[slot] = all(operations[sequence[r]].absorbing for r in readers)
                sources[slot] = drawn if virtual[slot] else 1

    end_of = list(range(length))
    for t in range(length - 1, -1, -1):
        for slot in writes_of[t]:
            if virtual[slot]:
                latest = max(end_of[r] for r in instance_readers[slot])
                end_of[t] = max(end_of[t], latest)

    delta = [0] * (length + 1)
    instances = []
    saved_bytes = 0
    traffic_bytes = 0
    for slot in range(count):
        value_id, start = instance_value[slot], instance_time[slot]
        value = values[value_id]
        end = start
        for r in instance_readers[slot]:
            end = max(end, end_of[r])
        if value.held:
            end = length - 1
        if slot < tangents and not instance_readers[slot] and not value.held:
            end = boundary
        if saved[slot]:
            saved_bytes += value.size_bytes
            if operations[sequence[start]].fusible and not value.held:
                traffic_bytes += value.size_bytes
        if not virtual[slot] and start < length:
            delta[start] += value.size_bytes
            delta[min(end, length - 1) + 1] -= value.size_bytes
        instances.append(
            Instance(
                value=ValueId(value_id),
                start=start,
                end=min(end, length - 1),
                saved=saved[slot],
                virtual=virtual[slot],
            )
        )

    memory = []
    alive = 0
    cost = traffic_bytes * problem.save_seconds_per_byte
    for t, op_id in enumerate(sequence):
        alive += delta[t]
        memory.append(alive + operations[op_id].workspace_bytes)
        cost += operations[op_id].cost_seconds
    peak = max(memory, default=0)
    return Profile(
        memory_bytes=tuple(memory),
        peak_bytes=peak,
        peak_step=memory.index(peak) if memory else 0,
        saved_bytes=saved_bytes,
        cost_seconds=cost,
        instances=tuple(instances),
    )


def make_plan(
    problem: Problem, sequence: Sequence[OpId], boundary: int, origin: str
) -> Plan:
    """Return the plan of a sequence, priced by `simulate`."""
    profile = simulate(problem, sequence, boundary)
    return Plan(
        sequence=tuple(sequence),
        boundary=boundary,
        cost_seconds=profile.cost_seconds,
        peak_bytes=profile.peak_bytes,
        origin=origin,
    )
