"""Small models of publicly reported faults of activation planning, and what is right.

Read by known_cases.py. A case is judged against the same model in eager mode, except
where draws or roundings of a compiler are its own: then against what the forward says.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_gather_tensor
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

Function = Callable[..., Any]
ROWS, WIDTH = 2048, 64


def total(outputs: Any) -> Tensor:
    """Return a scalar loss of a model's outputs."""
    found = outputs if isinstance(outputs, tuple) else (outputs,)
    terms = [t if t.dim() == 0 else t.square().mean() for t in found if t.requires_grad]
    return sum(terms[1:], terms[0])


def vector(tensors: Iterable[Tensor | None]) -> Tensor:
    """Return all numbers of some tensors, wrapped and complex ones too, in a row."""
    found = [t.detach() for t in tensors if t is not None]
    parts = [
        p for t in found for p in ((t.a, t.b) if isinstance(t, TwoTensor) else [t])
    ]
    real = [torch.view_as_real(p) if p.is_complex() else p for p in parts]
    return torch.cat([p.flatten().double() for p in real])


def distance(
    value: Iterable[Tensor | None], expected: Iterable[Tensor | None]
) -> float:
    """Return the norm of the difference relative to the norm of the expected."""
    found, right = vector(value), vector(expected)
    return float((found - right).norm() / right.norm().clamp_min(1e-30))


def gradients(model: nn.Module) -> list[Tensor | None]:
    """Return the gradients of a model's parameters."""
    return [p.grad for p in model.parameters()]


def against_eager(
    eager: nn.Module, model: nn.Module, function: Function, inputs: tuple[Any, ...]
) -> float:
    """Return the largest relative error of losses, gradients, buffers and inputs."""
    errors: list[float] = []
    mine, theirs = ([x.clone() for x in inputs] for _ in range(2))
    for _ in range(2):
        losses = []
        for net, run, given in ((eager, eager, theirs), (model, function, mine)):
            net.zero_grad()
            loss = total(run(*given))
            loss.backward()
            losses.append(loss)
        pairs = [(losses[1:], losses[:1]), (gradients(model), gradients(eager))]
        errors += [distance(*pair) for pair in pairs]
    written = zip((*model.buffers(), *mine), (*eager.buffers(), *theirs), strict=True)
    return largest(errors + [distance([got], [want]) for got, want in written])


def largest(errors: Sequence[float]) -> float:
    """Return the largest error; NaN is larger than all numbers."""
    return max(errors, key=lambda e: math.inf if math.isnan(e) else e)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A reported fault.

    Attributes:
        name: number of the case.
        report: where it was reported.
        fault: what goes wrong.
        make: returns the model and its inputs.
        error: (eager copy, model, its compiled function, inputs) -> relative error.
        tolerance: the largest relative error that is rounding.
        counted: operator that must not run more often than in eager mode.
    """

    name: str
    report: str
    fault: str
    make: Callable[[], tuple[nn.Module, tuple[Any, ...]]]
    error: Callable[..., float] = against_eager
    tolerance: float = 1e-4
    counted: str | None = None


class Loss(nn.Sequential):
    """Layers in a row and the mean square of what comes out."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the loss."""
        result: Tensor = super().forward(x)
        return result.float().square().mean()


class Apply(nn.Module):
    """A function of the input as a layer, with a weight if the function takes one."""

    def __init__(self, function: Function, *shape: int) -> None:
        super().__init__()
        self.function = function
        scale = shape[0] ** -0.5 if shape else 1.0
        self.weight = nn.Parameter(torch.randn(*shape) * scale) if shape else None

    def forward(self, *inputs: Any) -> Any:
        """Return what the function returns."""
        return self.function(*inputs, *([] if self.weight is None else [self.weight]))


def rows() -> tuple[Tensor]:
    """Return the usual input."""
    return (torch.randn(ROWS, WIDTH),)


def linear(inside: int = WIDTH, out: int = WIDTH) -> nn.Linear:
    """Return a linear layer without bias."""
    return nn.Linear(inside, out, bias=False)


# --- draws ----------------------------------------------------------------------------


class Dropped(nn.Module):
    """Dropout of sin(x), and a layer that returns its dropped hidden state."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.ones(ROWS, WIDTH))
        self.last = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return both dropped values and the result of the layer."""
        first = F.dropout(torch.sin(self.start), 0.5) * 2
        hidden = F.dropout(torch.relu(x + 2).exp(), 0.5)
        return first, hidden, hidden @ self.last


def masks_agree(
    eager: nn.Module, model: nn.Module, function: Function, inputs: Any
) -> float:
    """Return the error of gradients against the masks that the forward shows."""
    del eager
    first, hidden, result = function(*inputs)
    (first.sum() + result.sum()).backward()
    kept = (first != 0) * 4.0 * torch.cos(torch.ones_like(first))
    product = hidden.t() @ torch.ones_like(result)
    pairs = zip(gradients(model), (kept, product), strict=True)
    return largest([distance([got], [want]) for got, want in pairs])


class Attention(nn.Module):
    """Causal self-attention that drops nothing, with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.merge, self.split = linear(), linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return the residual stream."""
        heads = self.split(x).unflatten(0, (8, -1)).unflatten(-1, (12, -1))
        q, k, v = heads.transpose(1, 2).chunk(3, dim=1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.merge(y.transpose(1, 2).reshape(x.shape))


# --- writes ---------------------------------------------------------------------------


class ReadThenWritten(nn.Module):
    """A buffer is read and then moved in the same forward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))
        self.register_buffer("state", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Return the loss."""
        h = torch.sin(x + self.state) * self.weight
        self.state.add_(1)
        return torch.tanh(torch.exp(h)).sum()


def keep(*operators: Any) -> Function:
    """Return a context for `checkpoint` that saves these operators and no others."""

    def policy(ctx: Any, operator: Any, *args: Any, **named: Any) -> CheckpointPolicy:
        saved = operator in operators
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.MUST_RECOMPUTE

    return functools.partial(create_selective_checkpoint_contexts, policy)


class Kept(nn.Module):
    """A function or module in a checkpoint region that saves some operators."""

    def __init__(self, inside: nn.Module, *operators: Any) -> None:
        super().__init__()
        self.inside, self.context = inside, keep(*operators)

    def forward(self, *inputs: Any) -> Any:
        """Return what the inside returns."""
        return checkpoint(
            self.inside, *inputs, use_reentrant=False, context_fn=self.context
        )


def changed_in_place(x: Tensor, w: Tensor) -> Tensor:
    """Return a product, changed in place and squashed."""
    y = F.elu_((x @ w).clone())
    return torch.sigmoid(y) * y.tanh()


def two_products(x: Tensor, w: Tensor) -> Tensor:
    """Return the usual function of reports on regions that save products."""
    return torch.cos(torch.sigmoid(torch.sigmoid(x @ w) @ w))


# --- costs and odd values -------------------------------------------------------------


class Residual(nn.Sequential):
    """Layers in a row around which the input goes as well."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the residual stream."""
        result: Tensor = x + super().forward(x)
        return result


class Gated(nn.Module):
    """A norm and a gated product of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.layers = nn.ModuleList(linear(WIDTH, 2 * WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """Return the hidden state."""
        gate, up = (layer(self.norm(x)) for layer in self.layers)
        return F.silu(gate) * up


class LowPrecision(Loss):
    """Linear layers under bfloat16 autocast."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the loss."""
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


def scaled(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Return a value and what is computed from it."""
    y = F.layer_norm(x, (WIDTH,)) * 2
    return y @ w, torch.tanh(y @ w).exp().sum()


SLOW = "known_cases::slow"  # returns x * 2; what that costs is not known to torch
torch.library.define(SLOW, "(Tensor x) -> Tensor")
torch.library.impl(SLOW, "cpu", lambda x: x * 2)
torch.library.register_fake(SLOW, torch.empty_like)
torch.library.register_autograd(SLOW, lambda ctx, gradient: gradient * 2)
slow = torch.ops.known_cases.slow.default


class Remembers(torch.autograd.Function):
    """Keeps a float, nothing and a tuple of integers for its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Return a multiple of x."""
        ctx.values = (1.5, None, (2, 3))
        return x * 9

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """Return the gradient times the product of what was kept."""
        scale, _, (first, second) = ctx.values
        return gradient * scale * first * second


class Beside(nn.Module):
    """A wrapper subclass beside an input that is written."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 8)

    def forward(self, a: Tensor, y: Tensor) -> Tensor:
        """Return a value computed from a; y is written."""
        z = torch.exp(torch.tanh(a.sin() @ self.weight))
        y.sin_()
        return (z @ self.weight).cos()


class Branch(nn.Module):
    """A layer and a branch that depends on data."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()

    def forward(self, x: Tensor) -> Tensor:
        """Return the result of one of two branches."""
        h = torch.tanh(self.layer(x)).exp()
        return torch.cond(h.sum() > 0, lambda v: v.sin(), lambda v: v.cos(), (h,))


def divided_by_sizes(x: Tensor, w: Tensor) -> Tensor:
    """Return a loss in which sizes are factors."""
    batch, length, _ = x.shape
    h = torch.tanh(x.flatten(0, 1) @ w).view(batch, length, -1) / length
    return (h.exp().mean(1) * batch).square().sum()


def three_shapes(
    eager: nn.Module, model: nn.Module, function: Function, inputs: Any
) -> float:
    """Return the largest error over inputs of several sizes."""
    errors = [against_eager(eager, model, function, inputs)]
    for batch, length in ((4, 8), (6, 10), (5, 5)):
        x = torch.randn(batch, length, WIDTH)
        torch._dynamo.mark_dynamic(x, 0)
        torch._dynamo.mark_dynamic(x, 1)
        errors.append(against_eager(eager, model, function, (x,)))
    return largest(errors)


class Gathered(nn.Module):
    """Parts of weights are gathered from all ranks where they are used."""

    def __init__(self) -> None:
        super().__init__()
        if not dist.is_initialized():
            store = dist.HashStore()
            dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        self.start = nn.Parameter(torch.randn(WIDTH))
        self.register_buffer("parts", torch.randn(2, WIDTH, WIDTH) / 8)

    def forward(self, x: Tensor) -> Tensor:
        """Return the loss."""
        x = x + self.start
        for part in self.parts:
            x = torch.tanh(x @ all_gather_tensor(part * 1, 0, dist.group.WORLD)).exp()
        return x.mean()


class Break(nn.Module):
    """Something that Dynamo does not follow."""

    def forward(self, x: Tensor) -> Tensor:
        """Return x."""
        torch._dynamo.graph_break()
        return x


class Routed(nn.Module):
    """Rows of a table, chosen by the low bits of a normalised value."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.table = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the chosen rows and which they are."""
        h = F.rms_norm(x, (WIDTH,), self.scale)
        chosen = torch.round(h * 64).long() % WIDTH
        return self.table[chosen] * h.detach().sign(), chosen


def routes_agree(
    eager: nn.Module, model: nn.Module, function: Function, inputs: Any
) -> float:
    """Return the error of the table's gradient for the rows that the forward chose."""
    rows_of, chosen = function(*inputs)
    rows_of.sum().backward()
    signs = F.rms_norm(inputs[0], (WIDTH,)).sign().flatten()
    want = torch.zeros(WIDTH).index_add(0, chosen.flatten(), signs)
    return distance([model.table.grad], [want])


def filtered(x: Tensor, w: Tensor) -> Tensor:
    """Return products in the frequency domain."""
    for _ in range(3):
        x = torch.fft.irfft(torch.fft.rfft(x) * torch.fft.rfft(w)).tanh()
    return x.square().mean()


class Upsampled(nn.Module):
    """A residual block and nearest upsampling between convolutions, channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(16, 16, 3, padding=1) for _ in range(4))
        self.skip = nn.Conv2d(16, 16, 1)
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        """Return the loss."""
        h = self.convs[0](x)
        deep = self.convs[2](F.silu(self.convs[1](F.silu(h))))
        h = F.interpolate((self.skip(h) + deep) / 1.0, scale_factor=2.0, mode="nearest")
        return self.convs[3](h).sin().mean()


PRODUCT = torch.ops.aten.mm.default
FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
