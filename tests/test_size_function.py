"""Functions of sizes as text: their values, bounds and the largest size in a limit."""

from __future__ import annotations

import itertools

import pytest
import sympy
from hypothesis import given
from hypothesis import strategies as st

from gcpass.errors import GcpassError
from gcpass.size_function import MOST_SIZE, largest_value, size_function

TEXTS = (
    "4*s0*s1 + 1024",
    "Max(64*s0*s1**2 + 8, 512*ceiling(s0*s1/7), 3000)",
    "Min(1, s0 - 1)*(8*s0 - 6) + 2*floor(s1/s0)",
    "s0**2 - 3*s0 + 5*Mod(s0*s1, 7)",
    "512*s0 - 512*s0*KroneckerDelta(s0, s1)",
    "-(s0 - s1)*(s0 - 2) + 100",
    "ceiling(3*s0/2 - 18/5) + Max(0, 2 - s1)",
)


@pytest.mark.parametrize("text", TEXTS)
def test_values_are_sympys(text: str) -> None:
    function, theirs = size_function(text), sympy.sympify(text)
    for s0, s1 in itertools.product((1, 2, 7, 12), repeat=2):
        assert function.at({"s0": s0, "s1": s1}) == theirs.subs({"s0": s0, "s1": s1})


@pytest.mark.parametrize("text", TEXTS)
def test_bounds_hold(text: str) -> None:
    function = size_function(text)
    for low, high in ((1, 3), (2, 9), (5, 5)):
        least, most = function.within({"s0": (low, high), "s1": (2, 4)})
        for s0, s1 in itertools.product(range(low, high + 1), range(2, 5)):
            assert least <= function.at({"s0": s0, "s1": s1}) <= most


def test_bounds_of_growing_terms_are_attained() -> None:
    function = size_function("Max(4*s0*s1 + 8, 512*ceiling(s0/3))")
    box = {"s0": (2, 100), "s1": (1, 7)}
    assert function.within(box) == (512, 17408)


@given(
    text=st.sampled_from(TEXTS),
    s1=st.integers(1, 9),
    limit=st.integers(-50, 9000),
    between=st.tuples(st.integers(1, 20), st.integers(20, 60)),
)
def test_the_largest_value_is_the_largest(
    text: str, s1: int, limit: int, between: tuple[int, int]
) -> None:
    function = size_function(text)
    found = largest_value(function, "s0", {"s1": s1}, limit, between)
    fitting = [
        s0
        for s0 in range(between[0], between[1] + 1)
        if function.at({"s0": s0, "s1": s1}) <= limit
    ]
    assert found == (fitting[-1] if fitting else None)


def test_a_range_without_an_end_is_bisected() -> None:
    function = size_function("Max(4096*s0*s1 + 4*s0**2, 10**9)")
    found = largest_value(function, "s0", {"s1": 8}, 10**12, (2, MOST_SIZE))
    assert found is not None
    assert function.at({"s0": found, "s1": 8}) <= 10**12
    assert function.at({"s0": found + 1, "s1": 8}) > 10**12
    flat = size_function("8*s1")
    assert largest_value(flat, "s0", {"s1": 8}, 64, (0, MOST_SIZE)) == MOST_SIZE
    assert largest_value(flat, "s0", {"s1": 8}, 63, (0, MOST_SIZE)) is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1.5",
        "s0 +",
        "s0[0]",
        "s0 if s1 else 2",
        "Max()",
        "Mod(s0)",
        "floor(s0, s1)",
        "__import__('os')",
        "s0.real",
        "s0 < s1",
        "True",
        "Max(*s0)",
    ],
)
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(GcpassError, match="no function of sizes"):
        size_function(text)


def test_what_has_no_whole_or_bounded_value_is_refused() -> None:
    with pytest.raises(GcpassError, match="no whole number: 3/2"):
        size_function("s0/2").at({"s0": 3})
    with pytest.raises(GcpassError, match="an exponent that depends on one"):
        size_function("2**s0").within({"s0": (1, 2)})
    with pytest.raises(GcpassError, match="3/2 as an exponent"):
        size_function("s0**(3/2)").at({"s0": 4})
    for text in ("s0/(s0 - 1)", "Mod(s0, s0 - 1)", "(s0 - 1)**(-2)"):
        with pytest.raises(GcpassError, match="a divisor that may be 0"):
            size_function(text).at({"s0": 1})
    assert size_function("s0/(1/2)").at({"s0": 9}) == 18


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ("64*s0 - 512*floor(s0/8) + 1028", 100),
        ("1000*s0 - 8000*floor(s0/8) + 100", 50),
        ("4*s0*s1 - 4*s0 + 12", 11),
    ],
)
def test_a_search_that_finds_no_end_is_given_up(text: str, limit: int) -> None:
    with pytest.raises(GcpassError, match=r"largest s0 was given up.*peak_at"):
        largest_value(size_function(text), "s0", {"s1": 1}, limit, (2, MOST_SIZE))


def test_a_sum_of_many_terms() -> None:
    names = [f"u{i}" for i in range(2000)]
    function = size_function(" + ".join(f"2*{name}" for name in names))
    assert function.at(dict.fromkeys(names, 3)) == 12000
