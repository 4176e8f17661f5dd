"""``gcpass.region`` and the option ``regions``: limits and policies for parts.

C14 (pytorch#185979): several region budgets in one graph, partial cover.
"""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

import gcpass
from tests.layers import (
    LARGE,
    LAYER,
    LEAST,
    ROWS,
    SMALL,
    WIDE,
    Net,
    Wrap,
    by_name,
    data,
    plainly,
    saved_by_layer,
    scopes,
    tenth_then_nine_tenths,
    train,
)
from tests.training import (
    EXACT,
    PRODUCT,
    Budget,
    compiled,
    difference,
    held_bytes,
    plan,
    relative,
    selective,
    start_over,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*context_fn")


PATTERNS = {
    "layers.[0-3]": {"memory_budget": 0.1},
    "layers.[4-7]": {"memory_budget": "90%"},
}


@pytest.mark.parametrize(
    ("wrap", "regions", "budget"),
    [
        (tenth_then_nine_tenths, None, None),
        (tenth_then_nine_tenths, None, 0.7),
        (tenth_then_nine_tenths, None, "min"),
        (plainly, PATTERNS, None),
    ],
    ids=["context", "context-0.7", "context-min", "patterns"],
)
def test_c14_two_region_budgets_in_one_graph(
    wrap: Wrap, regions: dict[str, Any] | None, budget: Budget
) -> None:
    train(wrap, budget, regions=regions)
    first, second = plan().scopes
    for scope, share in ((first, 0.1), (second, 0.9)):
        assert scope.fastest_saved_bytes == 4 * LAYER
        assert scope.limit_bytes == int(share * 4 * LAYER)
    layers = saved_by_layer()
    assert first.saved_bytes == sum(layers[:4]) <= 0.1 * 4 * LAYER
    assert second.saved_bytes == sum(layers[4:]) <= 0.9 * 4 * LAYER
    if budget is None:  # as much as the limits leave: 2 small results, one large less
        assert first.saved_bytes == 2 * SMALL
        assert second.saved_bytes == 4 * LAYER - LARGE
    # The head is under no limit: without a budget what its backward reads is saved.
    outside = plan().saved_bytes - first.saved_bytes - second.saved_bytes
    assert outside == ROWS * 4 * 4 or budget is not None


def test_c14_the_allocator_holds_what_the_limits_leave() -> None:
    net, x = Net(tenth_then_nine_tenths), data()
    function = compiled(net)
    function(x).backward()
    held = held_bytes(lambda: function(x))
    limits = sum(scope.limit_bytes or 0 for scope in plan().scopes)
    head_and_loss = ROWS * 4 * 4 + 64
    assert held <= limits + head_and_loss
    assert held_bytes(lambda: net(x)) > limits + head_and_loss


def test_limits_are_used_and_a_larger_one_costs_no_more() -> None:
    before = float("inf")
    for share in (0.25, 0.6, 1.0):
        train(regions={"layers.*": {"memory_budget": share}})
        (scope,) = plan().scopes
        assert scope.limit_bytes is not None
        assert 0 <= scope.limit_bytes - scope.saved_bytes < LARGE
        assert plan().recomputations <= before
        before = plan().recomputations
    assert before == 0  # the whole of what the fastest plan saves is no limit


def test_limits_in_bytes() -> None:
    train(regions={"layers.2": {"memory_budget": SMALL}})
    assert scopes()["layers.2"].limit_bytes == SMALL
    assert saved_by_layer()[2] == SMALL
    assert sum(saved_by_layer()) == 8 * LAYER - LARGE


def test_an_output_of_the_step_does_not_count() -> None:
    def function(x: Tensor, weight: Tensor) -> Tensor:
        with gcpass.region(memory_budget=1):
            return torch.tanh(x @ weight)

    weight = torch.randn(WIDE, WIDE, requires_grad=True)
    compiled(function)(data(), weight).sum().backward()
    assert scopes()[""].saved_bytes == 0
    assert plan().recomputations == 0


# Policies.


def test_saved_regions_are_never_rebuilt() -> None:
    assert train(budget=0.6) > LEAST
    assert train(budget=0.6, regions={"*": "save"}) == LEAST
    assert plan().recomputations == 0


def test_a_saved_region_beside_a_tight_budget() -> None:
    train(budget=0.6, regions={"layers.[2-5]": "save"})
    assert saved_by_layer()[2:6] == [LAYER] * 4
    assert plan().recomputations > 0
    assert all(scopes()[f"layers.{i}"].saved_bytes == LAYER for i in (2, 3, 4, 5))
    reasons = [v.reason for v in plan().values if v.module_path.startswith("layers.3")]
    assert 'saved: region of policy "save"' in reasons


def as_one(index: int, layer: nn.Module, x: Tensor) -> Tensor:
    with gcpass.region(policy="recompute"):
        result: Tensor = layer(x)
    return result


@pytest.mark.parametrize("budget", [None, 1.0], ids=str)
def test_recomputed_regions_save_what_leaves_them(budget: Budget) -> None:
    # The result of a layer leaves it: the first product of each is rebuilt.
    assert train(by_name, budget) == LEAST + 8
    assert saved_by_layer() == [LARGE] * 8
    assert len(plan().scopes) == 8


def test_a_policys_pattern_makes_a_region_of_each_module() -> None:
    assert train(regions={"layers.*": "recompute"}) == LEAST + 8
    assert saved_by_layer() == [LARGE] * 8
    assert list(scopes()) == [f"layers.{i}" for i in range(8)]


def test_regions_with_equal_arguments_are_one() -> None:
    # Only the last result leaves it.
    assert train(as_one) == LEAST + 15
    assert saved_by_layer() == [0] * 7 + [LARGE]
    reasons = {v.reason for v in plan().values if v.decision == "recomputed"}
    assert 'recomputed: a region of policy "recompute" forbids to keep it' in reasons


class Dropped(nn.Module):
    """Draws inside of a region."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDE, WIDE) for _ in range(3))
        self.arguments = arguments

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            with gcpass.region(**self.arguments):
                x = nn.functional.dropout(torch.tanh(layer(x)), 0.3)
        return x.square().mean()


DRAWN = 3 * ROWS * WIDE * (1 + 4)  # a draw writes its mask and its result at once


def test_draws_in_a_recomputed_region_are_kept() -> None:
    assert difference(Dropped(policy="recompute"), data(), steps=2) < EXACT
    assert plan().recomputations > 0
    assert scopes()[""].saved_bytes == DRAWN


def test_a_limit_below_what_must_be_saved() -> None:
    with pytest.raises(gcpass.InfeasibleRegionError) as caught:
        compiled(Dropped(memory_budget=4096, name="body"))(data())
    error = caught.value
    assert (error.region, error.budget_bytes) == ("body", 4096)
    assert error.floor_bytes == DRAWN
    assert len(error.alive) == 6
    assert isinstance(error, gcpass.InfeasibleBudgetError)
    for says in ("region 'body' may save 4096 bytes", f"={error.floor_bytes} or more"):
        assert says in str(error)
    start_over()
    net = Dropped(memory_budget=error.floor_bytes, name="body")
    assert difference(net, data()) < EXACT
    assert scopes()["body"].saved_bytes == error.floor_bytes


def test_the_least_instead_of_an_error(caplog: pytest.LogCaptureFixture) -> None:
    net = Dropped(memory_budget=4096, name="body")
    assert difference(net, data(), on_infeasible="min") < EXACT
    assert "region 'body' may save 4096 bytes" in caplog.text
    assert scopes()["body"].saved_bytes == DRAWN


# Which scope an operation is in.


def test_the_innermost_region_counts() -> None:
    def nested(index: int, layer: nn.Module, x: Tensor) -> Tensor:
        with gcpass.region(policy="recompute", name="outer"):
            if index % 2:
                return plainly(index, layer, x)
            with gcpass.region(policy="save", name="inner"):
                return plainly(index, layer, x)

    train(nested)
    assert saved_by_layer() == [LAYER, LARGE] * 4
    assert list(scopes()) == ["inner", "outer"]


def test_a_context_wins_over_patterns_and_the_first_pattern_over_later_ones() -> None:
    def third(index: int, layer: nn.Module, x: Tensor) -> Tensor:
        if index != 3:
            return plainly(index, layer, x)
        with gcpass.region(policy="save"):
            return plainly(index, layer, x)

    patterns = {"layers.[0-1]": "save", "layers.*": "recompute"}
    train(third, regions=patterns)
    assert saved_by_layer() == [LAYER, LAYER, LARGE, LAYER, *[LARGE] * 4]
    assert {"", *(f"layers.{i}" for i in range(8) if i != 3)} == set(scopes())


def test_one_operation_is_saved_inside_of_a_recomputed_module() -> None:
    train(regions={"layers.3.up": "save", "layers.3": "recompute"})
    # The small result cannot be saved after its product, which is saved instead.
    assert saved_by_layer()[3] == SMALL + LARGE
    assert plan().recomputations == 1


def test_a_pattern_that_matches_nothing_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, logger="gcpass"):
        train(regions={"layer.0": "save", "layers.0": "save"})
    assert [r.getMessage() for r in caplog.records] == [
        "regions: nothing in this graph is in a module 'layer.0'"
    ]


def with_tags(policy: str | None, tag: CheckpointPolicy) -> Wrap:
    """Return a wrap that gives all products a checkpoint tag, inside of a region."""
    context = selective(frozenset({PRODUCT}), saved=tag, other=tag)

    def wrap(index: int, layer: nn.Module, x: Tensor) -> Tensor:
        if policy is None:
            return checkpoint(layer, x, use_reentrant=False, context_fn=context)
        with gcpass.region(policy=policy):
            return checkpoint(layer, x, use_reentrant=False, context_fn=context)

    return wrap


def test_checkpoint_tags_win_over_regions() -> None:
    must_save, must_recompute = (
        with_tags("recompute", CheckpointPolicy.MUST_SAVE),
        with_tags("save", CheckpointPolicy.MUST_RECOMPUTE),
    )
    assert train(must_save, 0.6) == LEAST
    assert train(must_recompute) == LEAST + 8


def test_checkpoint_hints_give_way_to_regions() -> None:
    hint = CheckpointPolicy.PREFER_RECOMPUTE
    assert train(with_tags(None, hint)) == LEAST + 8
    assert train(with_tags("save", hint)) == LEAST


# Compile caches.


@pytest.mark.slow
@pytest.mark.inductor
def test_compile_caches_tell_regions_apart() -> None:
    """The cache keys of torch leave annotations and module paths out."""

    def run(wrap: Wrap) -> tuple[int, int]:
        start_over()
        counters.clear()
        net, x = Net(wrap), data()
        net.layers = net.layers[:1]
        torch.compile(net, backend="gcpass")(x).backward()
        got = net.layers[0].up.weight.grad
        net.zero_grad()
        net(x).backward()
        assert relative(got, net.layers[0].up.weight.grad) < 1e-4
        saved = sum(scope.saved_bytes for scope in plan().scopes)
        return counters["aot_autograd"]["autograd_cache_hit"], saved

    assert run(plainly) == (0, 0)
    hits, saved = run(by_name)
    assert hits == 0
    assert saved <= LARGE
    assert run(by_name) == (1, saved)
    assert plan().from_cache
