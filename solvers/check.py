"""An independent check of a plan: every rule, and its memory and cost once more.

Shares no code with `gcpass.solvers.liveness` and uses another formulation of the same
definition. There, an instance ends where its last reader ends; here every execution
**touches** the materialized instances that its kernel loads, through any virtual
instances in between, and what is alive is found by walking backwards as compilers find
live variables (A. Aho, M. Lam, R. Sethi, J. Ullman, "Compilers", 2nd ed., section
9.2.5): alive before = (alive after - written) + touched.

O(executions * touched); a plan of 5,000 executions takes some 50 ms.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from gcpass.solvers.errors import SolverError
from gcpass.solvers.problem import OpId, Origin, Phase, Plan, Problem, ValueId

COST_TOLERANCE = 1e-9  # relative; sums of the same seconds in another order
MOST_SOURCES = {True: 8, False: 4}  # inlining limits: one reader, several readers

Written = tuple[ValueId, int]  # an instance: a value and the execution that wrote it


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trace:
    """Who reads what.

    Attributes:
        loads: by execution, the instances it reads; tangents are written at the
            boundary, inputs are left out.
        readers: by instance, the executions that read it, ascending.
    """

    loads: tuple[tuple[Written, ...], ...]
    readers: dict[Written, tuple[int, ...]]


def check(problem: Problem, plan: Plan, budget_bytes: int | None) -> None:
    """Raise unless the plan is valid, says what it costs and needs, and fits.

    Args:
        problem: what the plan is a plan of.
        plan: the plan.
        budget_bytes: limit of the peak; None: no limit.

    Raises:
        SolverError: names the first rule that is broken.
    """
    _check_counts(problem, plan)
    _check_random_order(problem, plan)
    trace = _trace(problem, plan)
    _check_savable(problem, plan, trace)
    cost = _cost_seconds(problem, plan, trace)
    if not math.isclose(cost, plan.cost_seconds, rel_tol=COST_TOLERANCE, abs_tol=1e-18):
        raise SolverError(f"cost: plan says {plan.cost_seconds!r} s, it takes {cost!r}")
    peak = _peak_bytes(problem, plan, trace)
    if peak != plan.peak_bytes:
        raise SolverError(f"peak: plan says {plan.peak_bytes} bytes, it needs {peak}")
    if budget_bytes is not None and peak > budget_bytes:
        raise SolverError(f"budget: {budget_bytes} bytes, the plan needs {peak}")


def _check_counts(problem: Problem, plan: Plan) -> None:
    count = len(problem.operations)
    if not 0 <= plan.boundary <= len(plan.sequence):
        raise SolverError(f"boundary: {plan.boundary} of {len(plan.sequence)}")
    before, after = [0] * count, [0] * count
    for t, executed in enumerate(plan.sequence):
        if not 0 <= executed < count:
            raise SolverError(f"operation: execution {t} is of unknown {executed}")
        (before if t < plan.boundary else after)[executed] += 1
    for op_id in range(count):
        _check_count(problem, OpId(op_id), before[op_id], after[op_id])


def _check_count(problem: Problem, op_id: OpId, before: int, after: int) -> None:
    op = problem.operations[op_id]
    if op.phase is Phase.FORWARD and not before:
        raise SolverError(f"forward: operation {op_id} never runs before the boundary")
    if op.phase is Phase.BACKWARD and before:
        raise SolverError(f"backward only: operation {op_id} runs before the boundary")
    if op.phase is Phase.BACKWARD and not after:
        raise SolverError(f"backward: operation {op_id} never runs")
    if not op.recomputable and before + after > 1:
        raise SolverError(f"not recomputable: operation {op_id} runs {before + after}x")
    held = any(problem.values[value].held for value in op.writes)
    if held and not before + after:
        raise SolverError(f"held: operation {op_id} writes a held value, never runs")


def _check_random_order(problem: Problem, plan: Plan) -> None:
    """Random draws of the forward keep their order, or they give other numbers."""
    latest = -1
    for op_id in plan.sequence[: plan.boundary]:
        if problem.operations[op_id].recomputable:
            continue
        if op_id < latest:
            raise SolverError(f"order of draws: operation {op_id} after {latest}")
        latest = op_id


def _trace(problem: Problem, plan: Plan) -> _Trace:
    current: dict[ValueId, Written] = {}
    loads: list[tuple[Written, ...]] = []
    readers: dict[Written, list[int]] = {}
    for t, op_id in enumerate(plan.sequence):
        if t == plan.boundary:
            for tangent in _tangents(problem, plan):
                current[tangent[0]] = tangent
                readers[tangent] = []
        op = problem.operations[op_id]
        loaded = []
        for value in op.reads:
            if problem.values[value].origin is Origin.INPUT:
                continue
            if value not in current:
                raise SolverError(
                    f"available: execution {t} of operation {op_id} reads value {value}"
                )
            loaded.append(current[value])
            readers[current[value]].append(t)
        loads.append(tuple(loaded))
        for value in op.writes:
            current[value] = (value, t)
            readers[value, t] = []
    return _Trace(
        loads=tuple(loads), readers={k: tuple(times) for k, times in readers.items()}
    )


def _tangents(problem: Problem, plan: Plan) -> list[Written]:
    return [
        (ValueId(value_id), plan.boundary)
        for value_id, value in enumerate(problem.values)
        if value.origin is Origin.TANGENT
    ]


def _crosses(plan: Plan, trace: _Trace, written: Written) -> bool:
    if written[1] >= plan.boundary:
        return False
    return any(t >= plan.boundary for t in trace.readers[written])


def _check_savable(problem: Problem, plan: Plan, trace: _Trace) -> None:
    for written in trace.readers:
        value = problem.values[written[0]]
        if not value.savable and not value.held and _crosses(plan, trace, written):
            raise SolverError(f"savable: value {written[0]} lives across the boundary")


def _cost_seconds(problem: Problem, plan: Plan, trace: _Trace) -> float:
    seconds = [problem.operations[op_id].cost_seconds for op_id in plan.sequence]
    written = _read_by(problem, in_forward=True, absorbing=False)
    absorbed = _read_by(problem, in_forward=False, absorbing=True)
    for t, op_id in enumerate(plan.sequence[: plan.boundary]):
        op = problem.operations[op_id]
        for value in op.writes if op.fusible else ():
            if problem.values[value].held or not _crosses(plan, trace, (value, t)):
                continue
            share = 1.0 - (value in written) / 2 - (value not in absorbed) / 2
            size = problem.values[value].size_bytes
            seconds.append(share * size * problem.save_seconds_per_byte)
    return math.fsum(seconds)


def _read_by(problem: Problem, *, in_forward: bool, absorbing: bool) -> set[ValueId]:
    """Return what operations of one side that do or do not absorb read."""
    return {
        value
        for op in problem.operations
        if (op.phase is Phase.FORWARD) is in_forward and op.absorbing is absorbing
        for value in op.reads
    }


def _touched(
    problem: Problem, plan: Plan, trace: _Trace
) -> tuple[list[frozenset[Written]], frozenset[Written]]:
    """Return what each execution loads from memory, and the virtual instances."""
    touched: list[frozenset[Written]] = []
    virtual: set[Written] = set()
    for t, op_id in enumerate(plan.sequence):
        op = problem.operations[op_id]
        sources: set[Written] = set()
        for written in trace.loads[t]:
            sources |= touched[written[1]] if written in virtual else {written}
        touched.append(frozenset(sources))
        for value in op.writes if op.fusible else ():
            if _is_virtual(problem, plan, trace, (value, t), len(sources)):
                virtual.add((value, t))
    return touched, frozenset(virtual)


def _is_virtual(
    problem: Problem, plan: Plan, trace: _Trace, written: Written, drawn: int
) -> bool:
    readers = trace.readers[written]
    if not readers or drawn > MOST_SOURCES[len(readers) == 1]:
        return False
    if problem.values[written[0]].held or _crosses(plan, trace, written):
        return False
    return all(problem.operations[plan.sequence[t]].absorbing for t in readers)


def _written_over(
    problem: Problem, plan: Plan, trace: _Trace, virtual: frozenset[Written]
) -> list[frozenset[Written]]:
    """Return the instances whose memory each execution may write its result into."""
    result: list[frozenset[Written]] = []
    for t, op_id in enumerate(plan.sequence):
        over: set[Written] = set()
        for written in trace.loads[t]:
            value = problem.values[written[0]]
            if written[0] not in problem.operations[op_id].aligned:
                continue
            if written in virtual:
                over |= result[written[1]]
            elif not value.held and value.origin is Origin.COMPUTED:
                over.add(written)
        result.append(frozenset(over))
    return result


def _peak_bytes(problem: Problem, plan: Plan, trace: _Trace) -> int:
    touched, virtual = _touched(problem, plan, trace)
    starting: list[list[Written]] = [[] for _ in plan.sequence]
    for written in trace.readers:
        unread_tangent = (
            problem.values[written[0]].origin is Origin.TANGENT
            and not trace.readers[written]
            and not problem.values[written[0]].held
        )
        if written not in virtual and not unread_tangent:
            starting[written[1]].append(written)
    sizes = [value.size_bytes for value in problem.values]
    over = _written_over(problem, plan, trace, virtual)
    alive = {w for w in trace.readers if problem.values[w[0]].held}
    total = sum(sizes[value] for value, _ in alive)
    arriving = sum(sizes[value] for value, _ in _tangents(problem, plan))
    between = problem.between_bytes + arriving
    peak = total + between if plan.boundary == len(plan.sequence) else 0
    for t in range(len(plan.sequence) - 1, -1, -1):
        new = touched[t].union(starting[t]) - alive
        alive |= new
        total += sum(sizes[value] for value, _ in new)
        op = problem.operations[plan.sequence[t]]
        ending = {sizes[value] for value, _ in new & over[t]}
        in_place = sum(
            sizes[value]
            for value in op.writes
            if sizes[value] in ending and (value, t) not in virtual
        )
        peak = max(peak, total + op.workspace_bytes - in_place)
        alive.difference_update(starting[t])
        total -= sum(sizes[value] for value, _ in starting[t])
        if t == plan.boundary:
            peak = max(peak, total + between)
    return peak
