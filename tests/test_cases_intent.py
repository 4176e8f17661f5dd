"""What the user's checkpoint regions ask for wins over the budget.

pytorch#141684 and pytorch#147561 (a budget overrides the annotations; first cases in
test_gradients.py), pytorch#161889 (selective checkpointing that saves more once
compiled).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

import gcpass
from tests.training import (
    EXACT,
    PRODUCT,
    Budget,
    compiled,
    difference,
    held_bytes,
    plan,
    products_in_backward,
    selective,
    start_over,
)

ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default

pytestmark = pytest.mark.filterwarnings("ignore:.*context_fn")


class Chained(nn.Module):
    """Layers in checkpoint regions of one layer each."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__()
        self.arguments = arguments
        self.layers = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(self.region, layer, x, use_reentrant=False, **self.arguments)
        return x.square().mean()

    def region(self, layer: nn.Module, x: Tensor) -> Tensor:
        return torch.cos(torch.sigmoid(layer(torch.sigmoid(layer(x))))).exp()


def products(net: nn.Module, x: Tensor, budget: Budget) -> int:
    """Return how many products the backward runs, checking the gradients."""
    start_over()
    return products_in_backward(net, compiled(net, budget), x)


# 8 products in the forward. In the backward each has two gradients, but the first one
# of all needs none for its input: 15. A region that is rebuilt adds its two.
LEAST = 15


@pytest.mark.parametrize("budget", [None, 0.3, "min"], ids=str)
def test_c12_saved_products_are_never_rebuilt(budget: Budget) -> None:
    net = Chained(context_fn=selective(frozenset({PRODUCT})))
    assert products(net, torch.randn(256, 32), budget) == LEAST


@pytest.mark.parametrize("budget", [0.9, "min"], ids=str)
def test_c12_must_recompute_is_recomputed_at_every_budget(budget: Budget) -> None:
    net = Chained(context_fn=selective(frozenset()))
    assert products(net, torch.randn(256, 32), budget) >= LEAST + 4
    inside = [v for v in plan().values if v.name.startswith(("mm", "sigmoid"))]
    assert inside
    assert not any(v.decision == "saved" for v in inside)


def test_c12_hints_give_way_to_a_budget() -> None:
    # PREFER_SAVE keeps the products while there is room; a budget may rebuild them.
    # PREFER_RECOMPUTE (a plain checkpoint) is followed without a budget only.
    context = selective(
        frozenset({PRODUCT}),
        saved=CheckpointPolicy.PREFER_SAVE,
        other=CheckpointPolicy.PREFER_RECOMPUTE,
    )
    x = torch.randn(256, 32)
    assert products(Chained(context_fn=context), x, None) == LEAST
    assert products(Chained(context_fn=context), x, "min") > LEAST
    assert products(Chained(), x, None) >= LEAST + 4
    assert products(Chained(), x, 1.0) == LEAST


def test_c12_an_impossible_budget_names_what_must_be_saved() -> None:
    # The products alone take 7 x 256 x 32 x 4 bytes: the last one may be consumed.
    net = Chained(context_fn=selective(frozenset({PRODUCT})))
    pinned = 7 * 256 * 32 * 4
    with pytest.raises(gcpass.InfeasibleBudgetError) as caught:
        compiled(net, pinned)(torch.randn(256, 32))
    assert caught.value.floor_bytes > pinned
    assert sum(name.startswith("mm") for name in caught.value.alive) >= 6


class SelectiveBlock(nn.Module):
    """Norm, attention and a gated layer; products and attention are saved."""

    def __init__(self) -> None:
        super().__init__()
        width = 32
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up, self.gate = (nn.Linear(width, 64, bias=False) for _ in range(2))
        self.down = nn.Linear(64, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        context = selective(frozenset({PRODUCT, ATTENTION}))
        return checkpoint(self.block, x, use_reentrant=False, context_fn=context)

    def block(self, x: Tensor) -> Tensor:
        h = self.norms[0](x)
        q, k, v = (
            part.view(4, 16, 2, 16).transpose(1, 2)
            for part in self.qkv(h).view(4, 16, 96).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(64, 32))
        h = self.norms[1](x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def test_c13_compiled_selective_checkpoints_hold_no_more_than_eager() -> None:
    net, x = SelectiveBlock(), torch.randn(64, 32)
    eager = held_bytes(lambda: net(x))
    for budget in (None, "min"):
        start_over()
        function = compiled(net, budget)
        function(x).sum().backward()
        assert held_bytes(lambda f=function: f(x)) <= eager
        start_over()
        assert difference(net, x, budget=budget, loss=squared) < EXACT


def squared(function: Callable[..., Tensor], x: Tensor) -> Tensor:
    return function(x).square().mean()


class Frozen(nn.Module):
    """Regions whose inputs need no gradient, and one that returns its input."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.layers[0].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        kept: Tensor
        for layer in self.layers:
            x, kept = checkpoint(self.region, layer, x, use_reentrant=False)
            x = x + kept.detach().sin()
        return x.square().mean()

    def region(self, layer: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(layer(x)).exp(), x


@pytest.mark.parametrize("budget", [None, "min"], ids=str)
def test_c12_regions_with_frozen_parts(budget: Budget) -> None:
    assert difference(Frozen(), torch.randn(64, 16), budget=budget) < EXACT
