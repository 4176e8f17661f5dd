"""Sizes that are symbols: bound where the backward needs them, one plan for all.

pytorch#185473, pytorch#128338 and pytorch#155468: the backward refers to a size that
was never passed to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gcpass import store
from tests.nets import LanguageModel
from tests.training import EXACT, Budget, compiled, plan, relative, start_over

BUDGETS: list[Budget] = [None, "min"]


def agrees(
    net: nn.Module, function: Callable[..., Tensor], inputs: Sequence[Sequence[Any]]
) -> None:
    """Check loss and gradients against eager for each of the inputs."""
    for given in inputs:
        losses, found = [], []
        for run in (net, function):
            net.zero_grad()
            leaves = [x for x in given if isinstance(x, Tensor) and x.requires_grad]
            for leaf in leaves:
                leaf.grad = None
            loss = run(*given)
            loss.backward()
            losses.append(loss.detach())
            found.append([x.grad for x in (*net.parameters(), *leaves)])
        assert relative(losses[1], losses[0]) < EXACT
        for want, mine in zip(*found, strict=True):
            if want is not None:
                assert relative(mine, want) < EXACT


class Lengths(nn.Module):
    """Reshapes, means and divisions by sizes that are symbols."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        batch, length, width = x.shape
        h = torch.tanh(self.first(x.reshape(batch * length, width)))
        h = h.reshape(batch, length, width) / length + bias.sum() / bias.shape[0]
        return (self.last(h).mean(1) * batch).square().sum() / length


@pytest.mark.parametrize("budget", BUDGETS, ids=str)
def test_c18_symbolic_sizes(budget: Budget) -> None:
    # pytorch#185473; the second input's size equals the first's length.
    net = Lengths()
    function = compiled(net, budget)
    for batch, length in ((4, 8), (6, 10), (3, 12), (5, 5)):
        x, bias = torch.randn(batch, length, 16), torch.randn(length)
        for dimension in range(2):
            torch._dynamo.mark_dynamic(x, dimension)
        torch._dynamo.mark_dynamic(bias, 0)
        net.zero_grad()
        function(x, bias).backward()
        got = [p.grad for p in net.parameters()]
        net.zero_grad()
        net(x, bias).backward()
        for mine, parameter in zip(got, net.parameters(), strict=True):
            assert mine is not None
            assert parameter.grad is not None
            assert relative(mine, parameter.grad) < EXACT
    plan()  # one plan for all shapes


class Sizes(nn.Module):
    """Products, quotients and comparisons of sizes that only the backward needs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16) / 4)

    def forward(self, x: Tensor, factor: float, rows: int) -> Tensor:
        batch, length = x.shape[:2]
        h = torch.tanh(x.flatten(0, 1) @ self.weight).exp()
        h = torch.cat([h, h[: batch * length // 2]]) * (length / batch)
        h = F.pad(h, (0, 0, 0, rows)).unflatten(1, (4, 4)) * factor
        h = h.expand(batch, *h.shape).sum(0) / h.numel()
        return h.square().sum() + x.sin().mean((0, 1)).square().sum()


def test_c18_sizes_in_arithmetic() -> None:
    net = Sizes()
    function = torch.compile(
        net,
        backend="gcpass",
        dynamic=True,
        fullgraph=True,
        options={
            "memory_budget": "min",
            "codegen": "eager",
            "on_infeasible": "min",
        },
    )
    given = [
        (torch.randn(b, n, 16, requires_grad=True), 0.5 * r, r)
        for b, n, r in ((4, 8, 3), (6, 10, 5), (5, 5, 7), (7, 3, 2))
    ]
    agrees(net, function, given)
    assert len(store.plans()) <= 2  # a float that changes is compiled again


class Equal(nn.Module):
    """Inputs of equal sizes: one symbol stands for several."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16) / 4)

    def forward(self, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        h = torch.tanh(x @ self.weight) + y
        gram = (h @ h.t()).softmax(-1)
        h = gram @ torch.tanh(z @ self.weight) / y.shape[0]
        return (h.exp() / z.shape[0]).view(-1, 4).mean(0).square().sum()


def test_c18_equal_sizes() -> None:
    for budget in BUDGETS:
        start_over()
        net = Equal()
        function = compiled(net, budget)
        given = []
        for rows in (8, 12, 20):
            inputs = [torch.randn(rows, 16) for _ in range(3)]
            for x in inputs:
                torch._dynamo.mark_dynamic(x, 0)
            given.append(inputs)
        agrees(net, function, given)
        plan()


def test_c18_a_language_model_of_any_length() -> None:
    net = LanguageModel(depth=1)
    function = compiled(net, 0.5)
    given = []
    for batch, length in ((2, 16), (3, 24), (4, 8)):
        ids = torch.randint(0, 64, (batch, length))
        for dimension in range(2):
            torch._dynamo.mark_dynamic(ids, dimension)
        given.append([ids])
    agrees(net, function, given)
    plan()


class Counted(nn.Module):
    """Sizes that only the data tells."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.weight = nn.Parameter(torch.randn(16, 16) / 4)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(x @ self.weight).exp()
        if self.kind == "mask":
            h = h[x[:, 0] > 0].tanh() @ self.weight
        elif self.kind == "nonzero":
            rows = (x[:, 0] > 0).nonzero().squeeze(1)
            h = h[rows].sin() * rows.shape[0]
        elif self.kind == "item":
            count = int((x[:, 0] > 0).sum())
            torch._check(count <= x.shape[0])
            h = h.narrow(0, 0, count).sin() * count
        else:
            times = (x[:, 0] > 0).long()
            h = torch.repeat_interleave(h, times, dim=0).cos()
        return h.square().sum()


@pytest.mark.parametrize("kind", ["mask", "nonzero", "item", "repeat"])
def test_c18_sizes_that_only_the_data_tells(kind: str) -> None:
    config = torch._dynamo.config
    capture = {
        "capture_dynamic_output_shape_ops": True,
        "capture_scalar_outputs": True,
    }
    with config.patch(**capture):
        net = Counted(kind)
        function = compiled(net, "min")
        agrees(net, function, [[torch.randn(32, 16)], [torch.randn(32, 16)]])
        plan()


class Integers(nn.Module):
    """A python number that is an input of the region, read by the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16) / 4)

    def forward(self, x: Tensor, power: int) -> Tensor:
        h = torch.tanh(x @ self.weight).exp() * power
        return (h.roll(power, 0) * h).sin().sum() / power


@pytest.mark.parametrize("budget", [None, "min"], ids=str)
def test_c18_numbers_that_become_symbols(budget: Budget) -> None:
    net = Integers()
    function = compiled(net, budget)
    agrees(net, function, [[torch.randn(8, 16), n] for n in (2, 3, 5, 6)])
    assert len(store.plans()) <= 3


@pytest.mark.slow
@pytest.mark.inductor
def test_inductor_with_symbolic_sizes() -> None:
    net = Equal()
    function = compiled(net, "min", codegen="inductor")
    for rows in (8, 12):
        inputs = [torch.randn(rows, 16) for _ in range(3)]
        for x in inputs:
            torch._dynamo.mark_dynamic(x, 0)
        net.zero_grad()
        function(*inputs).backward()
        got, net.weight.grad = net.weight.grad, None
        net(*inputs).backward()
        assert got is not None
        assert net.weight.grad is not None
        assert relative(got, net.weight.grad) < 1e-5
    plan()
