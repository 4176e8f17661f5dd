"""An integer program for the saved set under one row of memory per position.

A cut prices saved bytes at one moment, so equal layers all flip at one price. The
program mixes: it chooses what is saved at the boundary and what is recomputed in the
backward such that modelled memory is within the budget at several positions of the
backward at once. Its regime is one copy, just in time: a value is saved, or recomputed
once, immediately before its first use, and kept until its last.

    legend  v value, o operation, r operation that reads v, k row (a backward position)
    S[v]    1: v is saved
    R[o]    1: o is executed in the backward (again, or first if of `Phase.EITHER`)
    T[o,k]  1: o has been executed in the backward at row k
    L[v,k]  1: v is alive at row k

    min   sum c(o) R[o] + sum toll(v) S[v]
    (1)   S[v] + R[writer(v)] >= 1                     v read by backward operations
    (2)   S[v] + R[writer(v)] >= R[r]                  v read by r
    (3)   T[o,k] = R[o]                                o used directly at or before k
          T[o,k] >= T[r,k] - S[v]                      r reads v, a value of o
    (4)   L[v,k] = S[v] + T[writer(v),k]               v used directly at or after k
          L[v,k] >= R[r] - T[r,k-1] - R[writer(v)]     r still to run, v saved
          L[v,k] >= R[r] - T[r,k-1] + T[writer(v),k] - 1          or recomputed
    (5)   fixed[k] + sum size(v) L[v,k] <= budget
    (6)   fixed + sum size(v) S[v] <= budget           at the boundary itself

(3) is what a bound on saved bytes misses: with nothing saved on the residual path the
first backward layer rebuilds all of the forward (pytorch#197838). A recomputed value
that will be virtual takes no bytes and keeps what it reads until its readers have run.

Approximations: the backward keeps the given order; temporaries inside a recomputed
stretch that the backward does not read are left out; positions between rows are not
constrained. So the result is a saved set to build a plan from, and nothing is proven.

Sources: P. Jain et al., "Checkmate", MLSys 2020, arXiv:1910.02653, eq. 1 to 9, whose
n * m binaries for every stage are reduced to rows here because order and number of
copies are given. Why CP-SAT: deterministic limits and warm starts in a package that
the cuts need anyway.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gcpass.solvers.bound import given_order
from gcpass.solvers.cut import CutProblem
from gcpass.solvers.errors import SolverError
from gcpass.solvers.liveness import simulate
from gcpass.solvers.problem import OpId, Phase, Problem, ValueId

MOST_ROWS = 24  # one per pair of blocks in models of 48 layers
MOST_CELLS = 24_000  # operations times rows; CP-SAT starts within a second below it
MEMORY_UNITS = 1 << 20  # resolution of the budget; sizes are rounded up to it
COST_UNITS = 1 << 30  # resolution of the summed cost
_NEVER = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Uses:
    """When the backward in given order uses what; positions are executions.

    Attributes:
        first: by value, its first direct reader in the backward, or a large number.
        last: by value, the end of its last direct reader, or `_NEVER`.
        rows: chosen positions, ascending.
        fixed_bytes: by row, bytes that no choice changes.
    """

    first: tuple[int, ...]
    last: tuple[int, ...]
    rows: tuple[int, ...]
    fixed_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """A variable is at least sum(plus) - sum(minus) - allowance.

    Variables in sums are given by their index: asking CP-SAT for it takes longer than
    all else when a point is evaluated.
    """

    variable: Any
    index: int
    plus: tuple[int, ...]
    minus: tuple[int, ...]
    allowance: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """sum(units * variable) is at most `room`, in units of memory.

    Terms are (units, index of the variable).
    """

    terms: tuple[tuple[int, int], ...]
    room: int


@dataclass(slots=True, kw_only=True)
class Model:
    """The program while it is built.

    Attributes:
        readers: by value of the network, its readers among the network's operations.
        virtual: operations whose values take no bytes when recomputed, with the last
            position at which one of them is used.
        saved: S.
        again: R.
        started: T; absent where it is surely 0.
        floors: families (3) and (4) where they define a variable.
        rows: families (5) and (6).
    """

    problem: Problem
    network: CutProblem
    uses: Uses
    program: Any
    readers: dict[ValueId, tuple[OpId, ...]]
    virtual: dict[OpId, int]
    floors: list[Floor] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    saved: dict[ValueId, Any] = field(default_factory=dict)
    again: dict[OpId, Any] = field(default_factory=dict)
    started: dict[tuple[OpId, int], Any] = field(default_factory=dict)

    def at_least(
        self, variable: Any, plus: list[Any], minus: list[Any], allowance: int = 0
    ) -> None:
        """Add a `Floor` to the program."""
        self.program.add(variable >= sum(plus) - sum(minus) - allowance)
        self.floors.append(
            Floor(
                variable=variable,
                index=variable.index,
                plus=tuple(v.index for v in plus),
                minus=tuple(v.index for v in minus),
                allowance=allowance,
            )
        )

    def writes(self, op: OpId) -> list[ValueId]:
        """Return the values of the network that an operation writes."""
        return [v for v in self.problem.operations[op].writes if v in self.saved]

    def present(self, value: ValueId) -> Any:
        """Return an expression that is 1 when a value is saved or recomputed."""
        writer = self.network.moment.writers[value]
        terms = [self.saved[value]]
        if writer is not None:
            terms.append(self.again[writer])
        return sum(terms)


def build(problem: Problem, network: CutProblem, budget_bytes: int) -> Model:
    uses = _uses(problem, network)
    inside = frozenset(network.operations)
    readers = problem.readers()
    model = Model(
        problem=problem,
        network=network,
        uses=uses,
        program=cp_model().CpModel(),
        readers={
            v: tuple(r for r in readers[v] if r in inside) for v in network.values
        },
        virtual=_virtual(problem, network, uses, readers),
    )
    _choices(model)
    _boundary_row(model, budget_bytes)
    for k in range(len(uses.rows)):
        _starts(model, k)
        _memory_row(model, k, budget_bytes)
    _objective(model)
    return model


def _uses(problem: Problem, network: CutProblem) -> Uses:
    sequence, boundary = given_order(problem)
    profile = simulate(problem, sequence, boundary)
    ends = list(range(len(sequence)))  # virtual results are read until their end
    for instance in profile.instances:
        if instance.virtual:
            ends[instance.start] = max(ends[instance.start], instance.end)
    first = [len(sequence)] * len(problem.values)
    last = [_NEVER] * len(problem.values)
    positions = []
    for t in range(boundary, len(sequence)):
        if problem.operations[sequence[t]].phase is not Phase.BACKWARD:
            continue
        positions.append(t)
        for value in problem.operations[sequence[t]].reads:
            first[value] = min(first[value], t)
            last[value] = max(last[value], ends[t])
    rows = _choose_rows(positions, profile.memory_bytes, len(network.operations))
    chosen = frozenset(network.values)
    fixed = [problem.operations[sequence[t]].workspace_bytes for t in rows]
    for instance in profile.instances:
        if instance.virtual or instance.value in chosen:
            continue
        for k, t in enumerate(rows):
            if instance.start <= t <= instance.end:
                fixed[k] += problem.values[instance.value].size_bytes
    return Uses(
        first=tuple(first), last=tuple(last), rows=rows, fixed_bytes=tuple(fixed)
    )


def _choose_rows(
    positions: list[int], memory_bytes: Sequence[int], operations: int
) -> tuple[int, ...]:
    """Return the highest position of each of equally long stretches."""
    count = max(1, min(MOST_ROWS, MOST_CELLS // max(1, operations), len(positions)))
    stretches = np.array_split(np.array(positions, dtype=np.int64), count)
    return tuple(
        max((int(t) for t in stretch), key=lambda t: (memory_bytes[t], -t))
        for stretch in stretches
        if len(stretch)
    )


def _virtual(
    problem: Problem,
    network: CutProblem,
    uses: Uses,
    readers: tuple[tuple[OpId, ...], ...],
) -> dict[OpId, int]:
    """Return operations that will be virtual in the backward, with their last use."""
    inside = frozenset(network.operations)
    result: dict[OpId, int] = {}
    for op_id in reversed(network.operations):
        op = problem.operations[op_id]
        late = [
            r
            for value in op.writes
            for r in readers[value]
            if r in inside or problem.operations[r].phase is Phase.BACKWARD
        ]
        held = any(problem.values[value].held for value in op.writes)
        if (
            not op.fusible
            or held
            or not all(problem.operations[r].absorbing for r in late)
        ):
            continue
        inner = [result[r] for r in late if r in result]
        result[op_id] = max([*inner, *(uses.last[value] for value in op.writes)])
    return result


def _choices(model: Model) -> None:
    """Add S, R and the families (1) and (2)."""
    program, network = model.program, model.network
    for value, toll in zip(network.values, network.tolls, strict=True):
        possible = 1 if np.isfinite(toll) else 0
        model.saved[value] = program.new_int_var(0, possible, f"S{value}")
    for op, cost in zip(network.operations, network.costs, strict=True):
        possible = 1 if np.isfinite(cost) else 0
        model.again[op] = program.new_int_var(0, possible, f"R{op}")
    for value in network.moment.required:
        program.add(model.present(value) >= 1)
    for value in network.values:
        for reader in model.readers[value]:
            program.add(model.present(value) >= model.again[reader])


def _starts(model: Model, k: int) -> None:
    """Add T[., k], family (3), readers before what they read."""
    row, first = model.uses.rows[k], model.uses.first
    for op in reversed(model.network.operations):
        writes = model.writes(op)
        if min(first[value] for value in writes) <= row:
            model.started[op, k] = model.again[op]
            continue
        early = [
            (model.started[r, k], model.saved[value])
            for value in writes
            for r in model.readers[value]
            if (r, k) in model.started
        ]
        if not early:
            continue
        variable = model.program.new_bool_var(f"T{op},{k}")
        model.started[op, k] = variable
        model.program.add(variable <= model.again[op])
        for start, saved in early:
            model.at_least(variable, [start], [saved])


def _boundary_row(model: Model, budget_bytes: int) -> None:
    """Add row (6)."""
    unit = _memory_unit(budget_bytes)
    terms = [(_units(model, v, unit), saved) for v, saved in model.saved.items()]
    _add_row(model, terms, budget_bytes, model.network.moment.fixed_bytes)


def _memory_row(model: Model, k: int, budget_bytes: int) -> None:
    """Add L[., k] and rows (4) and (5)."""
    unit = _memory_unit(budget_bytes)
    terms = []
    for value in model.network.values:
        units = _units(model, value, unit)
        if units:
            terms += [(units, variable) for variable in _alive(model, value, k)]
    _add_row(model, terms, budget_bytes, model.uses.fixed_bytes[k])


def _memory_unit(budget_bytes: int) -> int:
    return max(1, budget_bytes // MEMORY_UNITS)


def _units(model: Model, value: ValueId, unit: int) -> int:
    return -(-model.problem.values[value].size_bytes // unit)


def _add_row(
    model: Model, terms: list[tuple[int, Any]], budget_bytes: int, fixed_bytes: int
) -> None:
    unit = _memory_unit(budget_bytes)
    room = budget_bytes // unit + -fixed_bytes // unit
    model.program.add(sum(units * variable for units, variable in terms) <= room)
    by_index = tuple((units, variable.index) for units, variable in terms)
    model.rows.append(Row(terms=by_index, room=room))


def _alive(model: Model, value: ValueId, k: int) -> list[Any]:
    """Return variables whose sum is L[value, k], none where it is surely 0."""
    writer = model.network.moment.writers[value]
    assert writer is not None, "tangents are fixed at the boundary"
    copy = None if writer in model.virtual else model.started.get((writer, k))
    if model.uses.last[value] >= model.uses.rows[k]:
        return [model.saved[value]] + ([] if copy is None else [copy])
    pending = [p for r in model.readers[value] for p in _pending(model, r, k)]
    if not pending:
        return []
    variable = model.program.new_bool_var(f"L{value},{k}")
    for again, earlier in pending:
        model.at_least(variable, [again], [*earlier, model.again[writer]])
        if copy is not None:
            model.at_least(variable, [again, copy], earlier, 1)
    return [variable]


def _pending(model: Model, reader: OpId, k: int) -> Iterator[tuple[Any, list[Any]]]:
    """Yield R and, to subtract, T of a reader that can need its reads at row k."""
    again = model.again[reader]
    if reader in model.virtual:
        if model.virtual[reader] >= model.uses.rows[k]:
            yield again, []
        return
    earlier = model.started.get((reader, k - 1))
    if earlier is None:
        yield again, []
    elif earlier is not again:
        yield again, [earlier]


def _objective(model: Model) -> None:
    network = model.network
    finite = [x[np.isfinite(x)].sum() for x in (network.costs, network.tolls)]
    scale = COST_UNITS / (float(sum(finite)) or 1.0)
    terms = []
    for value, toll in zip(network.values, network.tolls, strict=True):
        if np.isfinite(toll) and toll:
            terms.append(round(toll * scale) * model.saved[value])
    for op, cost in zip(network.operations, network.costs, strict=True):
        if np.isfinite(cost) and cost:
            terms.append(round(cost * scale) * model.again[op])
    model.program.minimize(sum(terms))


def cp_model() -> Any:
    try:
        from ortools.sat.python import cp_model
    except ImportError as error:
        raise SolverError(f"ortools is needed for CP-SAT: {error}") from error
    return cp_model
