"""Functions of symbolic sizes as text: exact at numbers, bounded between them.

The text is what sympy prints and reads: integers, symbols, ``+ - * / **``, ``Max``,
``Min``, ``Mod``, ``floor``, ``ceiling`` and ``KroneckerDelta``. Here it is evaluated by
itself: sympy's reader runs the text as a program, which a file should not be able to
ask for, and a search needs bounds on whole ranges.

Divisors are positive, exponents whole numbers: anything else is an error.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import TypeAlias

from gcpass.errors import GcpassError

__all__ = ["MOST_EFFORT", "MOST_SIZE", "Bounds", "SizeFunction", "largest_value"]
__all__ += ["size_function"]

Number: TypeAlias = int | Fraction
Bounds: TypeAlias = tuple[Number, Number]
"""The least and the largest value, both included."""

MOST_SIZE = 2**62
"""Taken for infinity: no size reaches it."""

MOST_EFFORT = 1_000_000
"""Parts of a text that a search looks at before it gives up: about a second's work."""


@dataclass(frozen=True, slots=True)
class SizeFunction:
    """A function of symbols, see the module docstring."""

    tree: ast.expr

    def at(self, values: Mapping[str, int]) -> int:
        """Return the function's value where every symbol has one.

        Raises:
            KeyError: a symbol has no value.
            GcpassError: there is no whole number there.
        """
        value, _ = self.within({name: (n, n) for name, n in values.items()})
        if value != int(value):
            raise GcpassError(f"no whole number: {value}")
        return int(value)

    def within(self, box: Mapping[str, Bounds]) -> Bounds:
        """Return bounds on the function where every symbol has bounds.

        They are attained where each symbol occurs in growing terms only, and where all
        symbols have one value.

        Raises:
            KeyError: a symbol has no bounds.
            GcpassError: a divisor may be 0 or less, an exponent is no whole number.
        """
        return _bounds(self.tree, box)


@lru_cache(maxsize=64)
def size_function(text: str) -> SizeFunction:
    """Return the function that a text stands for.

    Raises:
        GcpassError: it is no such text.
    """
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError) as error:
        raise GcpassError(f"no function of sizes: {text[:80]!r}") from error
    for node in ast.walk(tree):
        if not _is_known(node):
            raise GcpassError(
                f"no function of sizes: {type(node).__name__} in {text[:80]!r}"
            )
    return SizeFunction(tree)


def largest_value(
    function: SizeFunction,
    name: str,
    others: Mapping[str, int],
    limit: int,
    between: tuple[int, int],
    effort: int | None = None,
) -> int | None:
    """Return the largest value of a symbol at which a function keeps to a limit.

    Ranges whose lower bound is over the limit are left out, the others halved, the
    upper half first. So it is the largest also of a function that falls somewhere; of
    one that only grows it is a bisection.

    Args:
        function: of the symbol and the others.
        name: of the symbol.
        others: values of the other symbols.
        limit: the most that the function may be.
        between: the least and the largest value that the symbol can have.
        effort: how many parts of the text to look at, counted anew for each range;
            None for `MOST_EFFORT` and at least what a bisection takes.

    Returns:
        The value, None if there is none.

    Raises:
        GcpassError: the search was given up, or see `SizeFunction.within`.
    """
    box: dict[str, Bounds] = {other: (n, n) for other, n in others.items()}
    ranges = [between]
    parts = 2 * sum(1 for _ in ast.walk(function.tree))
    left = max(MOST_EFFORT // parts, 130) if effort is None else effort // parts
    while ranges:
        left -= 1
        if left < 0:
            raise GcpassError(
                f"the search for the largest {name} was given up, it takes too long; "
                "try sizes with peak_at"
            )
        low, high = ranges.pop()
        if low > high or function.within({**box, name: (low, high)})[0] > limit:
            continue
        if function.at({**others, name: high}) <= limit:
            return high
        middle = (low + high) // 2
        ranges += [(low, min(middle, high - 1)), (middle + 1, high - 1)]
    return None


def _is_known(node: ast.AST) -> bool:
    if isinstance(node, ast.Constant):
        return type(node.value) is int
    if isinstance(node, ast.Call):
        if not isinstance(node.func, ast.Name) or node.func.id not in _CALLS:
            return False
        wanted = _ARGUMENTS.get(node.func.id, max(1, len(node.args)))
        return not node.keywords and len(node.args) == wanted
    return isinstance(node, _NODES) or type(node) in _OPERATORS


def _bounds(node: ast.expr, box: Mapping[str, Bounds]) -> Bounds:
    if isinstance(node, ast.Constant):
        assert isinstance(node.value, int)
        return node.value, node.value
    if isinstance(node, ast.Name):
        return box[node.id]
    if isinstance(node, ast.UnaryOp):
        low, high = _bounds(node.operand, box)
        return -high, -low
    if isinstance(node, ast.BinOp):
        return _bounds_of_chain(node, box)
    assert isinstance(node, ast.Call)
    assert isinstance(node.func, ast.Name)
    return _CALLS[node.func.id](*(_bounds(argument, box) for argument in node.args))


def _bounds_of_chain(node: ast.expr, box: Mapping[str, Bounds]) -> Bounds:
    """Return the bounds of ``a + b + ...`` without a call for each sign."""
    rest: list[ast.BinOp] = []
    while isinstance(node, ast.BinOp):
        rest.append(node)
        node = node.left
    found = _bounds(node, box)
    for step in reversed(rest):
        found = _OPERATORS[type(step.op)](found, _bounds(step.right, box))
    return found


def _add(a: Bounds, b: Bounds) -> Bounds:
    return a[0] + b[0], a[1] + b[1]


def _subtract(a: Bounds, b: Bounds) -> Bounds:
    return a[0] - b[1], a[1] - b[0]


def _multiply(a: Bounds, b: Bounds) -> Bounds:
    corners = (a[0] * b[0], a[0] * b[1], a[1] * b[0], a[1] * b[1])
    return min(corners), max(corners)


def _divide(a: Bounds, b: Bounds) -> Bounds:
    _check_divisor(b)
    return _multiply(a, (1 / Fraction(b[1]), 1 / Fraction(b[0])))


def _check_divisor(b: Bounds) -> None:
    if b[0] <= 0:
        raise GcpassError(f"no function of sizes: a divisor that may be {b[0]}")


def _power(a: Bounds, b: Bounds) -> Bounds:
    if b[0] != b[1]:  # sizes do not grow exponentially
        raise GcpassError("no function of sizes: an exponent that depends on one")
    exponent = int(b[0])
    if exponent != b[0]:
        raise GcpassError(f"no function of sizes: {b[0]} as an exponent")
    if exponent < 0:
        return _divide((1, 1), _power(a, (-exponent, -exponent)))
    corners = (a[0] ** exponent, a[1] ** exponent)
    inside = [0] if a[0] < 0 < a[1] else []
    return min(*corners, *inside), max(*corners, *inside)


def _floor(a: Bounds) -> Bounds:
    return math.floor(a[0]), math.floor(a[1])


def _ceiling(a: Bounds) -> Bounds:
    return math.ceil(a[0]), math.ceil(a[1])


def _most(*many: Bounds) -> Bounds:
    return max(low for low, _ in many), max(high for _, high in many)


def _least(*many: Bounds) -> Bounds:
    return min(low for low, _ in many), min(high for _, high in many)


def _remainder(a: Bounds, b: Bounds) -> Bounds:
    _check_divisor(b)
    divisor = b[1]
    if b[0] == b[1] and a[0] // divisor == a[1] // divisor:
        return a[0] % divisor, a[1] % divisor
    return 0, divisor


def _equal(a: Bounds, b: Bounds) -> Bounds:
    if a[0] == a[1] == b[0] == b[1]:
        return 1, 1
    return (0, 0) if a[1] < b[0] or b[1] < a[0] else (0, 1)


_OPERATORS: dict[type[ast.AST], Callable[[Bounds, Bounds], Bounds]] = {
    ast.Add: _add,
    ast.Sub: _subtract,
    ast.Mult: _multiply,
    ast.Div: _divide,
    ast.Pow: _power,
}
_NODES = (ast.Name, ast.Load, ast.BinOp, ast.UnaryOp, ast.USub)
_ARGUMENTS = {"Mod": 2, "floor": 1, "ceiling": 1, "KroneckerDelta": 2}
_CALLS: dict[str, Callable[..., Bounds]] = {
    "Max": _most,
    "Min": _least,
    "Mod": _remainder,
    "floor": _floor,
    "ceiling": _ceiling,
    "KroneckerDelta": _equal,
}
