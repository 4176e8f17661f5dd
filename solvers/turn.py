"""Where the forward of a plain sequence ends, and the training problem that follows.

The classic methods need to know what is forward and what is backward. A plain
sequence (`gcpass.solvers.problem`: every operation of `Phase.BACKWARD`, boundary 0)
does not say. Its **turn** is the place of the given order that the most bytes cross:
values written before it and read at or after it (or held). In a training graph
everything that the backward will read has been written there and nothing of it has
been used, so no earlier place is crossed by more, and every backward operation after it
frees what it read. Of several places the earliest is taken. In a graph that is no
training graph the turn is where recomputation can help most: what crosses it is what a
plan may drop.

`turned` gives every operation before the turn `Phase.FORWARD`. That only takes freedom
away (the forward runs once, in its own part): each plan of the training problem is,
with boundary 0, a plan of the plain sequence, and `Turned.plan` prices it as such.

Not modelled: graphs with several turns, as of a step with gradient accumulation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gcpass.solvers.liveness import make_plan
from gcpass.solvers.problem import OpId, Origin, Phase, Plan, Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Turned:
    """A problem together with the training problem to plan with.

    Attributes:
        problem: what plans are plans of.
        training: the same operations and values with a forward and a backward; the
            problem itself where it has them.
        plain: the problem is a plain sequence.
    """

    problem: Problem
    training: Problem
    plain: bool

    def plan(self, sequence: Sequence[OpId], boundary: int, origin: str) -> Plan:
        """Return the plan of the problem for a sequence of the training problem."""
        return make_plan(self.problem, sequence, 0 if self.plain else boundary, origin)


def is_plain(problem: Problem) -> bool:
    """Return whether every operation is of `Phase.BACKWARD`."""
    return all(op.phase is Phase.BACKWARD for op in problem.operations)


def turn(problem: Problem) -> int:
    """Return the number of operations before the turn, in O(edges).

    It is 0 for a problem in which nothing is read later, and never more than the first
    operation that reads a tangent, which is backward.
    """
    values = problem.values
    last_read = [-1] * len(values)
    for op_id, op in enumerate(problem.operations):
        for value in op.reads:
            last_read[value] = op_id
    change = [0] * (len(problem.operations) + 2)
    for op_id, op in enumerate(problem.operations):
        for value in op.writes:
            size = values[value].size_bytes
            if values[value].held:
                change[op_id + 1] += size
            elif last_read[value] > op_id:
                change[op_id + 1] += size
                change[last_read[value] + 1] -= size
    best, best_bytes, crossing = 0, 0, 0
    for place in range(_first_reader_of_tangents(problem) + 1):
        crossing += change[place]
        if crossing > best_bytes:
            best, best_bytes = place, crossing
    return best


def turned(problem: Problem) -> Turned:
    """Return the problem with a forward and a backward."""
    if not is_plain(problem):
        return Turned(problem=problem, training=problem, plain=False)
    place = turn(problem)
    training = replace(
        problem,
        operations=tuple(
            replace(op, phase=Phase.FORWARD) if op_id < place else op
            for op_id, op in enumerate(problem.operations)
        ),
        # Nothing crosses a boundary here, so nothing is limited by one.
        values=tuple(replace(value, savable=True) for value in problem.values),
        save_seconds_per_byte=0.0,
        between_bytes=0,
    )
    return Turned(problem=problem, training=training, plain=True)


def _first_reader_of_tangents(problem: Problem) -> int:
    for op_id, op in enumerate(problem.operations):
        if any(problem.values[v].origin is Origin.TANGENT for v in op.reads):
            return op_id
    return len(problem.operations)
