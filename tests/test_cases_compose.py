"""Several regions in one step: breaks, blocks compiled one by one, repeated calls.

pytorch#139989 and pytorch#143539: a budget is shared by the regions of a step, not
applied to each; a break changes the plan, never the gradients.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gcpass
from gcpass import step, store
from tests.nets import Block, Mlp
from tests.training import (
    EXACT,
    compiled,
    difference,
    gradients,
    relative,
    start_over,
    train,
)


class Broken(nn.Module):
    """A large part, something that Dynamo does not follow, and a tiny part."""

    def __init__(self, cause: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.cause = cause
        self.large = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))
        self.tiny = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.large:
            x = torch.tanh(layer(x))
        self.cause(x)
        return self.tiny(x).square().mean()


CAUSES: dict[str, Callable[[Tensor], object]] = {
    "break": lambda x: torch._dynamo.graph_break(),
    "print": lambda x: print(x.shape, end=""),
    "item": lambda x: x.sum().item(),
}


@pytest.mark.parametrize("cause", CAUSES)
def test_c24_one_budget_for_all_regions(cause: str) -> None:
    model, x = Broken(CAUSES[cause]), torch.randn(1024, 32)
    compiled(model, None)(x).backward()
    assert len(gcpass.plans()) >= 2  # `item` is a region of its own
    budget = int(0.7 * gcpass.plans()[0].fastest_peak_bytes)
    start_over()
    function = compiled(model, budget)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    function(x).backward()  # counts what a step runs
    assert gcpass.plans() == ()
    function(x).backward()
    first, *_, last = gcpass.plans()
    assert all(p.step_peak_bytes <= budget for p in gcpass.plans())
    assert last.others_bytes >= first.held_bytes
    assert last.budget_bytes == budget - last.others_bytes
    assert first.recomputations > 0
    assert gcpass.measure(lambda: function(x).backward()) <= budget
    got = train(model, function, (x,)), gradients(model)
    want = train(model, model, (x,)), gradients(model)
    for mine, theirs in zip(got, want, strict=True):
        assert relative(mine, theirs) < EXACT


def test_c24_many_regions() -> None:
    class Many(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(12))

        def forward(self, x: Tensor) -> Tensor:
            x = self.part(x, 0)
            torch._dynamo.graph_break()
            x = self.part(x, 3)
            torch._dynamo.graph_break()
            x = self.part(x, 6)
            torch._dynamo.graph_break()
            return self.part(x, 9).square().mean()

        def part(self, x: Tensor, start: int) -> Tensor:
            for layer in self.layers[start : start + 3]:
                x = torch.tanh(layer(x)).exp().sin()
            return x

    model, x = Many(), torch.randn(2048, 16)
    compiled(model, None)(x).backward()
    # The fastest plans together, each while all before it hold theirs.
    held, top = 0, 0
    for made in gcpass.plans():
        top = max(top, held + made.fastest_peak_bytes)
        held += made.fastest_held_bytes
    start_over()
    budget = int(0.9 * top)
    function = compiled(model, budget)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    function(x).backward()
    function(x).backward()
    others = [made.others_bytes for made in gcpass.plans()]
    assert len(others) == 4
    assert others == sorted(others)
    assert gcpass.measure(lambda: function(x).backward()) <= budget
    got = train(model, function, (x,)), gradients(model)
    want = train(model, model, (x,)), gradients(model)
    for mine, theirs in zip(got, want, strict=True):
        assert relative(mine, theirs) < EXACT


class BrokenInRegion(nn.Module):
    """A break inside of the user's checkpoint region."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for first, last in (self.layers[:2], self.layers[2:]):
            x = checkpoint(self.region, first, last, x, use_reentrant=False)
        return x.square().mean()

    def region(self, first: nn.Module, last: nn.Module, x: Tensor) -> Tensor:
        x = torch.tanh(first(x)).exp()
        torch._dynamo.graph_break()
        return torch.tanh(last(x))


@pytest.mark.parametrize("budget", [None, "min"], ids=str)
def test_c24_a_break_in_a_checkpoint_region(budget: Any) -> None:
    assert difference(BrokenInRegion(), torch.randn(64, 16), budget=budget) < EXACT


class Blocks(nn.Module):
    """Equal blocks, a stem and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(32, 32)
        self.blocks = nn.ModuleList(Block(32, 2) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


@pytest.mark.parametrize("budget", [None, "min"], ids=str)
def test_c24_blocks_compiled_one_by_one(budget: Any) -> None:
    model, x = Blocks(), torch.randn(2, 16, 32)
    eager = copy.deepcopy(model)
    for block in model.blocks:
        block.compile(
            backend="gcpass", options={"memory_budget": budget, "codegen": "eager"}
        )
    for seed in range(2):
        got = train(model, model, (x,), seed=seed)
        want = train(eager, eager, (x,), seed=seed)
        assert relative(got, want) < EXACT
        assert relative(gradients(model), gradients(eager)) < EXACT
    # One plan for all of them, after the one that took the first for all there is.
    assert {p.region for p in store.plans()} == {"0/0"}
    if budget is not None:
        assert [p.executions for p in store.plans()] == [1, len(model.blocks)]


def test_c24_one_function_called_twice_in_a_step() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Mlp()

        def forward(self, x: Tensor) -> Tensor:
            loss: Tensor = self.net(x)
            return loss

    model, x = Twice(), torch.randn(256, 16)
    function, eager = compiled(model, "min"), copy.deepcopy(model)
    loss = function(x) + function(x.sin()) * function(x.cos())
    loss.backward()
    (eager(x) + eager(x.sin()) * eager(x.cos())).backward()
    assert relative(gradients(model), gradients(eager)) < EXACT


def test_c24_backward_in_another_order_than_forward() -> None:
    model, x = Mlp(), torch.randn(256, 16)
    function, eager = compiled(model, "min"), copy.deepcopy(model)
    first, second, third = function(x), function(x * 2), function(x * 3)
    del third  # a forward whose backward never comes
    first.backward()
    second.backward()
    for scale in (1, 2):
        eager(x * scale).backward()
    assert relative(gradients(model), gradients(eager)) < EXACT


def test_c24_a_forward_without_backward_counts_while_it_lives() -> None:
    loss = compiled(Mlp(), "min")(torch.randn(64, 16))
    assert len(step.open_executions()) == 1
    del loss
    assert step.open_executions() == []


def test_c24_training_and_evaluation_in_turns() -> None:
    class Modes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm = nn.Linear(16, 16), nn.BatchNorm1d(16)
            self.drop, self.last = nn.Dropout(0.3), nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            h = self.drop(torch.tanh(self.norm(self.first(x)))).exp()
            return self.last(h).square().mean()

    model, x = Modes(), torch.randn(64, 16)
    function, eager = compiled(model, "min"), copy.deepcopy(model)
    for seed in range(2):
        for training in (True, False):
            model.train(training)
            eager.train(training)
            got = train(model, function, (x,), seed=seed)
            want = train(eager, eager, (x,), seed=seed)
            assert relative(got, want) < EXACT
            assert relative(gradients(model), gradients(eager)) < EXACT
        with torch.no_grad():
            torch.testing.assert_close(function(x), eager(x))
    torch.testing.assert_close(model.norm.running_mean, eager.norm.running_mean)
