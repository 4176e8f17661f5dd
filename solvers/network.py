"""A problem as arrays: one plain sequence over operations that all must run.

The boundary between forward and backward becomes an operation of its own, the **turn**:
it reads a token of zero bytes from every forward operation, writes the tangents and a
token that every backward operation reads, and must not be repeated. What it needs
besides (`Problem.between_bytes`) is its workspace. Any valid sequence of the network
without the turn is then a valid sequence of the problem, and its place the boundary.

Which values of fusible operations are virtual depends on the sequence; it is decided in
`gcpass.solvers.virtual`, as `gcpass.solvers.liveness` defines it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gcpass.solvers.moment import needed_operations
from gcpass.solvers.problem import OpId, Origin, Phase, Problem, ValueId

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
FloatArray = npt.NDArray[np.float64]

NONE = -1


class Network(NamedTuple):
    """Operations and values as arrays, operations in the given order.

    Attributes:
        cost: seconds by operation.
        workspace: bytes by operation.
        once: by operation, whether it must not be executed twice.
        reads_from, reads: o reads the values reads[reads_from[o]:reads_from[o + 1]].
        writes_from, writes: likewise what it writes.
        absorbs: by operation, whether it takes virtual values it reads into its kernel.
        aligned_from, aligned: likewise what it reads at the places that it writes, less
            what is never written over.
        size: bytes by value.
        writer: operation by value; every value has one.
        column: by value, its place among those that its operation writes.
        token: by value, whether it only orders what reads it.
        inlines: by value, whether it may be virtual.
        toll: by value, seconds to save it across the turn.
        held: by value, whether it stays alive once written.
        barred: by value, whether it must not be alive at the turn.
        readers_from, readers: operations that read a value, ascending.
        turn: operation between forward and backward, -1 if there is none.
        fuses: whether any value may be virtual or written in place.
    """

    cost: FloatArray
    workspace: IntArray
    once: BoolArray
    reads_from: IntArray
    reads: IntArray
    writes_from: IntArray
    writes: IntArray
    absorbs: BoolArray
    aligned_from: IntArray
    aligned: IntArray
    size: IntArray
    writer: IntArray
    column: IntArray
    token: BoolArray
    inlines: BoolArray
    toll: FloatArray
    held: BoolArray
    barred: BoolArray
    readers_from: IntArray
    readers: IntArray
    turn: int
    fuses: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbering:
    """How a network's numbers and a problem's ids belong together.

    Attributes:
        operations: by operation of the network, the problem's id; -1 for the turn.
        operation_of: by the problem's id, the operation of the network or -1.
        value_of: by the problem's value id, the value of the network or -1.
        turn: as in the network.
    """

    operations: tuple[int, ...]
    operation_of: tuple[int, ...]
    value_of: tuple[int, ...]
    turn: int

    def sequence(self, numbers: IntArray) -> tuple[tuple[OpId, ...], int]:
        """Return (sequence, boundary) of the problem for one of the network."""
        boundary = 0
        if self.turn != NONE:
            boundary = int(np.flatnonzero(numbers == self.turn)[0])
        ids = np.array(self.operations, dtype=np.int64)[numbers[numbers != self.turn]]
        return tuple(OpId(o) for o in ids.tolist()), boundary

    def numbers(self, sequence: Sequence[OpId], boundary: int) -> IntArray:
        """Return the network's sequence for one of the problem."""
        result = [self.operation_of[o] for o in sequence]
        if self.turn != NONE:
            result.insert(boundary, self.turn)
        return np.array([o for o in result if o != NONE], dtype=np.int64)


def network_of(problem: Problem) -> tuple[Network, Numbering]:
    """Return the network of a problem, in O(operations + reads)."""
    needed = needed_operations(problem)
    ops, values = problem.operations, problem.values
    phase = [op.phase for op in ops]
    forward = [o for o in sorted(needed) if phase[o] is Phase.FORWARD]
    rest = [o for o in sorted(needed) if phase[o] is not Phase.FORWARD]
    tangents = [v for v, x in enumerate(values) if x.origin is Origin.TANGENT]
    with_turn = bool(
        forward
        or tangents
        or problem.between_bytes
        or any(phase[o] is not Phase.BACKWARD for o in rest)
    )
    turn = len(forward) if with_turn else NONE
    order = [*forward, *([NONE] if with_turn else []), *rest]
    operation_of = [NONE] * len(ops)
    for number, op_id in enumerate(order):
        if op_id != NONE:
            operation_of[op_id] = number
    build = _Builder(problem=problem, order=order, tangents=tangents)
    return build.network(turn), Numbering(
        operations=tuple(order),
        operation_of=tuple(operation_of),
        value_of=tuple(build.value_of),
        turn=turn,
    )


class _Builder:
    """Collects the columns; values are numbered by their writers."""

    def __init__(
        self, *, problem: Problem, order: list[int], tangents: list[int]
    ) -> None:
        self.problem = problem
        self.order = order
        self.size: list[int] = []
        self.held: list[bool] = []
        self.barred: list[bool] = []
        self.token: list[bool] = []
        self.value_of = [NONE] * len(problem.values)
        self.writes: list[list[int]] = []
        for op_id in order:
            written = tangents if op_id == NONE else problem.operations[op_id].writes
            self.writes.append([self._value(ValueId(v)) for v in written])
        self.reads = [
            []
            if op_id == NONE
            else [
                self.value_of[v]
                for v in problem.operations[op_id].reads
                if self.value_of[v] != NONE
            ]
            for op_id in order
        ]

    def _aligned(self, op_id: int) -> list[int]:
        if op_id == NONE:
            return []
        values = self.problem.values
        return [
            self.value_of[v]
            for v in self.problem.operations[op_id].aligned
            if values[v].origin is Origin.COMPUTED and not values[v].held
        ]

    def _value(self, value_id: ValueId) -> int:
        value = self.problem.values[value_id]
        self.size.append(value.size_bytes)
        self.held.append(value.held)
        computed = value.origin is Origin.COMPUTED
        self.barred.append(computed and not value.savable and not value.held)
        self.token.append(False)
        self.value_of[value_id] = len(self.size) - 1
        return len(self.size) - 1

    def _token(self, number: int) -> int:
        """Add a value of no bytes, which only orders what reads it."""
        self.size.append(0)
        self.held.append(False)
        self.barred.append(False)
        self.token.append(True)
        self.writes[number].append(len(self.size) - 1)
        return len(self.size) - 1

    def network(self, turn: int) -> Network:
        """Return the arrays, with the tokens that keep the phases apart."""
        ops = self.problem.operations
        if turn != NONE:
            self._add_tokens(turn)
        once = [o == NONE or not ops[o].recomputable for o in self.order]
        fusible = np.array(
            [o != NONE and ops[o].fusible for o in self.order], dtype=np.bool_
        )
        absorbs = [o != NONE and ops[o].absorbing for o in self.order]
        writer = np.zeros(len(self.size), dtype=np.int64)
        column = np.zeros(len(self.size), dtype=np.int64)
        readers: list[list[int]] = [[] for _ in self.size]
        for number, written in enumerate(self.writes):
            writer[written] = number
            column[written] = np.arange(len(written))
            for value in self.reads[number]:
                readers[value].append(number)
        reads_from, reads = _rows(self.reads)
        writes_from, writes = _rows(self.writes)
        readers_from, readers_flat = _rows(readers)
        aligned_from, aligned = _rows([self._aligned(o) for o in self.order])
        between = self.problem.between_bytes
        size = np.array(self.size, dtype=np.int64)
        held = np.array(self.held, dtype=np.bool_)
        token = np.array(self.token, dtype=np.bool_)
        inlines = fusible[writer] & ~held & ~token
        return Network(
            cost=np.array(
                [0.0 if o == NONE else ops[o].cost_seconds for o in self.order],
                dtype=np.float64,
            ),
            workspace=np.array(
                [between if o == NONE else ops[o].workspace_bytes for o in self.order],
                dtype=np.int64,
            ),
            once=np.array(once, dtype=np.bool_),
            reads_from=reads_from,
            reads=reads,
            writes_from=writes_from,
            writes=writes,
            absorbs=np.array(absorbs, dtype=np.bool_),
            aligned_from=aligned_from,
            aligned=aligned,
            size=size,
            writer=writer,
            column=column,
            token=token,
            inlines=inlines,
            toll=self._tolls(),
            held=held,
            barred=np.array(self.barred, dtype=np.bool_),
            readers_from=readers_from,
            readers=readers_flat,
            turn=turn,
            fuses=bool(inlines.any()) or len(aligned) > 0,
        )

    def _tolls(self) -> FloatArray:
        """Return by value the seconds that saving it costs."""
        result = np.zeros(len(self.size), dtype=np.float64)
        for value, seconds in enumerate(self.problem.saving_seconds()):
            if self.value_of[value] != NONE:
                result[self.value_of[value]] = seconds
        return result

    def _add_tokens(self, turn: int) -> None:
        ops = self.problem.operations
        previous = NONE  # random draws of the forward keep their order
        for number in range(turn):
            if not ops[self.order[number]].recomputable:
                if previous != NONE:
                    self.reads[number].append(self._token(previous))
                previous = number
            self.reads[turn].append(self._token(number))
        token = self._token(turn)
        for number in range(turn + 1, len(self.order)):
            op = ops[self.order[number]]
            if op.phase is Phase.BACKWARD:
                self.reads[number].append(token)
            elif not op.recomputable:
                # A draw that the forward may take keeps its place among the draws.
                if previous != NONE and self.order[previous] > self.order[number]:
                    self.reads[number].append(token)
                elif previous != NONE:
                    self.reads[number].append(self._token(previous))
                    previous = number
                else:
                    previous = number


def _rows(lists: Sequence[Sequence[int]]) -> tuple[IntArray, IntArray]:
    starts = np.zeros(len(lists) + 1, dtype=np.int64)
    np.cumsum([len(row) for row in lists], out=starts[1:])
    return starts, np.array([x for row in lists for x in row], dtype=np.int64)
