"""The rematerialization problem and its solutions, as immutable data.

A step of training is one forward followed by one backward. **Operations** are
executed; **values** are the storages they read and write (views and aliases are
contracted before a problem is built, so a value owns its bytes). Ids are indices:
operations are numbered in the given execution order, which is topological, and
every solver breaks ties by id, so the same problem gives the same solution.

A **solution** is a sequence of executions. Executions before ``boundary`` are the
forward, the rest is the backward; recomputation is a further execution of an
operation on either side, any number of times. What it
costs and how many bytes it needs is defined in `gcpass.solvers.liveness` and, once
more and independently, in `gcpass.solvers.check`.

One **plain sequence** without that distinction, as published instances have it, is the
case where every operation is of `Phase.BACKWARD` and the boundary is 0: any order, any
number of repeats, nothing crosses.

Fusing compilers do not materialize every value. An operation marked ``fusible``
(pointwise) can be computed inside the kernels of its readers when all of them are
``absorbing`` (pointwise or reduction); its value then takes no memory of its own
and what it reads stays alive until those readers have run. With both flags False
everywhere (operation by operation execution) every value is materialized. A kernel that
reads a value where it writes (``aligned``) can write **in place**: into the memory of a
value that nobody reads afterwards.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import NewType

from gcpass.solvers.errors import InvalidProblemError

OpId = NewType("OpId", int)
ValueId = NewType("ValueId", int)


class Phase(Enum):
    """When an operation may be executed for the first time."""

    FORWARD = "forward"  # the forward's outputs need it: before the boundary
    EITHER = "either"  # independent of the tangents, read by the backward only
    BACKWARD = "backward"  # depends on a tangent: only after the boundary


class Origin(Enum):
    """Where a value comes from."""

    COMPUTED = "computed"  # written by an operation
    INPUT = "input"  # alive before the step and after it: takes no bytes here
    TANGENT = "tangent"  # arrives with the backward, alive until its last reader


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """A storage.

    Attributes:
        size_bytes: bytes it takes while it is materialized.
        origin: see `Origin`.
        held: once written it stays alive until the end of the step: an output of
            the region or a gradient.
        savable: False when it must not live across the boundary (the user asked
            for recomputation). Ignored for held values, which do anyway.
    """

    size_bytes: int
    origin: Origin = Origin.COMPUTED
    held: bool = False
    savable: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One kernel, or a piece of one.

    Attributes:
        reads: values read, ascending, without repeats.
        writes: values written, ascending; each value has at most one writer.
        cost_seconds: time of one execution, finite and >= 0.
        flops: floating point operations of one execution.
        phase: see `Phase`.
        recomputable: False when a second execution would be wrong or is not wanted.
        fusible: may run inside the kernels of its readers (pointwise).
        absorbing: can take fusible operations it reads into its kernel.
        aligned: of a fusible operation that writes one value, those of `reads` that are
            read element by element at the place of the element that is written.
        workspace_bytes: bytes needed during the execution only.
    """

    reads: tuple[ValueId, ...]
    writes: tuple[ValueId, ...]
    cost_seconds: float
    flops: int = 0
    phase: Phase = Phase.FORWARD
    recomputable: bool = True
    fusible: bool = False
    absorbing: bool = False
    aligned: tuple[ValueId, ...] = ()
    workspace_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Operations in the given (topological) order, and the values between them.

    Attributes:
        operations: indexed by `OpId`.
        values: indexed by `ValueId`.
        save_seconds_per_byte: time to write a byte in the forward and read it in
            the backward, paid for a saved value that would not be materialized
            otherwise, see `saving_seconds`; 0 where nothing fuses.
        between_bytes: bytes that the caller needs between forward and backward, for
            instance to compute the loss, besides what is held and the tangents.
    """

    operations: tuple[Operation, ...]
    values: tuple[Value, ...]
    save_seconds_per_byte: float = 0.0
    between_bytes: int = 0

    def __post_init__(self) -> None:
        _validate(self)

    def writers(self) -> tuple[OpId | None, ...]:
        """Return the writer of each value, None for inputs and tangents."""
        result: list[OpId | None] = [None] * len(self.values)
        for op_id, op in enumerate(self.operations):
            for value in op.writes:
                result[value] = OpId(op_id)
        return tuple(result)

    def readers(self) -> tuple[tuple[OpId, ...], ...]:
        """Return, for each value, the operations that read it, ascending."""
        result: list[list[OpId]] = [[] for _ in self.values]
        for op_id, op in enumerate(self.operations):
            for value in op.reads:
                result[value].append(OpId(op_id))
        return tuple(tuple(ids) for ids in result)

    def saving_seconds(self) -> tuple[float, ...]:
        """Return, for each value, what it costs to save it.

        A value of a fusible operation is written and read only because it is saved,
        with two exceptions of half the price: what an operation of the forward cannot
        absorb is written in any case, and what no operation of the backward absorbs is
        read in any case.
        """
        half = self.save_seconds_per_byte / 2.0
        inside: set[ValueId] = set()
        written: set[ValueId] = set()
        absorbed: set[ValueId] = set()
        for op in self.operations if half else ():
            if op.fusible:
                inside.update(v for v in op.writes if not self.values[v].held)
            if op.phase is Phase.FORWARD and not op.absorbing:
                written.update(op.reads)
            elif op.phase is not Phase.FORWARD and op.absorbing:
                absorbed.update(op.reads)
        return tuple(
            half * value.size_bytes * ((v not in written) + (v in absorbed))
            if v in inside
            else 0.0
            for v, value in enumerate(self.values)
        )


class Termination(Enum):
    """Why a solver stopped."""

    OPTIMAL = "optimal"  # the plan's cost equals the bound
    FEASIBLE = "feasible"  # the search space was worked through, a gap remains
    LIMIT = "limit"  # a limit stopped it; the plan is the best so far
    INFEASIBLE = "infeasible"  # no plan that the solver can build fits


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A sequence of executions with what it costs and needs.

    Attributes:
        sequence: operations in execution order, with repeats.
        boundary: number of executions that belong to the forward.
        cost_seconds: time of the sequence, see `gcpass.solvers.liveness`.
        peak_bytes: largest number of bytes alive during the step.
        origin: name of the method that built it.
    """

    sequence: tuple[OpId, ...]
    boundary: int
    cost_seconds: float
    peak_bytes: int
    origin: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """What a solver returns: never a bare list.

    Attributes:
        plan: the best plan found, None when infeasible.
        termination: why the solver stopped; `limit` names the limit if it was one.
        bound_seconds: no plan within the budget costs less (proven).
        floor_bytes: the least peak found so far; without a plan, the least that this
            solver can reach.
        limit: None, or what stopped it: "time", or "moves" of a search that has no
            end of its own.
    """

    plan: Plan | None
    termination: Termination
    bound_seconds: float
    floor_bytes: int
    limit: str | None = None


MOST_BYTES = 1 << 52  # of all values together: sums stay exact in 64 bits and floats


def _validate(problem: Problem) -> None:
    _validate_sums(problem)
    written: dict[int, Phase] = {}
    for op_id, op in enumerate(problem.operations):
        if not 0.0 <= op.cost_seconds < float("inf"):
            raise InvalidProblemError(f"operation {op_id}: cost {op.cost_seconds!r}")
        for value in op.reads:
            origin = problem.values[value].origin
            if origin is Origin.COMPUTED and value not in written:
                raise InvalidProblemError(
                    f"operation {op_id} reads value {value} before it is written"
                )
            if written.get(value, op.phase) not in _DRAWS_ON[op.phase]:
                raise InvalidProblemError(
                    f"operation {op_id} is {op.phase.value} and reads value {value} of "
                    f"a {written[value].value} operation"
                )
            if origin is Origin.TANGENT and op.phase is not Phase.BACKWARD:
                raise InvalidProblemError(
                    f"operation {op_id} reads tangent {value} but is not backward"
                )
        _validate_aligned(OpId(op_id), op)
        for value in op.writes:
            if value in written or problem.values[value].origin is not Origin.COMPUTED:
                raise InvalidProblemError(f"value {value} has a second writer: {op_id}")
            written[value] = op.phase
    for value_id, value_data in enumerate(problem.values):
        if value_data.size_bytes < 0:
            raise InvalidProblemError(f"value {value_id}: negative size")
        if value_data.origin is Origin.COMPUTED and value_id not in written:
            raise InvalidProblemError(f"value {value_id} is computed by no operation")


def _validate_aligned(op_id: OpId, op: Operation) -> None:
    if not op.aligned:
        return
    if not op.fusible or len(op.writes) != 1 or not set(op.aligned) <= set(op.reads):
        raise InvalidProblemError(
            f"operation {op_id}: only what a fusible operation with one result reads "
            f"can be aligned, got {op.aligned}"
        )


_DRAWS_ON = {
    Phase.FORWARD: (Phase.FORWARD,),
    Phase.EITHER: (Phase.FORWARD, Phase.EITHER),
    Phase.BACKWARD: tuple(Phase),
}


def _validate_sums(problem: Problem) -> None:
    sizes = [value.size_bytes for value in problem.values]
    workspaces = [op.workspace_bytes for op in problem.operations]
    if sum(sizes) + max(workspaces, default=0) + problem.between_bytes > MOST_BYTES:
        raise InvalidProblemError(f"all values together have over {MOST_BYTES} bytes")
    try:
        math.fsum(op.cost_seconds for op in problem.operations)
    except (OverflowError, ValueError):
        raise InvalidProblemError("the costs have no finite sum") from None
