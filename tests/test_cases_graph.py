"""Unusual values and operators: subclasses, tuples, objects, higher-order operators.

pytorch#120188 (a subclass beside an input that is written), pytorch#196146 (values
that are no tensors; first cases in test_gradients.py) and pytorch#147879 (operators
with bodies of their own).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

import gcpass
from gcpass import cost, store
from tests.training import (
    EXACT,
    Budget,
    compiled,
    difference,
    plan,
    relative,
    start_over,
)

BUDGETS: list[Budget] = [None, "min"]


# --- subclasses -----------------------------------------------------------------------


def beside_a_write(a: Tensor, y: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    z = torch.exp(torch.tanh(a.sin() @ w))
    y.sin_()
    return (z @ w).cos(), y.cos()


@pytest.mark.parametrize("budget", BUDGETS, ids=str)
def test_c15_wrapper_subclass_beside_a_written_input(budget: Budget) -> None:
    parts = torch.randn(8, 16), torch.randn(8, 16)
    w, y = torch.randn(16, 16), torch.randn(8, 16)
    results = []
    for run in (beside_a_write, compiled(beside_a_write, budget)):
        a = TwoTensor(*(p.clone() for p in parts)).requires_grad_()
        weight, written = w.clone().requires_grad_(), y.clone()
        one, two = run(a, written, weight)
        one.sum().backward()
        assert isinstance(a.grad, TwoTensor)
        results.append([a.grad.a, a.grad.b, weight.grad, one.a, written, two])
    for want, got in zip(*results, strict=True):
        torch.testing.assert_close(got, want)
    plan()


@pytest.mark.parametrize("budget", ["min"])
def test_c15_jagged_tensor_beside_a_written_input(budget: Budget) -> None:
    def function(a: Tensor, y: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        z = torch.tanh(F.linear(a.sin(), w)).exp()
        y.sin_()
        return F.linear(z, w).cos(), y.cos()

    rows = [torch.randn(n, 16) for n in (3, 5, 2)]
    w, y = torch.randn(16, 16), torch.randn(8, 16)
    results = []
    for run in (function, compiled(function, budget)):
        a = torch.nested.nested_tensor(rows, layout=torch.jagged, requires_grad=True)
        weight, written = w.clone().requires_grad_(), y.clone()
        one, two = run(a, written, weight)
        one.values().sum().backward()
        results.append([a.grad.values(), weight.grad, one.values(), written, two])
    for want, got in zip(*results, strict=True):
        torch.testing.assert_close(got, want)
    plan()


# --- values that are no tensors, and tuples -------------------------------------------


def extremes(x: Tensor) -> tuple[Tensor, Tensor]:
    if torch.__version__ < (2, 12):  # aminmax has no derivative there
        return x.amin(dim=1), x.amax(dim=1)
    return torch.aminmax(x, dim=1)


class Pieces(nn.Module):
    """Lists of views, tuples of results, items that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16) / 4)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(x @ self.weight).exp()
        a, b = h.chunk(2, dim=1)
        rows = torch.unbind(h)
        first, _, last = torch.split(h, [3, 2, h.shape[0] - 5])
        values, _ = torch.topk(h, 4)
        low, high = extremes(h)
        deviation, mean = torch.std_mean(h, dim=1)
        ordered, order = torch.sort(h, dim=1)
        norm = torch.linalg.vector_norm(h)
        total = (a * b).sum() + rows[1].sum() * rows[2].square().sum() + norm
        total = total + (first.sum() * last.square().sum()) + values.square().sum()
        total = total + (high - low + deviation * mean).square().sum()
        return total + (ordered * order).sum()


class Decompositions(nn.Module):
    """Operators that return several tensors, one of them for the backward only."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(8) + torch.randn(8, 8) / 8)

    def forward(self, x: Tensor) -> Tensor:
        gram = self.weight @ self.weight.t() + torch.eye(8)
        factor = torch.linalg.cholesky(gram)
        solved = torch.linalg.solve_triangular(factor, x, upper=False)
        sign, logarithm = torch.linalg.slogdet(gram)
        q, r = torch.linalg.qr(torch.tanh(solved) + torch.eye(8))
        pooled, _ = F.max_pool1d(solved[None], 2, return_indices=True)
        return q.sum() * logarithm * sign + r.square().sum() + pooled.exp().sum()


class Indexed(nn.Module):
    """Gathers and scatters by computed positions, and masks."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(32, 16, padding_idx=0)
        self.bag = nn.EmbeddingBag(32, 16, mode="mean")
        self.weight = nn.Parameter(torch.randn(16, 16) / 4)

    def forward(self, ids: Tensor) -> Tensor:
        h = torch.tanh(self.table(ids) @ self.weight).exp()
        best = h.argmax(-1, keepdim=True)
        h = h + torch.zeros_like(h).scatter_add(-1, best, h.gather(-1, best))
        h = torch.where(h > 1, h.log(), h.masked_fill(h < 0.5, 0.25))
        summed = torch.zeros(4, 16).index_add(0, ids[:, 0] % 4, h.sum(1))
        return (h @ self.weight).square().mean() + (self.bag(ids) * summed.sum()).mean()


KINDS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "pieces": lambda: (Pieces(), torch.randn(8, 16)),
    "decompositions": lambda: (Decompositions(), torch.randn(8, 8)),
    "indexed": lambda: (Indexed(), torch.randint(0, 32, (4, 8))),
}


@pytest.mark.parametrize("kind", KINDS)
def test_c16_tuples_and_positions(kind: str) -> None:
    model, x = KINDS[kind]()
    for budget in BUDGETS:
        start_over()
        assert difference(model, x, budget=budget) < 1e-5


library = torch.library.Library("gcpass_tests", "FRAGMENT")
library.define("multiples(Tensor x, int[] factors) -> (Tensor[], Tensor)")
library.impl("multiples", lambda x, factors: ([x * f for f in factors], -x), "CPU")


@torch.library.register_fake("gcpass_tests::multiples")
def _(x: Tensor, factors: list[int]) -> tuple[list[Tensor], Tensor]:
    return [torch.empty_like(x) for _ in factors], torch.empty_like(x)


def _multiples_context(ctx: Any, inputs: tuple[Tensor, list[int]], output: Any) -> None:
    ctx.factors = inputs[1]


def _multiples_backward(
    ctx: Any, gradients: list[Tensor], negative: Tensor
) -> tuple[Tensor, None]:
    pairs = zip(gradients, ctx.factors, strict=True)
    return sum((g * f for g, f in pairs), start=-negative), None


torch.library.register_autograd(
    "gcpass_tests::multiples", _multiples_backward, setup_context=_multiples_context
)


@pytest.fixture
def multiples_may_run_again() -> Iterator[None]:
    operator = torch.ops.gcpass_tests.multiples.default
    gcpass.register_cost(operator, lambda x, factors, out: x.numel() * len(factors))
    yield
    cost.unregister_cost(operator)


class Lists(nn.Module):
    """An operator that returns a list of tensors and another tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16) / 4)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            h = torch.tanh(x @ self.weight)
            (a, b), c = torch.ops.gcpass_tests.multiples(h, [1, 3])
            x = torch.tanh(a * b * c).exp()
        return x.square().mean()


def test_c16_operators_that_return_lists() -> None:
    for budget in BUDGETS:
        start_over()
        assert difference(Lists(), torch.randn(8, 16), budget=budget) < EXACT


@pytest.mark.usefixtures("multiples_may_run_again")
def test_c16_lists_that_are_computed_again() -> None:
    assert difference(Lists(), torch.randn(512, 16), budget="min") < EXACT
    again = [v for v in plan().values if v.recompute_positions]
    assert any(v.name.startswith(("multiples", "getitem")) for v in again)


def test_c16_results_that_need_no_gradient() -> None:
    def function(x: Tensor) -> tuple[Any, ...]:
        h = torch.tanh(x).exp()
        return h.argmax(), None, 3, h.detach(), h.square().sum(), x.shape, h > 1

    for budget in BUDGETS:
        start_over()
        x = torch.randn(8, 16, requires_grad=True)
        got, want = compiled(function, budget)(x), function(x)
        assert got[1:3] == (None, 3)
        assert got[5] == x.shape
        assert not got[3].requires_grad
        for i in (0, 3, 4, 6):
            torch.testing.assert_close(got[i], want[i])
        (mine,) = torch.autograd.grad(got[4], x)
        (theirs,) = torch.autograd.grad(want[4], x)
        assert relative(mine, theirs) < EXACT


# --- operators with bodies ------------------------------------------------------------


class Branches(nn.Module):
    """A branch that depends on data, with a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)).exp()
            x = torch.cond(x.sum() > 150, lambda v: v.sin(), lambda v: v.cos(), (x,))
        return x.square().mean()


class Rows(nn.Module):
    """A map over rows."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16) / 4)

    def forward(self, x: Tensor) -> Tensor:
        from torch._higher_order_ops.map import map as map_rows

        rows = map_rows(lambda row: torch.tanh(row @ self.weight).exp(), x)
        return (rows @ self.weight).square().mean()


class Nested(nn.Module):
    """Checkpoint regions inside of a checkpoint region."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.outer, x, use_reentrant=False)
        return (self.layers[3](x)).square().mean()

    def outer(self, x: Tensor) -> Tensor:
        for layer in self.layers[:3]:
            x = checkpoint(self.inner, layer, x, use_reentrant=False)
        return torch.sin(x)

    def inner(self, layer: nn.Module, x: Tensor) -> Tensor:
        return torch.tanh(layer(x)).exp()


class Shared(nn.Module):
    """A block that is compiled once and called three times."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.block(layer.weight, x)
        return x.square().mean()

    @staticmethod
    @torch.compiler.nested_compile_region
    def block(weight: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(x @ weight).exp()


BODIES: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "cond": lambda: (Branches(), torch.randn(8, 16)),
    "map": lambda: (Rows(), torch.randn(4, 8, 16)),
    "nested_checkpoint": lambda: (Nested(), torch.randn(8, 16)),
    "invoke_subgraph": lambda: (Shared(), torch.randn(8, 16)),
}


@pytest.mark.parametrize("kind", BODIES)
def test_c17_operators_with_bodies(kind: str) -> None:
    model, x = BODIES[kind]()
    for budget in BUDGETS:
        start_over()
        assert difference(model, x, budget=budget) < EXACT
        assert store.plans()
