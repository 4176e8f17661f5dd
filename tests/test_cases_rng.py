"""Draws and unstable choices: whatever is recomputed, each is made once, as in eager.

pytorch#190758 (another dropout mask in the backward) and pytorch#187985 (attention
that drops nothing counted as random). Both copies draw from the same seed, so a draw
that runs again, in another place or in another order shows in the gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.training import (
    EXACT,
    CallCounter,
    compiled,
    difference,
    plan,
    relative,
)


def pick_columns(x: Tensor) -> Tensor:
    weights = torch.ones(x.shape[1])
    return x[:, torch.multinomial(weights, x.shape[1], replacement=True)]


def pick_one(x: Tensor) -> Tensor:
    return F.gumbel_softmax(x, hard=True) * x


def attention(x: Tensor) -> Tensor:
    heads = x.view(4, 2, -1, 8)
    return F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.2).reshape(
        x.shape
    )


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "alpha": lambda x: F.alpha_dropout(x, 0.3, training=True),
    "channels": lambda x: F.dropout2d(x.view(4, -1, 4, 4), 0.3).reshape(x.shape),
    "slopes": lambda x: F.rrelu(x, training=True),
    "bernoulli": lambda x: x.exp() * torch.bernoulli(torch.full_like(x, 0.5)),
    "normal": lambda x: torch.sin(x + torch.randn_like(x)),
    "in_place": lambda x: x.exp() * torch.empty_like(x).exponential_(),
    "integers": lambda x: x.gather(1, torch.randint(0, x.shape[1], x.shape)),
    "permutation": lambda x: (x + torch.randperm(x.shape[1])).sin().exp(),
    "multinomial": pick_columns,
    "gumbel": pick_one,
    "attention": attention,
}


class Noisy(nn.Module):
    """Three layers, each followed by a draw."""

    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.draw = draw
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.draw(torch.tanh(layer(x)))
        return x.square().mean()


@pytest.mark.parametrize("kind", DRAWS)
def test_every_draw_is_made_once(kind: str) -> None:
    if kind == "slopes" and torch.__version__ < (2, 13):
        pytest.skip("before 2.13 Inductor's rrelu draws apart from eager's")
    net, x = Noisy(DRAWS[kind]), torch.randn(64, 16)
    assert difference(net, x, budget="min", steps=2) < EXACT
    assert plan().recomputations > 0


def test_draws_in_bfloat16() -> None:
    net, x = Noisy(DRAWS["normal"]).bfloat16(), torch.randn(64, 16).bfloat16()
    assert difference(net, x, budget="min", steps=2) < 1e-2


class OutOfOrder(nn.Module):
    """Draws a, b and c, and reads them in the order c, b, a."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        noise = [torch.rand(64, 16), torch.randn(64, 16), torch.rand(64, 16)]
        for layer in self.layers:
            x = torch.tanh(layer(x) * noise.pop()).exp()
        return x.mean()


@pytest.mark.parametrize("budget", [None, "min"], ids=str)
def test_draws_keep_their_order(budget: Any) -> None:
    assert difference(OutOfOrder(), torch.randn(64, 16), budget=budget) < EXACT


class RoundedGradient(torch.autograd.Function):
    """Rounds the gradient up or down by chance, as low precision training does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return torch.floor(gradient * 1e5 + torch.rand_like(gradient)) / 1e5


class DrawsInBackward(nn.Module):
    """Dropout in the forward, stochastic rounding in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.dropout(RoundedGradient.apply(torch.tanh(layer(x))), 0.2)
        return x.square().mean()


@pytest.mark.parametrize("budget", [None, "min"], ids=str)
@pytest.mark.filterwarnings("ignore:.*should not be instantiated")
def test_draws_of_the_backward_follow_those_of_the_forward(budget: Any) -> None:
    net, x = DrawsInBackward(), torch.randn(64, 16)
    assert difference(net, x, budget=budget, steps=2) < EXACT


class Checkpointed(nn.Module):
    """Dropout inside of the user's checkpoint regions."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(self.region, layer, x, use_reentrant=False)
        return x.square().mean()

    def region(self, layer: nn.Module, x: Tensor) -> Tensor:
        return F.dropout(torch.tanh(layer(x)), 0.4)


@pytest.mark.parametrize("budget", [None, "min"], ids=str)
def test_draws_in_checkpoint_regions(budget: Any) -> None:
    assert difference(Checkpointed(), torch.randn(64, 16), budget=budget) < EXACT


class Inactive(nn.Module):
    """Operators that can draw, in calls that do not."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
            x = torch.native_dropout(x, 0.0, True)[0]
            x = F.rrelu(x, training=False)
        return x.square().mean()


def test_calls_that_draw_nothing_are_ordinary() -> None:
    assert difference(Inactive(), torch.randn(64, 16), budget="min") < EXACT
    assert not any("random" in value.reason for value in plan().values)


def test_attention_that_drops_nothing_in_bfloat16() -> None:
    def loss(q: Tensor) -> Tensor:
        for _ in range(3):
            q = F.scaled_dot_product_attention(q, q, q, is_causal=True).tanh()
        return q.square().mean()

    q = torch.randn(2, 2, 64, 16, dtype=torch.bfloat16, requires_grad=True)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    value = compiled(loss, "min")(q)
    with CallCounter(kernel) as counter:
        value.backward()
    assert counter.calls > 0  # it runs again
    got, q.grad = q.grad, None
    loss(q).backward()
    assert got is not None
    assert q.grad is not None
    assert relative(got, q.grad) < 1e-2


@pytest.mark.slow
@pytest.mark.inductor
def test_inductor_draws_each_mask_once() -> None:
    # Inductor draws from seeds of its own, so eager's masks are no oracle; what the
    # backward uses is read off the gradients.
    def function(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        kept = F.dropout(torch.sin(x), 0.5) * 2
        hidden = F.dropout(torch.relu(kept @ w).exp(), 0.5)
        return kept, hidden, hidden @ w

    x, w = torch.ones(64, 64, requires_grad=True), torch.randn(64, 64) / 8
    w.requires_grad_()
    kept, hidden, y = compiled(function, "min", codegen="inductor")(x, w)
    assert 0.3 < float((hidden == 0).float().mean()) < 0.7
    got = torch.autograd.grad(kept.sum() + y.sum(), (x, w))
    kept_mask, hidden_mask = (kept != 0).float() * 4, (hidden != 0).float() * 2
    kept = kept_mask * torch.sin(x)
    hidden = hidden_mask * torch.relu(kept @ w).exp()
    want = torch.autograd.grad(kept.sum() + (hidden @ w).sum(), (x, w))
    for mine, theirs in zip(got, want, strict=True):
        assert relative(mine, theirs) < 1e-4
