"""The largest of many sums: few are left, in bounded time."""

from __future__ import annotations

import time
from typing import Any

import numpy
import pytest
import sympy

from gcpass.errors import GcpassError
from gcpass.peak_terms import Box, Terms, largest_sums
from gcpass.size_function import size_function

PLANNED = 4096


def symbol(position: int) -> Any:
    return sympy.Symbol(f"u{position}", integer=True)


def experts(count: int, least: int | None) -> tuple[Terms, Any, Box]:
    """Return the moments of a step that has one size per expert."""
    sizes = [4 * symbol(i) for i in range(count)]
    terms = Terms()
    terms.add([1, *sizes])
    alive = terms.vector(1000)
    rows = []
    for size in sizes:
        vector = terms.vector(size)
        rows += [alive + n * vector for n in (1, 3, 2)]
        alive = alive + vector
    for size in reversed(sizes):
        vector = terms.vector(size)
        rows += [alive + n * vector for n in (2, 4, 1)]
        alive = alive - vector + terms.vector(16)
    return terms, numpy.array(rows), {f"u{i}": (least, PLANNED) for i in range(count)}


@pytest.mark.parametrize("least", [0, None])
@pytest.mark.parametrize("count", [4, 12, 40])
def test_the_largest_is_among_those_left(count: int, least: int | None) -> None:
    terms, rows, box = experts(count, least)
    started = time.monotonic()
    sums = largest_sums(terms, rows, box)
    assert time.monotonic() - started < 2.0
    for large in range(0, count, 3):
        values = {f"u{i}": 9 + 99 * (i == large) for i in range(count)}
        at = [size_function(str(term)).at(values) for term in terms.number]
        found = max(size_function(str(s)).at(values) for s in sums)
        assert found == max(rows @ numpy.array(at))


def test_too_many_are_refused() -> None:
    started = time.monotonic()
    with pytest.raises(GcpassError, match="sums, any of which may be the peak"):
        largest_sums(*experts(128, 0))
    with pytest.raises(GcpassError, match="sums of 601 terms are too long"):
        largest_sums(*experts(600, 0))
    assert time.monotonic() - started < 4.0
