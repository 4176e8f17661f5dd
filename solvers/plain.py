"""Plain sequences: the problem of published instances, its peak and its budgets.

Benchmarks for rematerialization are graphs of nodes with one result each, a size and
a time per node, and an initial order; the joint graph is one sequence, without a
boundary. While step j runs, the bytes alive are the result of j and every earlier
result whose last use before its own next computation is at a step >= j; a result
without readers lives during its own step only; weights and inputs count 0. That is
`gcpass.solvers.liveness` for operations of `Phase.BACKWARD` with boundary 0. The budget
of a fraction f is ceil(f * peak of the given order).

Sources: M. Gagrani et al., "Neural Topological Ordering for Computation Graphs", 2022,
arXiv:2207.05899; B. Bartan et al., "MOCCASIN", 2023, arXiv:2304.14463, section 4.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from fractions import Fraction

from gcpass.solvers.bound import given_order
from gcpass.solvers.errors import InvalidProblemError
from gcpass.solvers.liveness import simulate
from gcpass.solvers.problem import Operation, Origin, Phase, Problem, Value, ValueId


def plain_sequence(
    sizes_bytes: Sequence[int],
    costs_seconds: Sequence[float],
    edges: Iterable[tuple[int, int]],
    order: Sequence[int],
) -> Problem:
    """Return the problem of a graph; operation i is the i-th node of the order.

    Args:
        sizes_bytes: by node, of its result.
        costs_seconds: by node, of one execution; any unit, kept as it is.
        edges: (node that produces, node that reads); repeated ones count once.
        order: every node once, producers before readers.

    Raises:
        InvalidProblemError: the order is no order of the nodes, or an edge goes
            against it, as one of every cycle does.
    """
    count = len(sizes_bytes)
    position = {node: i for i, node in enumerate(order)}
    if len(order) != count or position.keys() != set(range(count)):
        raise InvalidProblemError(
            f"the order names {len(position)} different nodes in {len(order)} places; "
            f"each of the {count} nodes belongs there once"
        )
    reads: list[set[int]] = [set() for _ in order]
    for source, target in edges:
        if source not in position or target not in position:
            raise InvalidProblemError(f"edge ({source}, {target}): no such node")
        if position[source] >= position[target]:
            raise InvalidProblemError(
                f"node {target} reads node {source} but comes first in the order "
                "(or the graph has a cycle)"
            )
        reads[position[target]].add(position[source])
    return Problem(
        operations=tuple(
            Operation(
                reads=tuple(map(ValueId, sorted(reads[i]))),
                writes=(ValueId(i),),
                cost_seconds=float(costs_seconds[node]),
                phase=Phase.BACKWARD,
            )
            for i, node in enumerate(order)
        ),
        values=tuple(Value(size_bytes=sizes_bytes[node]) for node in order),
    )


def joint_sequence(problem: Problem) -> Problem:
    """Return a training problem as a plain sequence, in the form of published graphs.

    All results of an operation become one. Before the first operation that reads a
    tangent stands a loss: it costs nothing, reads what the last forward operation
    wrote and writes the tangents. Inputs take no bytes and vanish; what is held ends
    with its last reader; workspace, fusion and marks that forbid to save or to
    recompute have no counterpart and are dropped.
    """
    tangents = [v for v, data in enumerate(problem.values) if _is_tangent(data)]
    node_of: dict[int, int] = {}
    sizes: list[int] = []
    costs: list[float] = []
    edges: list[tuple[int, int]] = []
    last: tuple[ValueId, ...] = ()
    for op in problem.operations:
        if any(_is_tangent(problem.values[v]) and v not in node_of for v in op.reads):
            loss = len(sizes)
            sizes.append(sum(problem.values[v].size_bytes for v in tangents))
            costs.append(0.0)
            edges += [(node_of[v], loss) for v in last]
            node_of.update((v, loss) for v in tangents)
        node = len(sizes)
        edges += [(node_of[v], node) for v in op.reads if v in node_of]
        node_of.update((v, node) for v in op.writes)
        sizes.append(sum(problem.values[v].size_bytes for v in op.writes))
        costs.append(op.cost_seconds)
        last = op.writes if op.phase is Phase.FORWARD else last
    return plain_sequence(sizes, costs, edges, range(len(sizes)))


def given_peak_bytes(problem: Problem) -> int:
    """Return the peak of the given order, every needed operation executed once."""
    sequence, boundary = given_order(problem)
    return simulate(problem, sequence, boundary).peak_bytes


def budget_of(problem: Problem, fraction: float) -> int:
    """Return ceil(fraction * peak of the given order), in bytes.

    The fraction counts as it is written: 0.55 of 100 bytes are 55, although the float
    0.55 is a little more than 55/100.

    Raises:
        InvalidProblemError: the fraction is not in (0, 1].
    """
    if not 0.0 < fraction <= 1.0:
        raise InvalidProblemError(f"budget fraction {fraction!r} is not in (0, 1]")
    return math.ceil(Fraction(repr(float(fraction))) * given_peak_bytes(problem))


def _is_tangent(value: Value) -> bool:
    return value.origin is Origin.TANGENT
