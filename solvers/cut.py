"""Save or recompute as a minimum cut at one moment of the step.

A cut problem looks at one moment: the *first* execution of a pivot operation, or the
boundary between forward and backward. Some values are alive then in every plan (the
**fixed** ones); for the others that are read later a plan has a choice: the value is
alive at the moment (**saved**) or its operation is executed again (**recomputed**).
With a price `lam` per saved byte the cheapest choice is a minimum cut:

    source -> value          infinite             the value is read after the moment
    value  -> its operation  lam * size + toll    cut: saved
    operation -> sink        recompute cost       cut: recomputed
    operation -> value read  infinite             recomputing needs its reads, too

Operations with several results have one node, so they are paid once. A tangent has no
operation: its arc ends in the sink. The **toll** is the time that saving itself takes
(`Problem.saving_seconds`), infinite for what must not be saved.

What is fixed, required and paid for so that the cut is a lower bound on every plan is
proven in `gcpass.solvers.bound`. At the boundary nothing is relaxed except that
operations of `Phase.EITHER` may run on both sides for the price of one; its cheapest
cut is the saved set of the fastest plan.

Sources: the cut over saved values is that of Horace He and Shangdi Yu, "Transcending
Runtime-Memory Tradeoffs in Checkpointing by being Fusion Aware", MLSys 2023; the
price per byte and the pivot make it a Lagrangian bound (`gcpass.solvers.frontier`).
Not networkx: its flow is pure Python, 100 times slower.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gcpass.solvers.errors import SolverError
from gcpass.solvers.moment import Moment, at_boundary, at_pivot
from gcpass.solvers.problem import OpId, Problem, ValueId

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

INFINITE = 1 << 58  # capacity that no finite cut reaches; several fit in 63 bits
COST_UNITS = float(1 << 38)  # resolution of the summed recompute cost
FINITE_UNITS = float(1 << 44)  # dearer than all recompute, thousands fit in a flow
TIE_UNITS = 1 << 10  # resolution of the second goal of a lexicographic cut
_SOURCE, _SINK = 0, 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CutResult:
    """What to save and what to recompute at one price per byte.

    Attributes:
        saved: values chosen to be alive at the moment, ascending, without fixed ones.
        recomputed: operations executed (again) after the moment, ascending.
        saved_bytes: bytes of `saved`.
        cost_seconds: recompute costs and tolls of the choice, as the cut counts them.
        dual_seconds: no choice has a smaller `cost_seconds + lam * saved_bytes`
            (capacities are rounded down, so this can be a little less than its own).
    """

    saved: tuple[ValueId, ...]
    recomputed: tuple[OpId, ...]
    saved_bytes: int
    cost_seconds: float
    dual_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CutProblem:
    """The network of one moment; build it with `cut` or `boundary_cut`.

    Attributes:
        moment: what is fixed, free and required, see `gcpass.solvers.moment`.
        values: values with a choice, ascending; they have nodes 2, 3, ...
        operations: their operations, ascending, with the nodes that follow.
        sizes: bytes of `values`, int64.
        tolls: seconds to save each of `values`, float64, may be infinite.
        costs: seconds to recompute each of `operations`, float64, may be infinite.
        tails: first node of every arc, int64: one per value, one per operation, rest.
        heads: second node of every arc, int64.
    """

    moment: Moment
    values: tuple[ValueId, ...]
    operations: tuple[OpId, ...]
    sizes: IntArray
    tolls: FloatArray
    costs: FloatArray
    tails: IntArray
    heads: IntArray

    def solve(self, lam: float) -> CutResult | None:
        """Return a cheapest choice at `lam` seconds per byte, None if there is none.

        Of several cheapest choices it is the one that recomputes the fewest operations.
        """
        scale = self._cost_scale()
        saving = _units(self.sizes * lam + self.tolls, scale)
        return self._choice(saving, _units(self.costs, scale), scale)

    def fastest(self) -> CutResult | None:
        """Return the choice of least cost, with the fewest bytes among equals."""
        scale = self._cost_scale()
        per_byte = (TIE_UNITS - 1) / max(1, int(self.sizes.sum()))
        saving = _units(self.tolls, scale, TIE_UNITS)
        saving += (self.sizes * per_byte).astype(np.int64)
        paying = _units(self.costs, scale, TIE_UNITS)
        return self._choice(saving, paying, scale, TIE_UNITS)

    def least(self) -> CutResult | None:
        """Return the choice of fewest bytes (exact), with least cost among equals.

        Its `dual_seconds` is 0: nothing is proven about the cost.
        """
        unit = max(2, (1 << 56) // (int(self.sizes.sum()) + 1))
        scale = min(self._cost_scale(), (unit - 1) / self._cost_sum())
        saving = np.where(
            np.isfinite(self.tolls),
            self.sizes * unit + _units(self.tolls, scale),
            INFINITE,
        )
        return self._choice(saving, _units(self.costs, scale), math.inf)

    def _cost_sum(self) -> float:
        finite = [x[np.isfinite(x)].sum() for x in (self.costs, self.tolls)]
        return float(sum(finite)) or 1.0

    def _cost_scale(self) -> float:
        return COST_UNITS / self._cost_sum()

    def _choice(
        self, saving: IntArray, paying: IntArray, scale: float, unit: int = 1
    ) -> CutResult | None:
        rest = np.full(len(self.tails) - len(saving) - len(paying), INFINITE)
        capacities = np.minimum(np.concatenate((saving, paying, rest)), INFINITE)
        flow, reached = _min_cut(self.tails, self.heads, capacities)
        if flow >= INFINITE:
            return None
        count = len(self.values)
        value_in = reached[2 : 2 + count]
        operation_in = reached[2 + count :]
        head_in = reached[self.heads[:count]]
        saved = np.flatnonzero(value_in & ~head_in)
        again = np.flatnonzero(operation_in)
        cost = math.fsum(self.tolls[saved]) + math.fsum(self.costs[again])
        return CutResult(
            saved=tuple(self.values[i] for i in saved),
            recomputed=tuple(self.operations[i] for i in again),
            saved_bytes=int(self.sizes[saved].sum()),
            cost_seconds=cost,
            dual_seconds=flow // unit / scale,
        )


def cut(problem: Problem, pivot: OpId) -> CutProblem:
    """Return the network at the first execution of `pivot`, built in O(edges)."""
    return _network(problem, at_pivot(problem, pivot))


def boundary_cut(problem: Problem) -> CutProblem:
    """Return the network at the boundary: what is saved from forward to backward.

    Recomputing costs the operation's real seconds, and is impossible for what is not
    recomputable; the first run of an operation of `Phase.EITHER` is free. Held values
    and inputs are there anyway.
    """
    return _network(problem, at_boundary(problem))


def _units(seconds: FloatArray, scale: float, unit: int = 1) -> IntArray:
    finite = np.isfinite(seconds)
    # Rounded down: a smaller capacity only lowers the flow, so bounds stay valid.
    scaled = np.floor(np.where(finite, seconds, 0.0) * scale)
    scaled = np.minimum(scaled, FINITE_UNITS).astype(np.int64) * unit
    return np.where(finite, scaled, INFINITE)


def _network(problem: Problem, moment: Moment) -> CutProblem:
    values, operations = _with_a_choice(problem, moment)
    value_node = {value: 2 + i for i, value in enumerate(values)}
    first = 2 + len(values)
    op_node = {op: first + i for i, op in enumerate(operations)}
    arcs: list[tuple[int, int]] = []
    for value in values:
        writer = moment.writers[value]
        head = _SINK if writer is None else op_node[writer]
        arcs.append((value_node[value], head))
    arcs += [(op_node[op], _SINK) for op in operations]
    arcs += [(_SOURCE, value_node[value]) for value in moment.required]
    for op in operations:
        reads = problem.operations[op].reads
        arcs += [(op_node[op], value_node[v]) for v in reads if v in value_node]
    ends = np.array(arcs, dtype=np.int64).reshape(-1, 2)
    return CutProblem(
        moment=moment,
        values=values,
        operations=operations,
        sizes=np.array([problem.values[v].size_bytes for v in values], dtype=np.int64),
        tolls=np.array([moment.tolls[v] for v in values], dtype=np.float64),
        costs=np.array([moment.costs[op] for op in operations], dtype=np.float64),
        tails=ends[:, 0].copy(),
        heads=ends[:, 1].copy(),
    )


def _with_a_choice(
    problem: Problem, moment: Moment
) -> tuple[tuple[ValueId, ...], tuple[OpId, ...]]:
    """Return the values and operations that required values can draw on."""
    free = frozenset(moment.free)
    values: set[ValueId] = set()
    operations: set[OpId] = set()
    stack = list(moment.required)
    while stack:
        value = stack.pop()
        if value in values or value in free:
            continue
        values.add(value)
        writer = moment.writers[value]
        if writer is not None and writer not in operations:
            operations.add(writer)
            stack.extend(problem.operations[writer].reads)
    return tuple(sorted(values)), tuple(sorted(operations))


def _min_cut(
    tails: IntArray, heads: IntArray, capacities: IntArray
) -> tuple[int, npt.NDArray[np.bool_]]:
    """Return the flow (`INFINITE` if unbounded) and the nodes on the source side."""
    count = int(max(tails.max(initial=1), heads.max(initial=1))) + 1
    reached = np.zeros(count, dtype=np.bool_)
    if not (tails == _SOURCE).any():
        return 0, reached
    solver = _max_flow_solver()
    solver.add_arcs_with_capacity(tails, heads, capacities)
    status = solver.solve(_SOURCE, _SINK)
    if status == solver.POSSIBLE_OVERFLOW:
        return INFINITE, reached
    if status != solver.OPTIMAL:
        raise SolverError(f"maximum flow over {count} nodes ended with {status}")
    # The least source side of all minimum cuts: it does not depend on the flow found.
    reached[np.asarray(solver.get_source_side_min_cut(), dtype=np.int64)] = True
    return min(int(solver.optimal_flow()), INFINITE), reached


def _max_flow_solver() -> Any:
    try:
        from ortools.graph.python import max_flow
    except ImportError as error:
        raise SolverError(f"ortools is needed for minimum cuts: {error}") from error
    return max_flow.SimpleMaxFlow()
