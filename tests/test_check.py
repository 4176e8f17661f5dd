"""`check` accepts what `simulate` prices and names every rule that is broken."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import pytest

from gcpass.collector import paused_collector
from gcpass.solvers.bound import (
    floor_lower_bound_bytes,
    given_order,
    lower_bound_seconds,
)
from gcpass.solvers.check import check
from gcpass.solvers.errors import InvalidProblemError, SolverError
from gcpass.solvers.liveness import make_plan
from gcpass.solvers.problem import OpId, Origin, Phase, Plan, Problem, ValueId
from tests.exact import plans
from tests.problems import Builder, chain, random_problem, transformer


def _plan(problem: Problem, sequence: list[int], boundary: int) -> Plan:
    ids = [OpId(i) for i in sequence]
    return make_plan(problem, ids, boundary, "test")


def _two_draws() -> Problem:
    """Return two random draws, a product, an either, and a backward that reads them."""
    b = Builder()
    x = b.value(4, Origin.INPUT)
    first, second, product, derived = (b.value(k) for k in (2, 3, 5, 7))
    held = b.value(11, held=True)
    b.run([x], [first], 1.0, recomputable=False)
    b.run([x], [second], 1.0, recomputable=False)
    b.run([first, second], [product], 2.0)
    b.run([product], [derived], 4.0, Phase.EITHER)
    b.run([derived, first, b.value(13, Origin.TANGENT)], [held], 8.0, Phase.BACKWARD)
    b.run([x], [b.value(17, held=True)], 16.0, Phase.EITHER)
    return b.problem()


GOOD = ([0, 1, 2, 3, 5, 4], 3)


def test_accepts_a_valid_plan_and_its_peak_by_hand() -> None:
    # first 2, product 5 saved; at 3: 2 + 5 + 7 + tangent 13 = 27;
    # at 5: 2 + 7 + 13 + 17 = 39; at 4: first 2, derived 7, tangent 13, held 17 + 11.
    plan = _plan(_two_draws(), *GOOD)
    assert plan.peak_bytes == 50
    assert plan.cost_seconds == 32.0
    check(_two_draws(), plan, 50)
    check(_two_draws(), plan, None)


@pytest.mark.parametrize(
    ("sequence", "boundary", "rule"),
    [
        ([0, 1, 3, 5, 4], 2, "forward: operation"),
        ([0, 1, 3, 2, 5, 4], 4, "available"),
        ([0, 1, 2, 3, 4, 5], 5, "backward only"),
        ([0, 1, 2, 3, 5], 3, "backward: "),
        ([0, 1, 2, 0, 3, 5, 4], 3, "not recomputable"),
        ([0, 1, 2, 3, 4], 3, "held"),
        ([0, 1, 2, 4, 5], 3, "available"),
        ([1, 0, 2, 3, 5, 4], 3, "order of draws"),
        ([0, 1, 2, 3, 5, 9], 3, "operation"),
        ([0, 1, 2, 3, 5, 4], 7, "boundary"),
    ],
)
def test_names_the_broken_rule(sequence: list[int], boundary: int, rule: str) -> None:
    plan = Plan(
        sequence=tuple(OpId(i) for i in sequence),
        boundary=boundary,
        cost_seconds=0.0,
        peak_bytes=0,
        origin="test",
    )
    with pytest.raises(SolverError, match=rule):
        check(_two_draws(), plan, None)


def test_accepts_repeats_in_the_forward() -> None:
    # Layer 0 feeds layer 1 and, skipping it, layer 2: dropped in between, the peak of
    # the forward is 10 + 50 (layer 1 reads 10), not 10 + 50 + 1.
    b = Builder()
    first, middle, last = b.value(10), b.value(50), b.value(1, held=True)
    source = b.value(1, Origin.INPUT)
    b.run([source], [first], 1.0)
    b.run([first], [middle], 1.0)
    b.run([first, middle], [last], 1.0)
    problem = b.problem()
    plan = _plan(problem, [0, 1, 0, 2], 4)
    assert (plan.peak_bytes, plan.cost_seconds) == (61, 4.0)
    check(problem, plan, 61)


def test_names_a_wrong_price_and_a_missed_budget() -> None:
    problem, plan = _two_draws(), _plan(_two_draws(), *GOOD)
    with pytest.raises(SolverError, match="cost"):
        check(problem, dataclasses.replace(plan, cost_seconds=32.001), None)
    with pytest.raises(SolverError, match="peak"):
        check(problem, dataclasses.replace(plan, peak_bytes=49), None)
    with pytest.raises(SolverError, match="budget"):
        check(problem, plan, 49)


def test_names_a_value_that_must_not_be_saved() -> None:
    problem = chain(3, 10, 1.0)
    values = list(problem.values)
    values[1] = dataclasses.replace(values[1], savable=False)
    problem = dataclasses.replace(problem, values=tuple(values))
    with pytest.raises(SolverError, match="savable: value 1"):
        check(problem, _plan(problem, [0, 1, 2, 3, 4, 5], 3), None)
    check(problem, _plan(problem, [0, 1, 2, 3, 0, 4, 5], 3), None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class InPlace:
    """A product of 8 bytes, a kernel that reads it, and a sum over its result."""

    aligned: bool = True
    size: int = 8  # of the kernel's result
    held: bool = False  # whether the product is an output
    read_later: bool = False  # the product, by the sum
    through: bool = False  # whether a virtual value is in between
    turned: bool = False  # whether that reads the product elsewhere
    peak_bytes: int

    def problem(self) -> Problem:
        """Return the forward."""
        b = Builder()
        product = b.value(8, held=self.held)
        result, total = b.value(self.size), b.value(1, held=True)
        b.run([], [product], 1.0)
        source = product
        if self.through:
            source = b.value(16)  # wider numbers in between do not matter
            aligned = () if self.turned else (product,)
            soft = {"fusible": True, "absorbing": True}
            b.run([product], [source], 1.0, aligned=aligned, **soft)
        aligned = (source,) if self.aligned else ()
        b.run([source], [result], 1.0, fusible=True, absorbing=True, aligned=aligned)
        later = [product] if self.read_later else []
        b.run([result, *later], [total], 1.0)
        return b.problem()


@pytest.mark.parametrize(
    "case",
    [
        InPlace(peak_bytes=9),
        InPlace(aligned=False, peak_bytes=16),
        InPlace(size=6, peak_bytes=14),
        InPlace(held=True, peak_bytes=17),
        InPlace(read_later=True, peak_bytes=17),
        InPlace(through=True, peak_bytes=9),
        InPlace(through=True, turned=True, peak_bytes=16),
    ],
    ids=str,
)
def test_results_take_the_place_of_what_ends(case: InPlace) -> None:
    problem = case.problem()
    count = len(problem.operations)
    plan = _plan(problem, list(range(count)), count)
    assert plan.peak_bytes == case.peak_bytes
    check(problem, plan, case.peak_bytes)
    assert lower_bound_seconds(problem, case.peak_bytes).seconds <= plan.cost_seconds
    assert floor_lower_bound_bytes(problem) <= case.peak_bytes


def test_long_chains_of_virtual_values_take_little_time() -> None:
    b = Builder()
    first = x = b.value(8)
    b.run([], [x], 1.0)
    soft = {"fusible": True, "absorbing": True}
    for _ in range(40):  # x + f(x), again and again: 2**40 ways back
        inner, after = b.value(8), b.value(8)
        b.run([x], [inner], 1.0, aligned=(x,), **soft)
        b.run([x, inner], [after], 1.0, aligned=(x, inner), **soft)
        x = after
    b.run([x, first], [b.value(1, held=True)], 1.0)
    count = len(b.operations)
    plan = _plan(b.problem(), list(range(count)), count)
    check(b.problem(), plan, None)
    assert plan.peak_bytes == 17


def test_tangents_are_not_written_over() -> None:
    b = Builder()
    tangent, gradient = b.value(8, Origin.TANGENT), b.value(8, held=True)
    b.run([tangent], [gradient], 1.0, Phase.BACKWARD, fusible=True, aligned=(tangent,))
    plan = _plan(b.problem(), [0], 0)
    assert plan.peak_bytes == 16
    check(b.problem(), plan, 16)


@pytest.mark.parametrize(
    "wrong", [{"fusible": False}, {"aligned": (ValueId(1),)}, {"writes": 2}], ids=str
)
def test_refuses_what_cannot_be_aligned(wrong: dict[str, Any]) -> None:
    b = Builder()
    x = b.value(4, Origin.INPUT)
    results = [b.value(4) for _ in range(wrong.pop("writes", 1))]
    b.run([x], results, 1.0, **({"fusible": True, "aligned": (x,)} | wrong))
    with pytest.raises(InvalidProblemError, match="aligned"):
        b.problem()


def test_a_plan_without_backward_and_an_empty_one() -> None:
    b = Builder()
    b.run([b.value(1, Origin.INPUT)], [b.value(5, held=True)], 1.0)
    b.value(3, Origin.TANGENT)
    problem = b.problem(between_bytes=4)
    check(problem, _plan(problem, [0], 1), 5 + 3 + 4)
    empty = Problem(operations=(), values=())
    check(empty, _plan(empty, [], 0), 0)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("seed", range(40))
def test_agrees_with_simulate(seed: int, fused: bool) -> None:
    problem = random_problem(seed, 6, fused=fused)
    found = list(plans(problem, 2, 300))
    for sequence, boundary in found[::7]:
        check(problem, make_plan(problem, sequence, boundary, "test"), None)


@pytest.mark.parametrize("fused", [False, True])
def test_five_thousand_executions_take_little_time(fused: bool) -> None:
    problem = transformer(217, fused=fused)
    plan = make_plan(problem, *given_order(problem), "test")
    with paused_collector():  # it would walk what all tests before have left
        start = time.process_time()
        check(problem, plan, plan.peak_bytes)
        taken = time.process_time() - start
    assert taken < 2.0
    with pytest.raises(SolverError, match="budget"):
        check(problem, plan, plan.peak_bytes - 1)


@pytest.mark.parametrize(
    ("phases", "sizes", "costs", "says"),
    [
        ((Phase.BACKWARD, Phase.FORWARD), (1, 1), (1.0, 1.0), "reads value 0 of a"),
        ((Phase.BACKWARD, Phase.EITHER), (1, 1), (1.0, 1.0), "reads value 0 of a"),
        ((Phase.FORWARD, Phase.FORWARD), (1 << 52, 1), (1.0, 1.0), "over"),
        ((Phase.FORWARD, Phase.FORWARD), (1, 1), (1e308, 1e308), "finite sum"),
    ],
)
def test_refuses_what_no_solver_can_count(
    phases: tuple[Phase, ...],
    sizes: tuple[int, ...],
    costs: tuple[float, ...],
    says: str,
) -> None:
    b = Builder()
    first, second = (b.value(size) for size in sizes)
    b.run([], [first], costs[0], phases[0])
    b.run([first], [second], costs[1], phases[1])
    with pytest.raises(InvalidProblemError, match=says):
        b.problem()
