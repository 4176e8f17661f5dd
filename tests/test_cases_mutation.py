"""Writes in place, aliases and side effects: as in eager whatever is recomputed.

pytorch#197039 (state read before it is written), pytorch#113737 (in-place operations
in checkpoint regions) and pytorch#96136 (statistics that move twice a step). The first
cases of each are in test_gradients.py.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from tests.training import (
    EXACT,
    PRODUCT,
    Budget,
    compiled,
    difference,
    relative,
    start_over,
)

BUDGETS: list[Budget] = [None, "min"]


class Stateful(nn.Module):
    """A weight, a bank of values and a way to use and write it."""

    def __init__(self, use: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.use = use
        self.weight = nn.Parameter(torch.randn(16, 16) / 4)
        self.register_buffer("bank", torch.randn(8, 16))
        self.register_buffer("cursor", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(x @ self.weight).exp()
        h = self.use(self, h)
        return torch.tanh(h @ self.weight).exp().mean()


def rows(net: Any, h: Tensor) -> Tensor:
    # A row of a bank is replaced, as in a queue of keys.
    h = torch.sin(h + net.bank[2])
    net.bank[2] = h.detach().mean(0)
    return h * net.bank[3]


def scattered(net: Any, h: Tensor) -> Tensor:
    h = torch.sin(h + net.bank).square()
    net.bank.index_copy_(0, torch.tensor([0, 5]), h.detach()[:2])
    return h


def twice(net: Any, h: Tensor) -> Tensor:
    # Read, written, read again and written again: both values count.
    h = torch.sin(h + net.bank)
    net.bank.mul_(0.5)
    h = torch.cos(h + net.bank)
    net.bank.add_(1)
    return h


def copied(net: Any, h: Tensor) -> Tensor:
    h = torch.sin(h * net.bank.exp())
    net.bank.copy_(h.detach())
    return h


def transposed(net: Any, h: Tensor) -> Tensor:
    view = net.bank.t()
    h = torch.sin(h + view.exp().t()).square()
    view[1:3].zero_()
    return h


def counted(net: Any, h: Tensor) -> Tensor:
    h = h * net.bank[net.cursor % 8]
    net.cursor.add_(1)
    return torch.sin(h)


def weight_decay(net: Any, h: Tensor) -> Tensor:
    # The buffer that scales the step is written after the weight was read through it.
    scale = 1 / (1 + net.bank.square().sum())
    h = torch.sin(h @ (net.weight * scale))
    net.bank.lerp_(h.detach()[:8], 0.1)
    return h


USES = [rows, scattered, twice, copied, transposed, counted, weight_decay]


@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
def test_c01_state_of_every_kind(use: Callable[[Any, Tensor], Tensor]) -> None:
    for budget in BUDGETS:
        start_over()
        net, x = Stateful(use), torch.randn(8, 16)
        assert difference(net, x, budget=budget, steps=3) < EXACT


def test_c01_in_bfloat16() -> None:
    for budget in BUDGETS:
        start_over()
        net, x = Stateful(rows).bfloat16(), torch.randn(8, 16).bfloat16()
        assert difference(net, x, budget=budget, steps=3) < 1e-2


class WritesArguments(nn.Module):
    """Writes its arguments, which are views of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16))

    def forward(self, whole: Tensor) -> Tensor:
        loss: Tensor = self.inner(whole[:4], whole[2:6], whole)
        return loss

    def inner(self, a: Tensor, b: Tensor, whole: Tensor) -> Tensor:
        h = torch.sin(a + self.weight) * torch.cos(b + self.weight)
        a.mul_(0.5)  # overlaps with b
        h = torch.exp(h + b)
        b.add_(1)
        return torch.sin(h + whole[4:]).sum()


@pytest.mark.parametrize("budget", BUDGETS, ids=str)
def test_c01_arguments_that_overlap(budget: Budget) -> None:
    net = WritesArguments()
    inner = compiled(net.inner, budget)
    mine, theirs = torch.randn(8, 16), torch.empty(8, 16)
    theirs.copy_(mine)
    for _ in range(2):
        net.zero_grad()
        inner(mine[:4], mine[2:6], mine).backward()
        got = net.weight.grad
        net.zero_grad()
        net(theirs).backward()
        assert got is not None
        assert net.weight.grad is not None
        assert relative(got, net.weight.grad) < EXACT
        torch.testing.assert_close(mine, theirs)


class NormalizedWeight(nn.Module):
    """Spectral norm: power iteration moves two buffers in every forward."""

    def __init__(self) -> None:
        super().__init__()
        normed = torch.nn.utils.parametrizations.spectral_norm
        self.layers = nn.ModuleList(normed(nn.Linear(16, 16)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


class Statistics(nn.Module):
    """Norms whose statistics are moved in other ways than by a fixed momentum."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(2))
        cumulative = nn.BatchNorm2d(4, momentum=None)
        single = nn.InstanceNorm2d(4, affine=True, track_running_stats=True)
        self.norms = nn.ModuleList([cumulative, single])

    def forward(self, x: Tensor) -> Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = torch.relu(norm(conv(x)))
        return x.square().mean()


@pytest.mark.parametrize("make", [NormalizedWeight, Statistics])
def test_c05_statistics_move_once_a_step(make: Callable[[], nn.Module]) -> None:
    x = torch.randn(8, 16) if make is NormalizedWeight else torch.randn(2, 4, 8, 8)
    assert difference(make(), x, budget="min", steps=3) < EXACT


def in_place(x: Tensor, w: Tensor) -> Tensor:
    y = (x @ w).clone()
    y[:, :2].mul_(3)
    F.elu_(y)
    z = torch.sigmoid(y) + y
    z += y
    return torch.tanh(z @ w)


def policy_of(seed: int | None) -> Callable[..., CheckpointPolicy]:
    """Return a policy: products are saved, or each operation by the toss of a coin."""
    coin = random.Random(seed)

    def choose(ctx: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if seed is None:
            save = operator is PRODUCT
        else:
            save = coin.random() < seed / 5
        return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.MUST_RECOMPUTE

    return choose


@pytest.mark.parametrize("seed", [None, 0, 2, 3, 5])
@pytest.mark.filterwarnings("ignore:.*context_fn")
def test_c04_in_place_operations_whatever_is_saved(seed: int | None) -> None:
    # From nothing (0) to everything (5); eager runs the region without a checkpoint.
    def regions(x: Tensor, w: Tensor) -> Tensor:
        context = functools.partial(
            create_selective_checkpoint_contexts, policy_of(seed)
        )
        for _ in range(2):
            x = checkpoint(in_place, x, w, use_reentrant=False, context_fn=context)
        return x.sum()

    def plain(x: Tensor, w: Tensor) -> Tensor:
        return in_place(in_place(x, w), w).sum()

    x, w = (torch.randn(16, 16, requires_grad=True) for _ in range(2))
    want = torch.autograd.grad(plain(x, w), (x, w))
    got = torch.autograd.grad(compiled(regions, 0.5)(x, w), (x, w))
    for mine, theirs in zip(got, want, strict=True):
        assert relative(mine, theirs) < EXACT


def test_c04_results_that_alias_inputs_and_each_other() -> None:
    def function(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        h = torch.tanh(x @ w).exp()
        return h, h.t(), h[1:], x.view(-1), x

    x, w = (torch.randn(16, 16, requires_grad=True) for _ in range(2))

    def loss(results: tuple[Tensor, ...]) -> Tensor:
        h, turned, part, flat, same = results
        return (h @ turned).sum() + part.sin().sum() + (flat.sum() * same).sum()

    want = torch.autograd.grad(loss(function(x, w)), (x, w))
    for budget in BUDGETS:
        start_over()
        results = compiled(function, budget)(x, w)
        assert results[0].data_ptr() == results[1].data_ptr()
        assert results[3].data_ptr() == x.data_ptr()
        assert results[4] is x
        for mine, theirs in zip(
            torch.autograd.grad(loss(results), (x, w)), want, strict=True
        ):
            assert relative(mine, theirs) < EXACT


def test_c04_a_result_written_before_the_backward_is_refused_or_not_read() -> None:
    """A plan may save 1 - y * y, computed before the write, instead of the result y."""

    def function(x: Tensor) -> Tensor:
        return torch.exp(x).tanh()

    for budget in (None, "min"):
        x = torch.randn(16, requires_grad=True)
        (wanted,) = torch.autograd.grad(function(x).sum(), x)
        for run in (function, compiled(function, budget)):
            y = run(x)
            with torch.no_grad():
                y.mul_(2)
            try:
                (found,) = torch.autograd.grad(y.sum(), x)
            except RuntimeError as error:
                refused = "modified by an inplace operation" in str(error)
            else:
                refused = False
                assert relative(found, wanted) < EXACT
            assert refused or run is not function


@torch.library.custom_op("gcpass_tests::advance", mutates_args={"state"})
def advance(state: Tensor, x: Tensor) -> Tensor:
    """Return x times the state, which is one more afterwards."""
    result = x * state
    state.add_(1)
    return result


@advance.register_fake
def _(state: Tensor, x: Tensor) -> Tensor:
    return torch.empty_like(x)


class Advancing(nn.Module):
    """An operator that returns a result and writes its argument."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.register_buffer("state", torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            scale = advance(self.state, torch.ones(16))
            x = torch.tanh(layer(x)).exp() * scale
        return x.mean()


@pytest.mark.parametrize("budget", BUDGETS, ids=str)
def test_c05_operators_that_write_and_return(budget: Budget) -> None:
    net, x = Advancing(), torch.randn(32, 16)
    assert difference(net, x, budget=budget, steps=2) < EXACT


@pytest.mark.slow
@pytest.mark.inductor
def test_inductor_keeps_state_as_it_was_read() -> None:
    net, x = Stateful(twice), torch.randn(8, 16)
    assert difference(net, x, budget="min", steps=2, codegen="inductor") < 1e-5
