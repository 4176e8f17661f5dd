"""Joint graphs of symbolic and of fixed sizes, on devices that need not be there."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)

from gcpass.capture import Capture, capture
from gcpass.cost_model import Roofline
from gcpass.hardware import find_device
from gcpass.sizes import tensors_in
from gcpass.solvers.liveness import Profile, simulate
from gcpass.solvers.problem import OpId, Phase, Plan
from gcpass.symbolic import PlanFunctions, plan_functions

RATES = dataclasses.replace(find_device("A100"), multiprocessors=0)
"""Prices by FLOPs and bytes alone: the plans that the expected texts were written for.
With tiles and waves another plan is made, whose function has more terms."""

Make = Callable[..., Tensor]
Net = tuple[Callable[..., list[Tensor]], Callable[..., Tensor]]
"""(sizes, make) -> parameters, and (frame, parameters) -> output. A frame is an empty
tensor whose sizes are the symbols."""


@cache
def joint(
    net: Net,
    sizes: tuple[int, ...],
    *,
    symbolic: bool,
    device: str = "cpu",
    fuses: bool = True,
) -> Capture:
    """Return the capture of a net's forward and backward."""
    env = ShapeEnv() if symbolic else None
    mode = FakeTensorMode(shape_env=env)
    dynamic = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * len(sizes))
    frame = mode.from_tensor(
        torch.empty(sizes), symbolic_context=dynamic if symbolic else None
    )
    parameters_of, function = net

    def make(*shape: Any, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, requires_grad=True)

    def both(frame: Tensor, *given: Any) -> list[Tensor]:
        *parameters, tangents_1 = given
        out = function(frame, *parameters)
        return [out, *torch.autograd.grad(out, parameters, tangents_1)]

    with mode:
        parameters = parameters_of(*frame.shape, make)
        out = function(frame, *parameters)
        graph = make_fx(_named(both, len(parameters)))(
            frame, *parameters, torch.empty_like(out).detach()
        ).graph
    graph.eliminate_dead_code()
    for node in graph.nodes:
        for tensor in tensors_in(node.meta.get("val")):
            tensor.fake_device = torch.device(device)  # autograd asks for a real one
    return capture(
        graph,
        num_fwd_outputs=1,
        mutated=frozenset(),
        costs=Roofline(RATES),
        fuses=fuses,
        follow_hints=False,
    )


def _named(both: Callable[..., Any], count: int) -> Callable[..., Any]:
    """Return the function with the names of arguments that mark a tangent."""
    names = ", ".join(f"primals_{i}" for i in range(1, count + 1))
    space: dict[str, Any] = {"both": both}
    text = f"lambda frame, {names}, tangents_1: both(frame, {names}, tangents_1)"
    result: Callable[..., Any] = eval(text, space)
    return result


def once(captured: Capture) -> tuple[Plan, Profile]:
    """Return the plan that runs every operation once, as eager mode does."""
    operations = captured.problem.operations
    forward = [i for i, o in enumerate(operations) if o.phase is Phase.FORWARD]
    backward = [i for i, o in enumerate(operations) if o.phase is not Phase.FORWARD]
    sequence = tuple(map(OpId, (*forward, *backward)))
    profile = simulate(captured.problem, sequence, len(forward))
    plan = Plan(
        sequence=sequence,
        boundary=len(forward),
        cost_seconds=profile.cost_seconds,
        peak_bytes=profile.peak_bytes,
        origin="test",
    )
    return plan, profile


def functions_of(captured: Capture, plan: Plan) -> PlanFunctions:
    """Return a plan's numbers as functions of symbols."""
    profile = simulate(captured.problem, plan.sequence, plan.boundary)
    return plan_functions(captured, plan, profile, profile.peak_bytes)


# --- nets -----------------------------------------------------------------------------


def _chain_parameters(batch: Any, length: Any, make: Make) -> list[Tensor]:
    return [make(batch, length, 16), *(make(16, 16) for _ in range(6))]


def _chain(frame: Tensor, x: Tensor, *weights: Tensor) -> Tensor:
    for weight in weights:
        x = torch.tanh(x @ weight).exp() * x
        x = (x @ x.transpose(1, 2)).softmax(-1) @ x
    rows = x.shape[1] // 2
    return (x.narrow(1, 0, rows).sum(1) / frame.shape[0]).square().sum()


CHAIN: Net = (_chain_parameters, _chain)
"""Sizes: batch, length. Sums over half of the rows: a size that is rounded down."""


def _convolutions_parameters(batch: Any, side: Any, make: Make) -> list[Tensor]:
    return [make(batch, 4, side, side), make(8, 4, 3, 3), make(8, 8, 3, 3)]


def _convolutions(frame: Tensor, x: Tensor, *weights: Tensor) -> Tensor:
    for weight in weights:
        x = F.relu(F.conv2d(x, weight, stride=2, padding=1))
    return x.square().sum()


CONVOLUTIONS: Net = (_convolutions_parameters, _convolutions)
"""Sizes: batch, side."""


def _attention_parameters(batch: Any, length: Any, make: Make) -> list[Tensor]:
    return [make(batch, length, 32), make(32, 96), make(32)]


def _attention(frame: Tensor, x: Tensor, qkv: Tensor, gain: Tensor) -> Tensor:
    batch, length = frame.shape
    shape = (batch, length, 4, 8)
    q, k, v = (
        y.view(shape).transpose(1, 2)
        for y in (F.layer_norm(x, [32], gain) @ qkv).chunk(3, -1)
    )
    for causal in (False, True):
        q = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    return F.gelu(q.cumsum(1)).amax(-1).square().sum()


ATTENTION: Net = (_attention_parameters, _attention)
"""Sizes: batch, length."""


def _block_parameters(s: Any, b: Any, a: Any, d: Any, make: Make) -> list[Tensor]:
    h = a * d
    shapes = ((s, b, h), (h, 3 * h), (h, h), (h, 4 * h), (4 * h, h))
    return [make(*shape, dtype=torch.float16) for shape in shapes]


def _block(
    frame: Tensor, x: Tensor, qkv: Tensor, out: Tensor, up: Tensor, down: Tensor
) -> Tensor:
    s, b, a, d = frame.shape
    h = a * d

    def dropout(y: Tensor) -> Tensor:
        return torch.native_dropout(y, 0.1, True)[0]

    def heads(y: Tensor) -> Tensor:
        return y.reshape(s, b * a, d).transpose(0, 1)

    q, k, v = map(heads, (F.layer_norm(x, [h]) @ qkv).chunk(3, -1))
    scores = torch.bmm(q, k.transpose(1, 2)) / 2.0
    mixed = torch.bmm(dropout(scores.softmax(-1)), v)
    x = x + dropout(mixed.transpose(0, 1).reshape(s, b, h) @ out)
    return x + dropout(F.gelu(F.layer_norm(x, [h]) @ up) @ down)


BLOCK: Net = (_block_parameters, _block)
"""The transformer layer of Korthikanti et al. (2022), fig. 2, in half precision.

Sizes: sequence s, batch b, heads a, width of a head; h is their product."""
