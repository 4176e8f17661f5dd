"""What a plan needs as functions of the graph's symbols: sizes, FLOPs, the peak.

A plan is made for the sizes seen first and runs for others. Which values are alive at
which moment does not depend on sizes, except that a kernel writes in place only where
sizes are equal; so the peak of the plan is the largest of some sums of sizes.

Not known as functions, and taken to grow with the bytes that their operation reads and
writes: workspaces, on a line through what is measured at the planned sizes and with
every symbol doubled, and FLOPs of an operator without a formula or whose formula takes
numbers only, in proportion. The room left for a loss outside of the region grows in
proportion to the tangents. Where two values of different expressions have equal sizes,
one is counted as written in the other's memory only if that is so at the planned sizes,
too: at others the peak can be less.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from string import digits
from typing import Any

import numpy
import sympy

from gcpass.capture import Capture
from gcpass.decisions import FUNCTION_ERRORS, PlannedSymbol
from gcpass.errors import GcpassError
from gcpass.flops import node_flops_at, op_names, symbolic_flops, user_formulas
from gcpass.peak_terms import Box, Terms, largest_sums
from gcpass.size_function import size_function
from gcpass.sizes import (
    IntLike,
    Reader,
    ceil_div,
    expression,
    hint_int,
    symbolic_storage_bytes,
    tensors_in,
)
from gcpass.solvers.liveness import Instance, Profile
from gcpass.solvers.problem import Operation, Origin, Plan, Problem
from gcpass.symbols import InexpressibleError, Symbolic, shape_env_of, symbol_facts
from gcpass.torch_private import HigherOrderOperator
from gcpass.workspace import node_workspace

__all__ = ["PlanFunctions", "peak_function", "plan_functions", "sizes_and_flops"]

log = logging.getLogger(__name__)

MOST_MEASURED_BYTES = 2**30
"""Read and written by an operation that is run to measure its workspace once more."""


_SCALES = (2, 3, 16)
"""Of the planned sizes: where a user's formula of FLOPs is asked again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFunctions:
    """A plan's numbers as text, functions of symbols: see `gcpass.size_function`.

    Attributes:
        symbols: in the order of their numbers, () for static shapes.
        peak_bytes: of the plan, "" where it is unknown.
        flops: of one step, "" where they are unknown.
        value_bytes: of each value, "" where no symbol decides.
        operation_flops: of one execution of each operation, likewise.
        note: why functions are unknown, "" where they are not.
    """

    symbols: tuple[PlannedSymbol, ...] = ()
    peak_bytes: str = ""
    flops: str = ""
    value_bytes: tuple[str, ...]
    operation_flops: tuple[str, ...]
    note: str = ""


def plan_functions(
    captured: Capture, plan: Plan, profile: Profile, peak_bytes: int
) -> PlanFunctions:
    """Return a plan's numbers as functions of symbols.

    Args:
        captured: the problem.
        plan: of that problem.
        profile: of that plan.
        peak_bytes: of that plan, at the planned sizes.
    """
    problem = captured.problem
    constant = PlanFunctions(
        value_bytes=("",) * len(problem.values),
        operation_flops=("",) * len(problem.operations),
    )
    shape_env = shape_env_of(t for m in captured.value_metas for t in tensors_in(m))
    if shape_env is None:
        flops = sum(problem.operations[op_id].flops for op_id in plan.sequence)
        return replace(constant, peak_bytes=str(peak_bytes), flops=str(flops))
    try:
        found = _functions(captured, plan, profile, shape_env)
        _check_peak(found, peak_bytes)
    except FUNCTION_ERRORS as error:  # what only informs must not end a compile
        log.debug("no functions of sizes", exc_info=True)
        note = str(error) if isinstance(error, GcpassError) else repr(error)
        return replace(constant, note=note)
    return found


def _check_peak(functions: PlanFunctions, peak_bytes: int) -> None:
    """Check that the peak as a function is the plan's at the planned sizes.

    Raises:
        GcpassError: it is not.
    """
    planned = {symbol.name: symbol.planned for symbol in functions.symbols}
    found = size_function(functions.peak_bytes).at(planned)
    if found != peak_bytes:
        raise GcpassError(f"the function says {found} at the planned sizes")


def sizes_and_flops(
    captured: Capture, shape_env: Any
) -> tuple[list[Symbolic], list[Symbolic], dict[Any, int]]:
    """Return every value's bytes and every operation's FLOPs as functions of symbols.

    Args:
        captured: the problem, whose numbers the functions give at the hints.
        shape_env: of its symbols.

    Returns:
        Bytes by value, FLOPs of one execution by operation, and the value that each
        symbol was planned for.

    Raises:
        InexpressibleError: a size has no such function.
    """
    problem = captured.problem
    sizes = [_number(symbolic_storage_bytes(meta)) for meta in captured.value_metas]
    flops = _flops(captured)
    symbols = _symbols((*sizes, *flops))
    planned = {
        symbol: hint_int(shape_env.create_symintnode(symbol, hint=None))
        for symbol in symbols
    }
    at_plan = _evaluated((*sizes, *flops), planned)
    for value, size in enumerate(sizes):
        if at_plan[size] != problem.values[value].size_bytes:
            raise InexpressibleError(
                f"torch guesses the size of {_name(captured, value)}, which only "
                f"running the program tells ({size} bytes), otherwise than its symbols "
                "one by one"
            )
    branching = _branching(captured, flops, planned)
    for op_id, operation in enumerate(problem.operations):
        known = at_plan[flops[op_id]] == operation.flops
        if not known or op_id in branching:
            touched, now = _touched(problem, sizes, operation)
            flops[op_id] = _in_proportion(operation.flops, touched, now)
    return sizes, flops, planned


def _functions(
    captured: Capture, plan: Plan, profile: Profile, shape_env: Any
) -> PlanFunctions:
    problem = captured.problem
    sizes, flops, planned = sizes_and_flops(captured, shape_env)
    workspaces = _workspaces(captured, sizes, planned)
    facts = {symbol: symbol_facts(symbol, shape_env) for symbol in planned}
    box: Box = {s.name: (facts[s].least, size) for s, size in planned.items()}
    return PlanFunctions(
        symbols=tuple(
            PlannedSymbol(
                name=symbol.name,
                planned=planned[symbol],
                source=fact.source,
                least=fact.least,
                most=fact.most,
            )
            for symbol, fact in facts.items()
        ),
        peak_bytes=peak_function(problem, plan, profile, sizes, workspaces, box),
        flops=str(_total(flops[op_id] for op_id in plan.sequence)),
        value_bytes=tuple(map(_text, sizes)),
        operation_flops=tuple(map(_text, flops)),
    )


def _name(captured: Capture, value: int) -> str:
    """Return the name of a node with a value's storage."""
    names = (node.name for node, root in captured.root.items() if root == value)
    return next(names, f"value {value}")


# --- sizes and FLOPs ------------------------------------------------------------------


def _number(expression: Symbolic | None) -> Symbolic | None:
    """Return an expression, sympy's integers as Python's."""
    return int(expression) if isinstance(expression, sympy.Integer) else expression


def _symbols(expressions: Iterable[Symbolic]) -> list[Any]:
    """Return the symbols in some expressions, s2 before s10."""
    distinct = {e for e in expressions if isinstance(e, sympy.Expr)}
    found = {symbol for e in distinct for symbol in e.free_symbols}
    return sorted(found, key=lambda s: (s.name.rstrip(digits), len(s.name), s.name))


def _evaluated(
    expressions: Iterable[Symbolic | None], planned: Mapping[Any, int]
) -> dict[Symbolic | None, int | None]:
    """Return the value of each distinct expression, None of None."""
    numbers = {symbol: sympy.Integer(size) for symbol, size in planned.items()}
    return {
        e: int(e.xreplace(numbers)) if isinstance(e, sympy.Expr) else e
        for e in dict.fromkeys(expressions)
    }


def _flops(captured: Capture) -> list[Symbolic]:
    """Return the FLOPs of each operation, None where no formula gives them."""
    return [
        _number(symbolic_flops(node)) if operation.flops else 0
        for node, operation in zip(
            captured.op_nodes, captured.problem.operations, strict=True
        )
    ]


def _branching(
    captured: Capture, flops: Sequence[Symbolic], planned: Mapping[Any, int]
) -> set[int]:
    """Return operations whose function of FLOPs is not what their formula says.

    A user's formula may ask of a size what no symbol answers, is it even, say. It is
    asked again at other sizes; only those with a user's formula are.
    """
    formulas = user_formulas()
    if not formulas:
        return set()
    asked = {
        op_id
        for op_id, node in enumerate(captured.op_nodes)
        if flops[op_id] and _is_priced(node.target, formulas)
    }
    found: set[int] = set()
    for scale in _SCALES if asked else ():
        numbers = {symbol: scale * size for symbol, size in planned.items()}
        read = _reader(numbers)
        want = _evaluated([flops[op_id] for op_id in asked], numbers)
        found |= {
            op_id
            for op_id in asked
            if node_flops_at(captured.op_nodes[op_id], read) != want[flops[op_id]]
        }
    return found


def _is_priced(target: Any, formulas: Mapping[str, Any]) -> bool:
    """Whether a user's formula may be in an operator's FLOPs."""
    return isinstance(target, HigherOrderOperator) or any(
        name in formulas for name in op_names(target)
    )


def _reader(numbers: Mapping[Any, int]) -> Reader:
    """Return what reads a size where the symbols have these values."""
    values = {symbol: sympy.Integer(number) for symbol, number in numbers.items()}

    def read(size: IntLike) -> int:
        function = sympy.sympify(expression(size))
        if not function.free_symbols <= values.keys():  # no size, a number of the code
            return hint_int(size)
        return int(function.xreplace(values))

    return read


def _touched(
    problem: Problem, sizes: Sequence[Symbolic], operation: Operation
) -> tuple[Symbolic, int]:
    """Return the bytes that an operation reads and writes, and how many as planned."""
    values = (*operation.reads, *operation.writes)
    planned = sum(problem.values[value].size_bytes for value in values)
    return sum(sizes[value] for value in values), planned


def _in_proportion(amount: int, measure: Symbolic, planned: int) -> Symbolic:
    """Return an amount that grows with a measure, rounded up, from a planned value."""
    if not amount or not planned or isinstance(measure, int):
        return amount
    return ceil_div(amount * measure, planned)


def _total(expressions: Iterable[Symbolic]) -> Symbolic:
    given = list(expressions)
    terms = Terms()
    terms.add(given)
    vectors = {e: terms.vector(e).astype(object) for e in dict.fromkeys(given)}
    return terms.sum_of(sum(vectors[e] for e in given)) if given else 0


@lru_cache(maxsize=4096)
def _text(expression: Symbolic) -> str:
    # The cache takes equal numbers of both kinds for one.
    return "" if isinstance(expression, int | sympy.Integer) else str(expression)


# --- the peak -------------------------------------------------------------------------


def _workspaces(
    captured: Capture, sizes: Sequence[Symbolic], planned: Mapping[Any, int]
) -> list[Symbolic]:
    """Return the workspace of each operation."""
    doubled = {symbol: sympy.Integer(2 * size) for symbol, size in planned.items()}
    read = _reader(doubled)
    found: list[Symbolic] = []
    for op_id, operation in enumerate(captured.problem.operations):
        amount = operation.workspace_bytes
        if amount:
            touched, now = _touched(captured.problem, sizes, operation)
            then = int(sympy.sympify(touched).xreplace(doubled))
            if now < then <= MOST_MEASURED_BYTES:
                more = node_workspace(captured.op_nodes[op_id], read) - amount
                amount = _line(amount, max(0, more), touched, now, then)
            else:
                amount = _in_proportion(amount, touched, now)
        found.append(amount)
    return found


def _line(
    amount: int, more: int, measure: Symbolic, planned: int, then: int
) -> Symbolic:
    """Return an amount that grows by ``more`` while a measure goes on to ``then``."""
    line = amount + ceil_div((measure - planned) * more, then - planned)
    at_zero = amount * (then - planned) - more * planned
    return line if at_zero >= 0 else sympy.Max(0, line)


def peak_function(
    problem: Problem,
    plan: Plan,
    profile: Profile,
    sizes: Sequence[Symbolic],
    workspaces: Sequence[Symbolic],
    box: Box,
) -> str:
    """Return the peak of a plan as text, a function of symbols.

    Args:
        problem: the plan's.
        plan: of it.
        profile: of the plan.
        sizes: bytes of each value.
        workspaces: bytes of each operation.
        box: of the symbols.
    """
    sums = largest_sums(*_alive(problem, plan, profile, sizes, workspaces), box)
    texts = [str(expression) for expression in sums]
    return texts[0] if len(texts) == 1 else f"Max({', '.join(texts)})"


def _alive(
    problem: Problem,
    plan: Plan,
    profile: Profile,
    sizes: Sequence[Symbolic],
    workspaces: Sequence[Symbolic],
) -> tuple[Terms, Any]:
    """Return the bytes alive at each execution and between the two graphs.

    The definitions are those of `gcpass.solvers.liveness`, with sizes as vectors.

    Returns:
        Terms, and int64 of shape (executions + 1, terms).
    """
    length = len(plan.sequence)
    less = [
        _in_place(problem, sizes, plan.sequence[t], over)
        for t, over in enumerate(profile.overwritten)
    ]
    outside = _outside(problem, sizes)
    given = dict.fromkeys((*sizes, *workspaces, *less, outside))
    terms = Terms()
    terms.add(given)
    vectors = {e: terms.vector(e) for e in given}
    change = numpy.zeros((length + 1, len(terms.number)), dtype=numpy.int64)
    between = vectors[outside].copy()
    for instance in profile.instances:
        if instance.virtual:
            continue
        vector = vectors[sizes[instance.value]]
        if instance.start < length:
            change[instance.start] += vector
            change[instance.end + 1] -= vector
        if _crosses(problem, instance, plan.boundary):
            between += vector
    rows = change.cumsum(axis=0)
    for t, op_id in enumerate(plan.sequence):
        rows[t] += vectors[workspaces[op_id]] - vectors[less[t]]
    rows[length] = between
    return terms, rows


def _crosses(problem: Problem, instance: Instance, boundary: int) -> bool:
    """Whether an instance is there between forward and backward."""
    value = problem.values[instance.value]
    if value.origin is Origin.TANGENT:
        return True
    return instance.start < boundary and (instance.end >= boundary or value.held)


def _in_place(
    problem: Problem, sizes: Sequence[Symbolic], op_id: int, over: int | None
) -> Symbolic:
    """Return the bytes that an execution writes in the memory of another value."""
    if over is None:
        return 0
    written = sizes[problem.operations[op_id].writes[0]]
    if sympy.expand(written - sizes[over]) == 0:
        return written
    return written * sympy.KroneckerDelta(written, sizes[over])


def _outside(problem: Problem, sizes: Sequence[Symbolic]) -> Symbolic:
    """Return `between_bytes`, which grows with the tangents."""
    tangents = [
        value_id
        for value_id, value in enumerate(problem.values)
        if value.origin is Origin.TANGENT
    ]
    planned = sum(problem.values[value].size_bytes for value in tangents)
    return _in_proportion(
        problem.between_bytes, sum(sizes[value] for value in tangents), planned
    )
