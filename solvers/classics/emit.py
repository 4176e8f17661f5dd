"""Writes sequences that are valid by construction: just-in-time recomputation.

An `Emitter` executes operations and remembers which values a later execution can read.
What an operation reads and nothing holds is recomputed just before it, recursively, in
the given order. Executing an operation once more *is* dropping the earlier instances of
what it writes: their life ends with their last reader before that
(`gcpass.solvers.liveness`, 1 and 5). So a method says what to execute again, and never
has to say what to free; `finish` then deletes executions that nobody reads (dead code,
Aho, Lam, Sethi, Ullman, "Compilers", 2nd ed., section 9.2.5).

Three kinds of operations are not for a method to choose:

- a **pinned** operation is not executed again: it is not recomputable, or lacks in the
  backward what can neither be saved nor computed again, or it writes a held value, of
  which every execution would leave one more copy until the end;
- an operation of `Phase.EITHER` runs in the backward, when something needs it, and in
  the forward only to save its values, for a reader there, or where it could not later;
- a value that is not savable is dropped at the boundary and recomputed behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

from gcpass.solvers.errors import SolverError
from gcpass.solvers.moment import needed_operations
from gcpass.solvers.problem import OpId, Origin, Phase, Plan, Problem, ValueId
from gcpass.solvers.turn import Turned

NOTHING: frozenset[ValueId] = frozenset()


def forward_operations(
    problem: Problem, saved: AbstractSet[ValueId] = NOTHING
) -> tuple[OpId, ...]:
    """Return what runs before the boundary, in the given order, in O(edges).

    Args:
        problem: a training problem.
        saved: values to have when the backward starts; the operations of
            `Phase.EITHER` that write them are included.
    """
    writers = problem.writers()
    chosen = {i for i, op in enumerate(problem.operations) if op.phase is Phase.FORWARD}
    possible = _possible_later(problem)
    chosen.update(
        op_id
        for op_id in needed_operations(problem)
        if problem.operations[op_id].phase is Phase.EITHER and not possible[op_id]
    )
    chosen.update(w for v in saved if (w := writers[v]) is not None)
    stack = sorted(chosen)
    while stack:
        for value in problem.operations[stack.pop()].reads:
            writer = writers[value]
            if writer is not None and writer not in chosen:
                chosen.add(writer)
                stack.append(writer)
    return tuple(OpId(o) for o in sorted(chosen))


def backward_operations(problem: Problem) -> tuple[OpId, ...]:
    """Return what the backward runs in the given order.

    Operations of `Phase.EITHER` are among them when they write something held; others
    run when something needs them.
    """
    return tuple(
        OpId(op_id)
        for op_id, op in enumerate(problem.operations)
        if op.phase is Phase.BACKWARD
        or (op.phase is Phase.EITHER and must_run(problem, OpId(op_id)))
    )


def must_run(problem: Problem, op_id: OpId) -> bool:
    """Return whether every plan executes the operation, read or not."""
    op = problem.operations[op_id]
    held = any(problem.values[v].held for v in op.writes)
    return op.phase is not Phase.EITHER or held


def pinned_operations(problem: Problem) -> frozenset[OpId]:
    """Return the operations whose values methods leave where they are, in O(edges)."""
    possible = _possible_later(problem)
    return frozenset(
        OpId(op_id)
        for op_id, op in enumerate(problem.operations)
        if not (op.recomputable and possible[op_id])
        or any(problem.values[v].held for v in op.writes)
    )


class Emitter:
    """Executes operations of a training problem, with what they lack before them.

    Attributes:
        sequence: what was executed so far.
    """

    def __init__(self, step: Turned) -> None:
        self.step = step
        self.sequence: list[OpId] = []
        self._problem = step.training
        self._writers = step.training.writers()
        self._pinned = pinned_operations(step.training)
        self._boundary: int | None = None
        self._ran = [False] * len(step.training.operations)
        self._alive = [v.origin is Origin.INPUT for v in step.training.values]

    def run(self, op_id: OpId) -> None:
        """Execute an operation, and first, in order, what its reads lack.

        Raises:
            SolverError: a value is gone that cannot be computed again.
        """
        for missing in self._missing(op_id):
            self._execute(missing)
        self._execute(op_id)

    def run_once(self, op_id: OpId) -> None:
        """Execute an operation unless it ran."""
        if not self._ran[op_id]:
            self.run(op_id)

    def run_again(self, op_id: OpId) -> None:
        """Execute an operation once more unless it is pinned."""
        if not (self._ran[op_id] and op_id in self._pinned):
            self.run(op_id)

    def cross(self, saved: AbstractSet[ValueId] | None = None) -> None:
        """Pass the boundary: tangents arrive, what is not saved is lost.

        Args:
            saved: values that stay, besides held ones and those of pinned operations;
                None: all. Values that are not savable are lost in any case.
        """
        self._boundary = len(self.sequence)
        for value_id, value in enumerate(self._problem.values):
            writer = self._writers[value_id]
            if value.origin is Origin.TANGENT:
                self._alive[value_id] = True
            elif writer is not None and not value.held:
                kept = saved is None or value_id in saved or writer in self._pinned
                self._alive[value_id] &= value.savable and kept

    def finish(self, origin: str) -> Plan:
        """Return the plan of what was executed, without what nobody reads."""
        boundary = len(self.sequence) if self._boundary is None else self._boundary
        sequence, boundary = without_unread(self._problem, self.sequence, boundary)
        return self.step.plan(sequence, boundary, origin)

    def _missing(self, op_id: OpId) -> list[OpId]:
        """Return the operations to execute before this one, ascending."""
        operations = self._problem.operations
        found: set[OpId] = set()
        stack = list(operations[op_id].reads)
        while stack:
            value = stack.pop()
            writer = self._writers[value]
            if self._alive[value] or writer is None or writer in found:
                continue
            if self._ran[writer] and not operations[writer].recomputable:
                raise SolverError(
                    f"operation {op_id} needs value {value} in the backward; it is not "
                    f"savable and operation {writer} is not recomputable: mark one of "
                    "them otherwise"
                )
            found.add(writer)
            stack.extend(operations[writer].reads)
        return sorted(found)

    def _execute(self, op_id: OpId) -> None:
        self.sequence.append(op_id)
        self._ran[op_id] = True
        for value in self._problem.operations[op_id].writes:
            self._alive[value] = True


def saving(step: Turned, saved: AbstractSet[ValueId], origin: str) -> Plan:
    """Return the plan that saves these values and recomputes others just in time.

    Each recomputed value is kept from before its first use in the backward to its
    last, as in the graphs that torch's partitioners make: one copy of each.

    Args:
        step: the problem.
        saved: values to save; those that turn out not to be read are not saved.
        origin: the method's name.

    Raises:
        SolverError: see `Emitter.run`.
    """
    emitter = Emitter(step)
    for op_id in forward_operations(step.training, saved):
        emitter.run_once(op_id)
    emitter.cross(saved)
    for op_id in backward_operations(step.training):
        emitter.run_once(op_id)
    return emitter.finish(origin)


def everything(problem: Problem) -> frozenset[ValueId]:
    """Return the values that forward operations compute and that may be saved."""
    return frozenset(
        value
        for op_id in forward_operations(problem)
        for value in problem.operations[op_id].writes
        if problem.values[value].savable
    )


def without_unread(
    problem: Problem, sequence: Sequence[OpId], boundary: int
) -> tuple[tuple[OpId, ...], int]:
    """Return the sequence without executions whose values nobody reads.

    The first execution of what must run stays. No reader reads another instance than
    before, so a valid sequence stays valid. One pass backwards, O(executions * arity).
    """
    first: dict[OpId, int] = {}
    for t, op_id in enumerate(sequence):
        first.setdefault(op_id, t)
    wanted = [False] * len(problem.values)
    kept: list[int] = []
    for t in range(len(sequence) - 1, -1, -1):
        op_id = sequence[t]
        op = problem.operations[op_id]
        needed = first[op_id] == t and must_run(problem, op_id)
        if not needed and not any(wanted[v] for v in op.writes):
            continue
        kept.append(t)
        for value in op.writes:
            wanted[value] = False
        for value in op.reads:
            wanted[value] = True
    kept.reverse()
    return tuple(sequence[t] for t in kept), sum(1 for t in kept if t < boundary)


def _possible_later(problem: Problem) -> list[bool]:
    """Return, by operation, whether it can have all it reads in the backward.

    A value can be had there when it can be saved, or computed from such values by an
    operation that may run there.
    """
    later = [value.origin is not Origin.COMPUTED for value in problem.values]
    result = []
    for op in problem.operations:
        possible = all(later[value] for value in op.reads)
        again = possible and (op.recomputable or op.phase is not Phase.FORWARD)
        for value in op.writes:
            data = problem.values[value]
            later[value] = data.savable or data.held or again
        result.append(possible)
    return result
