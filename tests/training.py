"""Training steps of two copies of a model, one eager; gradients, peaks and counts."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.profiler import profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    create_selective_checkpoint_contexts,
)

from gcpass import step, store
from gcpass.decisions import RegionPlan

Budget = int | float | str | None
EXACT = 2e-6  # float32, the same kernels in another order
PRODUCT = torch.ops.aten.mm.default


def compiled(
    model: Callable[..., Any], budget: Budget = None, **options: object
) -> Callable[..., Any]:
    """Return the model compiled without code generation, which takes no time.

    Args:
        model: module or function.
        budget: a fraction takes the floor where that is larger.
        options: further options; they win.
    """
    chosen: dict[str, object] = {"memory_budget": budget, "codegen": "eager"}
    if isinstance(budget, float):
        chosen["on_infeasible"] = "min"
    result: Callable[..., Any] = torch.compile(
        model, backend="gcpass", options={**chosen, **options}
    )
    return result


def start_over() -> None:
    """Forget what was compiled, planned and run."""
    torch._dynamo.reset()
    store.clear()
    step.forget()


def plan() -> RegionPlan:
    """Return the only plan."""
    (only,) = store.plans()
    return only


def relative(value: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference relative to the norm of the expected."""
    a, b = _flat(value), _flat(expected)
    return float((a - b).norm() / b.norm().clamp_min(1e-30))


def difference(
    model: nn.Module,
    *inputs: Any,
    budget: Budget = None,
    steps: int = 1,
    autocast: bool = False,
    loss: Callable[..., Tensor] | None = None,
    **options: object,
) -> float:
    """Return how far training with gcpass is from eager, as a relative norm.

    The largest of: the loss of each step, all gradients together, each buffer. Both
    copies draw from the same seeds; inputs are cloned, as a model may write them.

    Args:
        model: left as it is.
        inputs: of the model.
        budget: memory budget.
        steps: how many steps, without an update in between.
        autocast: run the forward under bfloat16 autocast.
        loss: (function, inputs) -> loss; calls the function when None.
        options: further options of the backend.
    """
    ours, eager = copy.deepcopy(model), copy.deepcopy(model)
    function = compiled(ours, budget, **options)
    mine, theirs = copy.deepcopy(inputs), copy.deepcopy(inputs)
    worst = 0.0
    for seed in range(steps):
        got = train(ours, function, mine, seed=seed, autocast=autocast, loss=loss)
        want = train(eager, eager, theirs, seed=seed, autocast=autocast, loss=loss)
        worst = max(worst, relative(got, want))
        worst = max(worst, relative(gradients(ours), gradients(eager)))
    for a, b in zip(ours.buffers(), eager.buffers(), strict=True):
        worst = max(worst, relative(a, b))
    for a, b in zip(mine, theirs, strict=True):
        if isinstance(a, Tensor):
            worst = max(worst, relative(a, b))
    return worst


def train(
    model: nn.Module,
    function: Callable[..., Any],
    inputs: tuple[Any, ...],
    *,
    seed: int = 0,
    autocast: bool = False,
    loss: Callable[..., Tensor] | None = None,
) -> Tensor:
    """Run forward and backward with fresh gradients and return the loss."""
    model.zero_grad()
    torch.manual_seed(seed)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        value: Tensor = function(*inputs) if loss is None else loss(function, *inputs)
    value.backward()
    return value.detach()


def gradients(model: nn.Module) -> Tensor:
    """Return all gradients in one double vector."""
    found = [p.grad for p in model.parameters() if p.grad is not None]
    return torch.cat([_flat(g) for g in found])


def held_bytes(run: Callable[[], Tensor]) -> int:
    """Return the bytes that torch's allocator holds more after a forward."""
    with profile(use_cpu=True, profile_memory=True, use_kineto=True) as profiler:
        result = run()
    del result  # alive until here
    events = profiler.kineto_results.events()
    return sum(e.nbytes() for e in events if e.name() == "[memory]")


def selective(
    save: frozenset[Any],
    *,
    saved: CheckpointPolicy = CheckpointPolicy.MUST_SAVE,
    other: CheckpointPolicy = CheckpointPolicy.MUST_RECOMPUTE,
) -> Callable[..., Any]:
    """Return a `context_fn` that saves some operators and recomputes the others."""

    def choose(ctx: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return saved if operator in save else other

    return functools.partial(create_selective_checkpoint_contexts, choose)


class CallCounter(TorchDispatchMode):
    """Counts the calls of one operator."""

    def __init__(self, operator: Any) -> None:
        super().__init__()
        self.operator = operator
        self.calls = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        self.calls += func is self.operator
        return func(*args, **(kwargs or {}))


def products_in_backward(
    net: nn.Module, function: Callable[..., Tensor], x: Tensor
) -> int:
    """Return how many products the backward runs, checking the gradients."""
    net.zero_grad()
    loss = function(x)
    with CallCounter(PRODUCT) as counter:
        loss.backward()
    got = [p.grad for p in net.parameters()]
    net.zero_grad()
    net(x).backward()
    for mine, parameter in zip(got, net.parameters(), strict=True):
        assert mine is not None
        assert parameter.grad is not None
        assert relative(mine, parameter.grad) < EXACT
    return counter.calls


def _flat(value: Tensor) -> Tensor:
    value = value.detach()
    value = torch.view_as_real(value) if value.is_complex() else value
    return value.flatten().double()
