"""Faults of Inductor's CPU code that gcpass corrects.

pytorch#185509: what reads a buffer after a write in place runs before it; on torch 2.13
every gradient below the upsampling was lost. pytorch#197888: positions in channels-last
order are read as if they were contiguous.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gcpass
from tests.training import gradients, relative

pytestmark = [pytest.mark.slow, pytest.mark.inductor]


class Upsampled(nn.Module):
    """A residual block, nearest upsampling (its backward scatters), two convolutions.

    The division reads what was scattered; two convolutions read the quotient, in the
    order of their own layouts.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.block = nn.ModuleList(nn.Conv2d(16, 16, 3, padding=1) for _ in range(2))
        self.skip = nn.Conv2d(16, 16, 1)
        self.tail = nn.ModuleList(nn.Conv2d(16, n, 3, padding=1) for n in (16, 3))

    def forward(self, x: Tensor) -> Tensor:
        x = h = self.stem(x)
        for layer in self.block:
            h = layer(F.silu(h))
        x = F.interpolate((self.skip(x) + h) / 1.0, scale_factor=2.0, mode="nearest")
        for layer in self.tail:
            x = layer(x)
        return x.square().mean()


def check(model: nn.Module, eager: nn.Module, **compile_with: Any) -> None:
    """Compare the gradients of a compiled model with those of a copy in eager mode."""
    x = torch.randn(2, 3, 16, 16)
    torch.compile(model, **compile_with)(x).backward()
    eager(x).backward()
    assert relative(gradients(model), gradients(eager)) < 1e-5


@pytest.mark.parametrize("budget", [None, 0.8], ids=str)
def test_a_channels_last_model(budget: float | None) -> None:
    eager = Upsampled()
    model = copy.deepcopy(eager).to(memory_format=torch.channels_last)
    check(model, eager, backend="gcpass", options={"memory_budget": budget})


def test_layouts_that_inductor_chose() -> None:
    eager = Upsampled()
    chosen = {"layout_optimization": True}
    check(copy.deepcopy(eager), eager, backend="gcpass", options=chosen)


def test_inductor_while_gcpass_is_enabled() -> None:
    eager = Upsampled()
    with gcpass.enable():
        check(copy.deepcopy(eager), eager)


def test_positions_in_channels_last_order() -> None:
    def pooled(x: Tensor) -> Tensor:
        return F.adaptive_max_pool3d(x.sin(), (2, 3, 5)).square().sum()

    x = torch.randn(2, 4, 4, 6, 10).to(memory_format=torch.channels_last_3d)
    x.requires_grad_()
    found = [
        torch.autograd.grad(run(x), x)[0]
        for run in (torch.compile(pooled, backend="gcpass"), pooled)
    ]
    assert relative(*found) < 1e-5
