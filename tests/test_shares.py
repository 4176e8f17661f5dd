"""One budget for several regions: shares fit together, and are the cheapest that do."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from gcpass.solvers.problem import Problem
from gcpass.solvers.shares import (
    Choice,
    Member,
    Menu,
    Share,
    divide,
    fastest_peak,
    held_bytes,
    least_peak,
    set_aside_bytes,
)
from gcpass.solvers.solve import Planner
from tests.problems import random_problem, transformer

Orders = list[list[int]]


def planner(problem: Problem) -> Planner:
    return Planner(problem=problem)


def members(problems: Sequence[Problem], *, seed: int = 0) -> list[Member]:
    rng = random.Random(seed)
    return [
        Member(menu=Menu(problem=p, planner=planner), gradient_bytes=rng.randint(0, 9))
        for p in problems
    ]


def highest(regions: Sequence[Member], picks: Sequence[Choice], orders: Orders) -> int:
    """Return the peak of steps, moment by moment."""
    peak = 0
    for order in orders:
        for i, now in enumerate(order):
            bytes_now = picks[now].peak_bytes
            bytes_now += sum(picks[m].held_bytes for m in order[:i])
            bytes_now += sum(regions[m].gradient_bytes for m in order[i + 1 :])
            peak = max(peak, bytes_now)
    return peak


def limits(shares: Sequence[Share]) -> list[Choice]:
    """Return the shares as if each were used up."""
    return [
        Choice(
            cost_seconds=s.cost_seconds,
            held_bytes=0 if s.held_bytes is None else s.held_bytes,
            peak_bytes=s.peak_bytes,
        )
        for s in shares
    ]


@pytest.mark.parametrize("seed", range(30))
def test_bytes_set_aside_limit_what_is_held(seed: int) -> None:
    problem = random_problem(seed, 8, fused=seed % 2 == 0)
    menu = Menu(problem=problem, planner=planner)
    top = menu.fastest()
    found = 0
    for held_limit in (*range(0, top.held_bytes, 3), top.held_bytes):
        peak_limit = top.peak_bytes + held_limit
        aside = set_aside_bytes(problem, peak_limit, held_limit)
        limited = Problem(
            operations=problem.operations,
            values=problem.values,
            save_seconds_per_byte=problem.save_seconds_per_byte,
            between_bytes=aside,
        )
        plan = planner(limited).solve(peak_limit).plan
        if plan is not None:
            assert held_bytes(problem, plan) <= held_limit
            found += 1
    assert found  # the fastest plan is within the last limits


@pytest.mark.parametrize("seed", range(20))
def test_shares_fit_together_and_are_the_cheapest(seed: int) -> None:
    regions = members(
        [random_problem(seed, 9), random_problem(100 + seed, 7)], seed=seed
    )
    orders = [[0, 1, 1], [1, 0]]
    top, least = fastest_peak(regions, orders), least_peak(regions, orders)
    assert least <= top
    for budget in {least, (least + top) // 2, top}:
        shares = divide(regions, orders, [budget] * 2, reserve=0.0)
        assert shares is not None
        assert highest(regions, limits(shares), orders) <= budget
        assert [s.executions for s in shares] == [1, 2]
        menus = itertools.product(*(r.choices for r in regions))
        cheapest = min(
            picks[0].cost_seconds + 2 * picks[1].cost_seconds
            for picks in menus
            if highest(regions, picks, orders) <= budget
        )
        cost = shares[0].cost_seconds + 2 * shares[1].cost_seconds
        assert cost == pytest.approx(cheapest, rel=1e-6)
        for share, region in zip(shares, regions, strict=True):
            pick = next(c for c in region.choices if c.plan == share.plan)
            assert pick.peak_bytes <= share.peak_bytes
            assert share.held_bytes is None or pick.held_bytes <= share.held_bytes


def test_nothing_fits_under_what_must_be_held() -> None:
    regions = members([transformer(2)])
    order = [[0] * 4]
    least = least_peak(regions, order)
    assert divide(regions, order, [least]) is not None
    assert divide(regions, order, [least // 2]) is None


def test_a_repeated_region_divides_the_budget() -> None:
    problem = transformer(3)
    top = planner(problem).fastest
    apart = top.peak_bytes + 3 * held_bytes(problem, top)
    regions, order = members([problem]), [[0] * 4]
    regions[0].gradient_bytes = 0
    assert fastest_peak(regions, order) == apart
    last = 0.0
    for ratio in (1.0, 0.8, 0.6, 0.4):
        budget = int(ratio * apart)
        shares = divide(regions, order, [budget])
        assert shares is not None
        (share,) = shares
        assert share.held_bytes is not None
        assert share.peak_bytes + 3 * share.held_bytes <= budget
        assert share.others_bytes == 3 * share.held_bytes
        assert share.cost_seconds >= last
        last = share.cost_seconds
    assert last > top.cost_seconds


def test_what_has_no_budget_is_in_the_way_of_others() -> None:
    problem = transformer(2)
    alone = divide(members([problem]), [[0]], [planner(problem).fastest.peak_bytes])
    assert alone is not None
    fixed = Choice(cost_seconds=0.0, held_bytes=1000, peak_bytes=1 << 40)
    regions = [Member(menu=fixed, gradient_bytes=0, limited=False), *members([problem])]
    top = planner(problem).fastest.peak_bytes + 1000
    shares = divide(regions, [[0, 1]], [0, top])
    assert shares is not None
    assert shares[1].peak_bytes == top - 1000
    assert shares[1].others_bytes == 1000
    assert shares[1].cost_seconds == alone[0].cost_seconds


def test_the_same_shares_every_time() -> None:
    found = []
    for _ in range(2):
        regions = members([transformer(2), transformer(3)])
        orders = [[0, 1, 1]]
        budget = (fastest_peak(regions, orders) + least_peak(regions, orders)) // 2
        found.append(divide(regions, orders, [budget] * 2))
    assert found[0] == found[1]
    assert found[0] is not None
