"""Eight layers whose saved bytes are known, for tests of regions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import gcpass
from gcpass.decisions import ScopeDecision
from tests.training import (
    Budget,
    compiled,
    plan,
    products_in_backward,
    start_over,
)

ROWS, NARROW, WIDE = 64, 8, 32
SMALL, LARGE = ROWS * NARROW * 4, ROWS * WIDE * 4  # bytes of a layer's two results
LAYER = SMALL + LARGE  # what the backward of a layer reads besides its input

Wrap = Callable[[int, nn.Module, Tensor], Tensor]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDE, NARROW, bias=False)
        self.down = nn.Linear(NARROW, WIDE, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.down(torch.tanh(self.up(x))))


def plainly(index: int, layer: nn.Module, x: Tensor) -> Tensor:
    result: Tensor = layer(x)
    return result


class Net(nn.Module):
    """Eight layers, each called through `wrap`, and a head."""

    def __init__(self, wrap: Wrap = plainly) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(8))
        self.head = nn.Linear(WIDE, 4, bias=False)
        self.wrap = wrap

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = self.wrap(index, layer, x)
        return self.head(x).square().mean()


def data() -> Tensor:
    return torch.randn(ROWS, WIDE)


def train(wrap: Wrap = plainly, budget: Budget = None, **options: Any) -> int:
    """Check the gradients and return how many products the backward runs."""
    start_over()
    net, x = Net(wrap), data()
    return products_in_backward(net, compiled(net, budget, **options), x)


# 17 products, each with two gradients; the first of all needs none for its input.
LEAST = 2 * 17 - 1


def scopes() -> dict[str, ScopeDecision]:
    return {scope.name: scope for scope in plan().scopes}


def saved_by_layer() -> list[int]:
    """Return the bytes saved of each layer, read from the decisions on values."""
    found = [0] * 8
    for value in plan().values:
        if value.decision == "saved" and value.module_path.startswith("layers."):
            found[int(value.module_path.split(".")[1])] += value.size_bytes
    return found


def tenth_then_nine_tenths(index: int, layer: nn.Module, x: Tensor) -> Tensor:
    with gcpass.region(memory_budget=0.1 if index < 4 else 0.9):
        result: Tensor = layer(x)
    return result


def by_name(index: int, layer: nn.Module, x: Tensor) -> Tensor:
    with gcpass.region(policy="recompute", name=f"layer {index}"):
        result: Tensor = layer(x)
    return result
