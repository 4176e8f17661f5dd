"""The largest of many sums of symbolic sizes, written with the few that can be it.

A step has thousands of moments, and at each the bytes alive are a sum of sizes. Sizes
are integer combinations of a few terms (products of symbols, rounded quotients), so a
moment is a vector of integers, and the peak is the largest of these vectors' values.

Left out is a vector that another one exceeds everywhere: every coefficient is at least
as large, after each symbol is replaced by its least value plus a number that is not
negative. Left out is also what a mixture of two others exceeds so, since a mixture is
never above both: between the layers of a network bytes change by equal amounts, and
only the first and the last of such moments can be the peak. Others that never are the
peak may stay: finding all is a linear program for each, with rounding.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache
from typing import Any, TypeAlias

import numpy
import sympy

from gcpass.errors import GcpassError
from gcpass.size_function import MOST_SIZE, Bounds, SizeFunction, size_function
from gcpass.symbols import Symbolic

__all__ = ["Box", "Terms", "largest_sums"]

Box: TypeAlias = Mapping[str, tuple[int | None, int]]
"""Of each symbol the least value, None if unknown, and the planned one."""

_Row: TypeAlias = tuple[int, ...]

MOST_MIXED = 8
"""Symbols up to which mixtures are looked at: beyond, few sums are mixtures."""

MOST_PAIRS = 20_000
"""Mixtures to look at: about a third of a second's work. Rows after that stay."""

MOST_COMPARED = 50_000_000
"""Coefficients to compare: about a fifth of a second's work."""

MOST_COLUMNS = 500
"""Terms of the sums."""

MOST_WRITTEN = 6_000
"""Terms of all sums that are left, together: about half a second's work."""

_SCALES = tuple(Fraction(4) ** power for power in range(-3, 5))
"""Of the planned sizes: where the largest sum is looked for first."""


@lru_cache(maxsize=4096)
def coefficients(expression: Symbolic) -> tuple[tuple[Any, int], ...]:
    """Return an expression as terms with integer coefficients, in a fixed order."""
    expanded = sympy.expand(expression)
    found = expanded.as_coefficients_dict()
    if not all(number.is_Integer for number in found.values()):
        return ((expanded, 1),)
    items = ((term, int(number)) for term, number in found.items() if number)
    return tuple(sorted(items, key=lambda item: str(item[0])))


@dataclass(slots=True)
class Terms:
    """Numbers the terms of expressions, so that each expression is a vector."""

    number: dict[Any, int] = field(default_factory=dict)

    def add(self, expressions: Iterable[Symbolic]) -> None:
        """Take the terms of some expressions in; vectors made before stay short.

        Raises:
            GcpassError: there are more than `MOST_COLUMNS`.
        """
        for expression in expressions:
            for term, _ in coefficients(expression):
                self.number.setdefault(term, len(self.number))
        if len(self.number) > MOST_COLUMNS:
            raise GcpassError(f"sums of {len(self.number)} terms are too long to write")

    def vector(self, expression: Symbolic) -> Any:
        """Return the coefficients of an expression, int64 of shape (terms,)."""
        vector = numpy.zeros(len(self.number), dtype=numpy.int64)
        for term, coefficient in coefficients(expression):
            vector[self.number[term]] += coefficient
        return vector

    def sum_of(self, row: Sequence[int]) -> Symbolic:
        """Return the expression that a vector stands for."""
        terms = zip(row, self.number, strict=True)
        return sympy.Add(*(int(n) * term for n, term in terms))


def largest_sums(terms: Terms, rows: Any, box: Box) -> list[Symbolic]:
    """Return expressions whose largest is the largest of all rows, for all sizes.

    Args:
        terms: of the columns.
        rows: int64 of shape (moments, terms).
        box: of every symbol.

    Returns:
        Expressions, that of the largest value at the planned sizes first.

    Raises:
        GcpassError: there are too many.
    """
    basis = _Basis.shifted(list(terms.number), box)
    found = {basis.row(row): tuple(map(int, row)) for row in numpy.unique(rows, axis=0)}
    front = _undominated(sorted(found, key=lambda row: (-sum(row), row)))
    kept = front
    if len(box) <= MOST_MIXED:
        kept = _without_mixtures(front, basis.extremes(front, box))
    written = sum(1 for row in kept for n in found[row] if n)
    if written > MOST_WRITTEN:
        raise GcpassError(f"{len(kept)} sums, any of which may be the peak")
    at_plan = basis.values({name: planned for name, (_, planned) in box.items()})
    kept.sort(key=lambda row: (-_dot(row, at_plan), row))
    return [terms.sum_of(found[row]) for row in kept]


@dataclass(frozen=True, slots=True)
class _Basis:
    """Terms that are not negative, over how far symbols are above their least value.

    Attributes:
        functions: one for each term.
        matrix: ints of shape (terms of the rows, terms here).
        signed: positions of terms that may be negative after all: they come a second
            time with the other sign, so that only equal coefficients compare.
        least: of each symbol, 0 where unknown.
    """

    functions: tuple[SizeFunction, ...]
    matrix: Any
    signed: tuple[int, ...]
    least: Mapping[str, int]

    @staticmethod
    def shifted(terms: Sequence[Any], box: Box) -> _Basis:
        symbols = {s for term in terms for s in term.free_symbols}
        least = {name: bound or 0 for name, (bound, _) in box.items()}
        higher = {s: s + least[s.name] for s in symbols}
        shifted = [coefficients(term.xreplace(higher)) for term in terms]
        new = Terms()
        new.add(term.xreplace(higher) for term in terms)
        matrix = numpy.zeros((len(terms), len(new.number)), dtype=object)
        for position, items in enumerate(shifted):
            for term, coefficient in items:
                matrix[position, new.number[term]] += coefficient
        functions = tuple(size_function(str(term)) for term in new.number)
        ranges: dict[str, Bounds] = {
            name: (0 if bound is not None else -MOST_SIZE, MOST_SIZE)
            for name, (bound, _) in box.items()
        }
        signed = [i for i, f in enumerate(functions) if _may_be_negative(f, ranges)]
        return _Basis(functions, matrix, tuple(signed), least)

    def row(self, row: Any) -> _Row:
        """Return a vector of the rows' terms as one of these, signed ones twice."""
        moved = [int(n) for n in row.astype(object) @ self.matrix]
        return tuple(moved + [-moved[i] for i in self.signed])

    def values(self, sizes: Mapping[str, int]) -> list[int]:
        """Return the terms' values, those of signed ones once."""
        above = {name: size - self.least[name] for name, size in sizes.items()}
        return [function.at(above) for function in self.functions]

    def extremes(self, rows: Sequence[_Row], box: Box) -> list[_Row]:
        """Return rows that are the largest somewhere, in the order of `rows`."""
        planned = {name: number for name, (_, number) in box.items()}
        found: set[_Row] = set()
        for scale, moved in itertools.product(_SCALES, [*planned, None]):
            sizes = {
                name: max(self.least[name], int(number * scale))
                if moved in (name, None)
                else number
                for name, number in planned.items()
            }
            values = self.values(sizes)
            found.add(max(rows, key=lambda row: _dot(row, values)))
        return [row for row in rows if row in found]


def _may_be_negative(function: SizeFunction, ranges: Mapping[str, Bounds]) -> bool:
    try:
        return function.within(ranges)[0] < 0
    except GcpassError:  # a divisor may be 0
        return True


def _dot(row: _Row, values: Sequence[int]) -> int:
    """Return a row's value; its second columns of signed terms are left over."""
    return sum(n * value for n, value in zip(row, values, strict=False))


def _undominated(rows: Sequence[_Row]) -> list[_Row]:
    """Return the rows that no other one reaches in every column.

    Args:
        rows: distinct, descending by their sum, so that none exceeds an earlier one.

    Raises:
        GcpassError: that is too much work.
    """
    front: list[_Row] = []
    largest = max((abs(n) for row in rows for n in row), default=0)
    table = numpy.array(rows, dtype=numpy.int64 if largest < MOST_SIZE else object)
    compared = 0
    kept = numpy.zeros(len(rows), dtype=bool)
    for position, row in enumerate(table):
        compared += len(front) * len(row)
        if compared > MOST_COMPARED:
            raise GcpassError(f"{len(rows)} sums of {len(row)} terms to compare")
        if not (table[kept] >= row).all(axis=1).any():
            kept[position] = True
            front.append(rows[position])
    return front


def _without_mixtures(rows: Sequence[_Row], extremes: Sequence[_Row]) -> list[_Row]:
    """Return rows without those that a mixture of two others exceeds.

    Most are left out by what is the largest somewhere, so that the pairs are few.
    """
    pairs_left = MOST_PAIRS

    def is_between(row: _Row, others: Sequence[_Row]) -> bool:
        nonlocal pairs_left
        for pair in itertools.combinations(others, 2):
            pairs_left -= 1
            if pairs_left < 0:
                return False
            if _is_mixed(row, *pair):
                return True
        return False

    kept = list(extremes)
    for row in rows:
        if row not in extremes and not is_between(row, kept):
            kept.append(row)
    for row in kept[len(extremes) :]:
        others = [other for other in kept if other is not row]
        if is_between(row, others):
            kept = others
    return kept


def _is_mixed(row: _Row, first: _Row, second: _Row) -> bool:
    """Whether x first + (1 - x) second reaches a row everywhere for one x in [0, 1]."""
    low, high = Fraction(0), Fraction(1)
    for wanted, one, other in zip(row, first, second, strict=True):
        gain, short = one - other, wanted - other
        if gain > 0:
            low = max(low, Fraction(short, gain))
        elif gain < 0:
            high = min(high, Fraction(short, gain))
        elif short > 0:
            return False
        if low > high:
            return False
    return True
