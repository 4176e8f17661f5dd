"""Costs: what is alive anyway is free, what is unknown is dear.

lightning-thunder#474 (tensors that are there anyway count as saved) and
pytorch#163139 (first cases, and those of pytorch#141881, in test_gradients.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gcpass.decisions import RegionPlan
from tests.training import EXACT, compiled, difference, plan, relative, start_over


def normed(x: Tensor, g: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = F.layer_norm(x, (64,)) * g
    return y, torch.tanh(y @ w).exp().sum()


def inner(x: Tensor, g: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y, total = normed(x, g, w)
    return y[:1] * 2, total


def plan_of(function: Callable[..., Any], budget: str | None) -> RegionPlan:
    """Return the plan of a function, checking its gradients."""
    start_over()
    x = torch.randn(256, 64, requires_grad=True)
    g, w = torch.ones(64, requires_grad=True), torch.randn(64, 64, requires_grad=True)
    grads = []
    for run in (function, compiled(function, budget)):
        y, total = run(x, g, w)
        grads.append(torch.autograd.grad(y.sum() + total, (x, g, w)))
    for want, mine in zip(*grads, strict=True):
        assert relative(mine, want) < EXACT
    return plan()


def test_c10_outputs_and_inputs_are_kept_for_nothing() -> None:
    # Both functions keep y without a budget. As an output it is there anyway: nothing
    # more is held for it, and x is an input either way.
    size = 256 * 64 * 4
    alone, returned = plan_of(inner, None), plan_of(normed, None)
    assert alone.saved_bytes == returned.saved_bytes
    assert returned.held_bytes <= alone.held_bytes
    kept = next(v for v in returned.values if v.decision == "output" and v.shape)
    assert kept.size_bytes == size
    assert "the backward reads it" in kept.reason
    for made in (alone, returned):
        assert next(v for v in made.values if v.name == "primals_1").decision == "input"


def test_c10_what_is_alive_anyway_is_not_computed_again() -> None:
    # Under "min" the other function rebuilds y from x; returned, there is no need.
    name = next(v.name for v in plan_of(normed, None).values if v.decision == "output")
    alone = {v.name: v for v in plan_of(inner, "min").values}
    returned = {v.name: v for v in plan_of(normed, "min").values}
    assert alone[name].recompute_positions
    assert not returned[name].recompute_positions


@torch.library.custom_op("gcpass_tests::opaque", mutates_args=())
def opaque(x: Tensor) -> Tensor:
    """Return x * 2."""
    return x * 2


@opaque.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _opaque_backward(ctx: Any, gradient: Tensor) -> Tensor:
    return opaque(gradient)


opaque.register_autograd(_opaque_backward)


class Opaque(nn.Module):
    """Operators without a formula, one of which the backward calls as well."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 32) / 6)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(opaque(x @ self.weight)).exp()
        return x.mean()


def test_c11_unknown_operators_of_both_directions() -> None:
    for budget in (0.5, "min"):
        start_over()
        assert difference(Opaque(), torch.randn(128, 32), budget=budget) < EXACT
        unknown = [v for v in plan().values if v.name.startswith("opaque")]
        assert len(unknown) == 6
        assert not any(v.recompute_positions for v in unknown)
