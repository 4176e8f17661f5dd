"""The integer program of Checkmate: all recomputation in one fixed order.

The needed operations, in the given order (the forward, then the rest), are numbered
0 ... n - 1. Stage t ends with the first execution of operation t; before it, any
earlier ones may be executed again, each at most once, in their order.

    legend  t stage, k operation, v value, w(v) its operation, j operation that reads v
    R[t,k]       1: k is executed in stage t; R[t,t] = 1
    S[t,v]       1: v is kept from stage t - 1 into stage t
    FREE[t,v,k]  1: v is freed after the execution of k in stage t
    U[t,k]       bytes alive during k in stage t

    min   sum c(k) R[t,k]
    (1)   R[t,j] <= R[t,w(v)] + S[t,v]             j reads v
    (2)   S[t,v] <= R[t-1,w(v)] + S[t-1,v]
    (3)   U[t,0] = sum size(v) S[t,v] + size of what 0 writes
          U[t,k] = U[t,k-1] - freed after k - 1 + written by k
    (4)   FREE[t,v,k] <= R[t,k], 1 - S[t+1,v], 1 - R[t,j] for j > k
    (5)   U[t,k] <= budget

(4) is the paper's definition of FREE, one row per factor of the product instead of two
sums over them. Only upper limits of FREE are needed: freeing never hurts. Beyond the
paper, and by `gcpass.solvers.liveness`:

- operations write several values, and need workspace: it is added in (5);
- nothing is executed again before the boundary, and never what is not recomputable;
- a value that is not savable has S = 0 at the boundary, where (5) holds for what is
  kept, the tangents and what the caller needs;
- a held value stays from its first execution on, each repeat leaves one more copy;
- S[t,v] + R[t,w(v)] <= 1: a repeat ends the life of what was kept, which no one has
  read in this stage (readers follow w), so keeping both is never better;
- tangents are kept into the first stage of the backward and cannot be computed.

Source: P. Jain, A. Jain, A. Nrusimha, A. Gholami, P. Abbeel, K. Keutzer, I. Stoica, J.
Gonzalez, "Checkmate: Breaking the Memory Wall with Optimal Tensor Rematerialization",
MLSys 2020, arXiv:1910.02653, eq. 1 to 9, with R[t,t] = 1. Not modelled: fusion (every
value is materialized), tolls on saving, operations of `Phase.EITHER` in the forward.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from gcpass.solvers.bound import given_order
from gcpass.solvers.ilp_model import cp_model
from gcpass.solvers.problem import OpId, Origin, Problem, ValueId

COST_UNITS = float(1 << 40)  # resolution of the time of the whole sequence

Term = Any  # a CP-SAT expression, or 0 or 1 where nothing is to decide
_BEFORE = -1  # the place of tangents: before every operation


@dataclass(slots=True, kw_only=True)
class Model:
    """The program while it is built.

    Attributes:
        problem: the problem.
        order: needed operations; places in it are the numbers k and t.
        boundary: how many of them are forward.
        writer: value -> k; -1 for tangents; inputs and unneeded values are absent.
        readers: value -> places that read it, ascending.
        program: of CP-SAT.
        budget: U's upper limit, a number or, to find the floor, a variable.
        run: R by (t, k).
        keep: S by (t, v).
        costs: c in integer units by k, and units per second.
    """

    problem: Problem
    order: tuple[OpId, ...]
    boundary: int
    writer: dict[ValueId, int]
    readers: dict[ValueId, list[int]]
    program: Any
    budget: Term
    scale: float
    run: dict[tuple[int, int], Term] = field(default_factory=dict)
    keep: dict[tuple[int, ValueId], Term] = field(default_factory=dict)

    def r(self, t: int, k: int) -> Term:
        """Return R[t,k]; 0 where it does not exist."""
        return self.run.get((t, k), 0)

    def s(self, t: int, value: ValueId) -> Term:
        """Return S[t,v]; 0 where it does not exist."""
        return self.keep.get((t, value), 0)

    def size(self, value: ValueId) -> int:
        """Return the bytes of a value."""
        return self.problem.values[value].size_bytes

    def held(self, value: ValueId) -> bool:
        """Return whether a value stays once it is there."""
        return self.problem.values[value].held


def build(problem: Problem, budget_bytes: int | None) -> Model:
    """Return the program for a budget; None: find the least peak instead.

    It has O(n^2) variables and O(n * edges) rows.
    """
    model = _empty(problem, budget_bytes)
    _add_variables(model)
    _add_availability(model)
    for t in range(len(model.order)):
        _add_memory(model, t)
    _add_boundary(model)
    _add_objective(model, floor=budget_bytes is None)
    return model


def most_bytes(problem: Problem) -> int:
    """Return a peak that no sequence of the program exceeds."""
    copies = len(problem.operations) + 1
    values = sum(v.size_bytes * (copies if v.held else 1) for v in problem.values)
    workspace = max((op.workspace_bytes for op in problem.operations), default=0)
    return values + workspace + problem.between_bytes


def _empty(problem: Problem, budget_bytes: int | None) -> Model:
    order, boundary = given_order(problem)
    writer: dict[ValueId, int] = {}
    readers: dict[ValueId, list[int]] = {}
    for value_id, value in enumerate(problem.values):
        if value.origin is Origin.TANGENT:
            writer[ValueId(value_id)] = _BEFORE
            readers[ValueId(value_id)] = []
    for k, op_id in enumerate(order):
        for read in problem.operations[op_id].reads:
            if read in readers:
                readers[read].append(k)
        for written in problem.operations[op_id].writes:
            writer[written] = k
            readers[written] = []
    program = cp_model().CpModel()
    limit = most_bytes(problem)
    budget = budget_bytes
    total = sum(problem.operations[o].cost_seconds for o in order)
    return Model(
        problem=problem,
        order=order,
        boundary=boundary,
        writer=writer,
        readers=readers,
        program=program,
        budget=program.new_int_var(0, limit, "peak") if budget is None else budget,
        scale=COST_UNITS / total if total else 1.0,
    )


def _add_variables(model: Model) -> None:
    operations, program = model.problem.operations, model.program
    for t in range(len(model.order)):
        model.run[t, t] = 1
        for k in range(t if t >= model.boundary else 0):
            if operations[model.order[k]].recomputable:
                model.run[t, k] = program.new_bool_var(f"R[{t},{k}]")
    for value, first in model.writer.items():
        if model.held(value) or not model.readers[value]:
            continue
        for t in range(_first_stage(model, first), len(model.order)):
            lost = t == model.boundary and first != _BEFORE
            if lost and not model.problem.values[value].savable:
                continue
            model.keep[t, value] = program.new_bool_var(f"S[{t},{value}]")


def _first_stage(model: Model, writer: int) -> int:
    """Return the first stage into which a value can be kept."""
    return model.boundary if writer == _BEFORE else writer + 1


def _add_availability(model: Model) -> None:
    """(1), (2) and the rule that nothing is kept and computed in one stage."""
    program = model.program
    for value, first in model.writer.items():
        if model.held(value):
            continue
        for t in range(_first_stage(model, first), len(model.order)):
            kept, again = model.s(t, value), model.r(t, first)
            for j in model.readers[value]:
                if (t, j) in model.run:
                    program.add(model.r(t, j) <= kept + again)
            program.add(kept + again <= 1)
            if first == _BEFORE and t == model.boundary:
                continue
            before = model.s(t - 1, value) + model.r(t - 1, first)
            program.add(kept <= before)


def _add_memory(model: Model, t: int) -> None:
    """(3), (4) and (5) of a stage."""
    program, operations = model.program, model.problem.operations
    alive = _kept(model, t)
    for k in range(t + 1):
        if (t, k) not in model.run:
            continue
        run = model.r(t, k)
        op = operations[model.order[k]]
        written = sum(map(model.size, op.writes))
        used = program.new_int_var(0, most_bytes(model.problem), f"U[{t},{k}]")
        program.add(used == alive + written * run)
        program.add(used + op.workspace_bytes * run <= model.budget)
        touched = dict.fromkeys((*op.reads, *op.writes))
        alive = used - sum(model.size(v) * _free(model, t, v, k) for v in touched)


def _kept(model: Model, t: int) -> Term:
    """Return the bytes alive when stage t starts: kept values, held ones and copies."""
    total: Term = sum(
        model.size(value) * kept for (at, value), kept in model.keep.items() if at == t
    )
    for value, first in model.writer.items():
        if not model.held(value):
            continue
        if first == _BEFORE:
            total += model.size(value) * (t >= model.boundary)
        total += sum(model.size(value) * model.r(i, first) for i in range(t))
    return total


def _free(model: Model, t: int, value: ValueId, k: int) -> Term:
    """Return FREE[t,v,k]; 0 where the value is read again in the stage for sure."""
    if value not in model.writer or model.held(value) or not model.size(value):
        return 0
    later = [model.r(t, j) for j in model.readers[value] if k < j <= t]
    if any(isinstance(run, int) and run for run in later):
        return 0
    free = model.program.new_bool_var(f"FREE[{t},{value},{k}]")
    for other in (*later, model.s(t + 1, value)):
        model.program.add(free + other <= 1)
    model.program.add(free <= model.r(t, k))
    return free


def _unread_tangents(model: Model) -> int:
    """Return bytes that are there between forward and backward only."""
    return sum(
        model.size(value)
        for value, first in model.writer.items()
        if first == _BEFORE and not model.held(value) and not model.readers[value]
    )


def _add_boundary(model: Model) -> None:
    t, program = model.boundary, model.program
    total = _kept(model, t) + model.problem.between_bytes
    for value, first in model.writer.items():
        if first == _BEFORE and t < len(model.order):
            if model.readers[value] and not model.held(value):
                program.add(model.s(t, value) == 1)
    program.add(total + _uncounted_tangents(model) <= model.budget)


def _uncounted_tangents(model: Model) -> int:
    """Return the bytes of the tangents that `_kept` does not count at the boundary."""
    if model.boundary < len(model.order):
        return _unread_tangents(model)
    tangents = (v for v, k in model.writer.items() if k == _BEFORE)
    return sum(model.size(v) for v in tangents if not model.held(v))


def _add_objective(model: Model, *, floor: bool) -> None:
    if floor:
        model.program.minimize(model.budget)
        return
    operations = model.problem.operations
    model.program.minimize(
        sum(
            round(operations[model.order[k]].cost_seconds * model.scale) * run
            for (t, k), run in model.run.items()
            if k < t
        )
    )
