"""Symbolic sizes as plain sympy expressions, and what is known of their symbols.

Dynamo names a size that may change by a symbol. torch writes integer arithmetic on
symbols with functions of its own (``FloorDiv``, ``CleanDiv``, ...), whose text nobody
else can read; here they become sympy's. No guard is ever added.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import sympy
import torch

from gcpass.errors import GcpassError
from gcpass.size_function import MOST_SIZE

# Also private or unstable, read on torch 2.13.0: `SymInt.node.expr` and
# `.shape_env`, `ShapeEnv.var_to_sources`, `.bound_sympy`, `.create_symintnode`.

__all__ = ["InexpressibleError", "SymbolFacts", "Symbolic", "plain"]
__all__ += ["shape_env_of", "symbol_facts"]

Symbolic: TypeAlias = Any
"""A number of a graph with dynamic shapes: an int or, where it depends on a symbol, a
`sympy.Expr` (sympy ships no types)."""


MOST_DENOMINATOR = 2**10
"""Of a fraction that floating point multiplies a size by without rounding."""


class InexpressibleError(GcpassError):
    """A size is no function of symbols that sympy has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SymbolFacts:
    """What torch knows of a symbol.

    Attributes:
        source: where it comes from ("L['x'].size()[0]"); "" for one that only running
            the program tells.
        least: its known lower bound, None without one.
        most: its known upper bound, None without one.
    """

    source: str
    least: int | None
    most: int | None


def symbol_facts(symbol: Any, shape_env: Any) -> SymbolFacts:
    """Return what is known of a symbol.

    Args:
        symbol: a `sympy.Symbol`.
        shape_env: the `ShapeEnv` that made it.
    """
    names = [source.name for source in shape_env.var_to_sources.get(symbol, ())]
    texts = [name if isinstance(name, str) else name() for name in names]
    bounds = shape_env.bound_sympy(symbol)
    return SymbolFacts(
        source=texts[0] if texts else "",
        least=_finite(bounds.lower),
        most=_finite(bounds.upper),
    )


def _finite(bound: Any) -> int | None:
    """Return a bound as an int; torch's infinities are no `Integer` or very large."""
    if not isinstance(bound, int | sympy.Integer) or abs(bound) >= MOST_SIZE:
        return None
    return int(bound)


def shape_env_of(tensors: Iterable[torch.Tensor]) -> Any:
    """Return the `ShapeEnv` of the first symbolic size, None if there is none."""
    for tensor in tensors:
        for size in (*tensor.shape, *_strides(tensor)):
            if isinstance(size, torch.SymInt) and not size.node.is_nested_int():
                return size.node.shape_env
    return None


def _strides(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.stride() if tensor.layout is torch.strided else ()


@lru_cache(maxsize=4096)
def plain(expression: Any) -> Any:
    """Return torch's expression with sympy's own functions.

    Raises:
        InexpressibleError: it has a function that sympy lacks, or scales by a fraction
            that floating point holds in part only, so that torch rounds.
    """
    if isinstance(expression, sympy.Symbol | sympy.Rational):
        return expression
    if isinstance(expression, sympy.Float):  # a scale factor
        return _fraction(float(expression))
    build = _FUNCTIONS.get(type(expression).__name__)
    if build is None:
        raise InexpressibleError(f"{expression} is no function that gcpass can write")
    return build(*map(plain, expression.args))


def _fraction(number: float) -> Any:
    if not math.isfinite(number) or number.as_integer_ratio()[1] > MOST_DENOMINATOR:
        raise InexpressibleError(
            f"sizes scaled by a fraction that binary numbers do not hold ({number:.6g})"
        )
    return sympy.Rational(number)


def _floor_quotient(a: Any, b: Any) -> Any:
    return sympy.floor(a / b)


# By name: torch moved and renamed these classes between releases. Sizes are not
# negative, so that truncating is rounding down.
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "Add": sympy.Add,
    "Mul": sympy.Mul,
    "Pow": sympy.Pow,
    "Max": sympy.Max,
    "Min": sympy.Min,
    "Mod": sympy.Mod,
    "floor": sympy.floor,
    "ceiling": sympy.ceiling,
    "FloorDiv": _floor_quotient,
    "CleanDiv": _floor_quotient,
    "CeilDiv": lambda a, b: sympy.ceiling(a / b),
    "IntTrueDiv": lambda a, b: a / b,
    "FloatTrueDiv": lambda a, b: a / b,
    "PythonMod": sympy.Mod,
    "ModularIndexing": lambda a, b, n: sympy.Mod(sympy.floor(a / b), n),
    "PowByNatural": sympy.Pow,
    "CeilToInt": sympy.ceiling,
    "FloorToInt": sympy.floor,
    "TruncToInt": sympy.floor,
    "Identity": lambda a: a,
    "ToFloat": lambda a: a,
}
