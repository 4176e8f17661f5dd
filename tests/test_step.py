"""Several regions in a step share one budget: counted in the first step, or stated."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gcpass
from gcpass import compiler, step, store
from tests.training import (
    compiled,
    gradients,
    relative,
    start_over,
    train,
)

EXACT = 2e-6
BLOCKS = 6


class Block(nn.Module):
    """A residual block without a loss."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return y


class Stack(nn.Module):
    """Six blocks, in three pieces when it breaks."""

    def __init__(self, *, breaks: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.breaks = breaks

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[1](self.blocks[0](x))
        if self.breaks:
            torch._dynamo.graph_break()
        x = self.blocks[3](self.blocks[2](x))
        if self.breaks:
            torch._dynamo.graph_break()
        x = self.blocks[5](self.blocks[4](x))
        return x.square().mean()


@pytest.fixture
def x() -> Tensor:
    return torch.randn(256, 16)


def broken(budget: Any, **options: Any) -> tuple[nn.Module, Callable[..., Any]]:
    model = Stack(breaks=True)
    return model, compiled(model, budget, **options)


def by_block(budget: Any, **options: Any) -> tuple[nn.Module, Callable[..., Any]]:
    model = Stack()
    chosen = {"memory_budget": budget, "codegen": "eager", **options}
    for block in model.blocks:
        block.compile(backend="gcpass", options=chosen)
    return model, model


def fastest_peak(make: Callable[..., Any], x: Tensor) -> int:
    """Return the measured peak of a step without a budget."""
    model, run = make(None)
    train(model, run, (x,))
    model.zero_grad()
    peak = gcpass.measure(lambda: run(x).backward())
    start_over()
    return peak


@pytest.mark.parametrize("make", [broken, by_block])
@pytest.mark.parametrize("share", [0.8, 0.6, 0.45])
def test_one_budget_for_the_whole_step(
    make: Callable[..., Any], share: float, x: Tensor
) -> None:
    budget = int(share * fastest_peak(make, x))
    model, run = make(budget)
    eager = Stack()
    want = train(eager, eager, (x,))
    for _ in range(3):
        assert relative(train(model, run, (x,)), want) < EXACT
        assert relative(gradients(model), gradients(eager)) < EXACT
    model.zero_grad()
    assert gcpass.measure(lambda: run(x).backward()) <= budget
    final = {p.region: p for p in gcpass.plans()}.values()
    assert sum(p.executions for p in final) == (3 if make is broken else BLOCKS)
    assert all(p.step_peak_bytes <= budget for p in final)
    assert any(p.recomputations for p in final)


@pytest.mark.parametrize("make", [broken, by_block])
def test_the_step_that_counts_holds_little(make: Callable[..., Any], x: Tensor) -> None:
    peak = fastest_peak(make, x)
    model, run = make("min")
    assert gcpass.measure(lambda: run(x).backward()) < 0.5 * peak
    model.zero_grad()
    run(x).backward()
    model.zero_grad()
    assert gcpass.measure(lambda: run(x).backward()) < 0.35 * peak
    assert all(p.budget_bytes is None for p in gcpass.plans())  # shares are no limits


@pytest.mark.parametrize("make", [broken, by_block])
def test_a_fraction_is_one_of_the_whole_step(
    make: Callable[..., Any], x: Tensor
) -> None:
    peak = fastest_peak(make, x)
    model, run = make(0.5)
    for _ in range(2):
        train(model, run, (x,))
    model.zero_grad()
    assert 0.3 * peak < gcpass.measure(lambda: run(x).backward()) <= 0.51 * peak


def test_a_budget_that_binds_nothing_compiles_once(
    x: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_one, shares = compiler.RegionCompiler.compile, []

    def counted(self: Any, share: Any, *rest: Any) -> Any:
        shares.append(share)
        return compile_one(self, share, *rest)

    monkeypatch.setattr(compiler.RegionCompiler, "compile", counted)
    model, run = by_block("1GiB")
    for _ in range(3):
        train(model, run, (x,))
    # The input of the first block needs no gradient: two graphs.
    assert len(shares) == 2
    last = {p.region: p for p in gcpass.plans()}.values()
    assert sum(p.executions for p in last) == BLOCKS
    assert not any(p.recomputations for p in last)


def test_calls_may_be_stated(x: Tensor) -> None:
    x.requires_grad_()  # one graph for all blocks
    budget = int(0.6 * fastest_peak(by_block, x))
    model, run = by_block(budget, calls_per_step=BLOCKS)
    loss = run(x)
    (made,) = gcpass.plans()
    assert made.executions == BLOCKS
    loss.backward()
    model.zero_grad()
    assert gcpass.measure(lambda: run(x).backward()) <= budget
    assert gcpass.plans() == (made,)


@pytest.mark.parametrize(("make", "budget"), [(broken, "200kB"), (by_block, "300kB")])
def test_an_error_comes_before_any_update(
    make: Callable[..., Any], budget: str, x: Tensor
) -> None:
    model, run = make(budget)
    loss = run(x)
    with pytest.raises(gcpass.InfeasibleBudgetError, match="A step runs") as caught:
        loss.backward()
    start_over()
    model, run = make(caught.value.floor_bytes)
    for _ in range(2):
        train(model, run, (x,))
    model.zero_grad()
    assert gcpass.measure(lambda: run(x).backward()) <= caught.value.floor_bytes


def test_a_fraction_below_the_floor_of_a_lone_region(x: Tensor) -> None:
    model = Block()
    options = {"memory_budget": 0.05, "codegen": "eager"}
    loss = torch.compile(model, backend="gcpass", options=options)(x).sum()
    with pytest.raises(gcpass.InfeasibleBudgetError):
        loss.backward()


def test_a_region_that_is_alone_after_all(x: Tensor) -> None:
    class Trailing(Stack):
        """After the break nothing is trained."""

        def forward(self, x: Tensor) -> Tensor:
            loss = super().forward(x)
            torch._dynamo.graph_break()
            return loss

    budget = int(0.6 * fastest_peak(lambda b: (m := Trailing(), compiled(m, b)), x))
    model, eager = Trailing(), Stack()
    run = compiled(model, budget)
    for _ in range(2):
        assert relative(train(model, run, (x,)), train(eager, eager, (x,))) < EXACT
        assert relative(gradients(model), gradients(eager)) < EXACT
    (made,) = gcpass.plans()
    assert (made.executions, made.others_bytes) == (1, 0)
    model.zero_grad()
    assert gcpass.measure(lambda: run(x).backward()) <= budget
    start_over()
    loss = compiled(Trailing(), "50kB")(x)
    with pytest.raises(gcpass.InfeasibleBudgetError):
        loss.backward()


class Repeated(nn.Module):
    """One block that is called as often as the caller says."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.block = Block()

    def forward(self, x: Tensor, times: int) -> Tensor:
        for _ in range(times):
            x = self.block(x)
        return x.square().mean()


def test_a_step_that_grows_is_counted_again(x: Tensor) -> None:
    x.requires_grad_()
    model, eager = Repeated(), Repeated()
    budget = 700_000
    model.block.compile(
        backend="gcpass", options={"memory_budget": budget, "codegen": "eager"}
    )
    for times in (1, 2, 6, 6, 3, 6):
        got = model(x, times)
        got.backward()
        want = eager(x, times)
        want.backward()
        assert relative(got, want) < EXACT
        assert relative(gradients(model), gradients(eager)) < EXACT
    assert gcpass.plans()[-1].executions == 6
    for times in (6, 3, 1):
        model.zero_grad()
        x.grad = torch.zeros_like(x)
        assert gcpass.measure(lambda: model(x, times).backward()) <= budget  # noqa: B023


def test_a_region_without_a_budget_counts_against_others(x: Tensor) -> None:
    first, last = Block(), Stack()
    free = torch.compile(first, backend="gcpass", options={"codegen": "eager"})
    limited = compiled(last, 900_000)
    for _ in range(3):
        for model in (first, last):
            model.zero_grad()
        limited(free(x)).backward()
    (made,) = (p for p in gcpass.plans() if p.budget_bytes is not None)
    (other,) = (p for p in gcpass.plans() if p.budget_bytes is None)
    assert made.others_bytes == other.held_bytes > 0
    assert made.budget_bytes == 900_000 - other.held_bytes
    for model in (first, last):
        model.zero_grad()
    assert gcpass.measure(lambda: limited(free(x)).backward()) <= 900_000


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("make", [broken, by_block])
def test_a_checkpoint_around_regions(
    make: Callable[..., Any], reentrant: bool, x: Tensor
) -> None:
    # It runs them again in the backward, and wants as many saved tensors.
    x.requires_grad_()
    model, run = make(0.6, on_infeasible="min")
    eager = Stack()
    for _ in range(3):
        for net, function in [(model, run), (eager, eager)]:
            net.zero_grad()
            checkpoint(function, x, use_reentrant=reentrant).backward()
        assert relative(gradients(model), gradients(eager)) < EXACT


@pytest.mark.parametrize("make", [broken, by_block])
def test_autocast_and_growing_batches(make: Callable[..., Any]) -> None:
    # What is compiled later finds the same surroundings as what Dynamo compiles.
    model, run = make(0.6, on_infeasible="min")
    eager = Stack()
    for rows in (64, 64, 128, 96, 128, 40):
        x = torch.randn(rows, 16)
        got = train(model, run, (x,), autocast=True)
        assert relative(got, train(eager, eager, (x,), autocast=True)) < 1e-2
        assert relative(gradients(model), gradients(eager)) < 2e-2


def test_two_forwards_before_a_backward(x: Tensor) -> None:
    budget = int(1.2 * fastest_peak(broken, x))
    model, run = broken(budget)
    eager = Stack()
    for _ in range(3):
        for net, function in [(model, run), (eager, eager)]:
            net.zero_grad()
            (function(x) + function(2 * x)).backward()
        assert relative(gradients(model), gradients(eager)) < EXACT
    assert {p.executions for p in gcpass.plans()} == {2}
    model.zero_grad()
    assert gcpass.measure(lambda: (run(x) + run(2 * x)).backward()) <= budget


def test_a_forward_alone_is_a_step(x: Tensor) -> None:
    model, run = broken(500_000)
    del model
    run(x)
    run(x)  # its first step was never finished by a backward
    assert len(gcpass.plans()) == 3


def test_nothing_of_the_first_step_is_kept(x: Tensor) -> None:
    model, run = broken("min")
    for _ in range(2):
        given = torch.randn(256, 16)
        seen = weakref.ref(given)
        run(given).backward()
        del given
        gc.collect()
        assert seen() is None
    parameters = [weakref.ref(p) for p in model.parameters()]
    del model, run
    start_over()
    gc.collect()
    assert not any(p() is not None for p in parameters)


def test_open_regions_are_forgotten_with_their_results(x: Tensor) -> None:
    loss = compiled(Stack(), "min")(x)
    assert len(step.open_executions()) == 1
    store.clear()
    loss.backward()
    assert step.open_executions() == []
