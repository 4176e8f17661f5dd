"""One training step with gcpass against eager, on the user's own model.

    report = gcpass.check(model, lambda m: m(batch).square().mean(), memory_budget=0.5)
    print(report)

The yardstick is eager's own noise, see `gcpass.deviation`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from gcpass.backend import make_backend
from gcpass.deviation import (
    Deviation,
    GradientReport,
    Kind,
    Move,
    Values,
    compare_with_eager,
    same_draws,
)
from gcpass.errors import GcpassError
from gcpass.torch_private import compile_in_place

__all__ = ["Deviation", "GradientReport", "check"]

LossFn = Callable[[Any], Tensor]


def check(model: nn.Module, loss_fn: LossFn, /, **options: object) -> GradientReport:
    """Return how far one step with gcpass is from eager: loss, gradients, buffers.

    The step runs four times in eager mode (as it is, again, and twice with every
    parameter moved by a rounding unit: eager's noise) and once compiled, always on a
    copy of the model and from the same random state (torch's, Python's, numpy's).
    The model itself is not run: parameters, buffers, ``.grad``, mode and random
    state are afterwards what they were. This takes the memory of a second model, of
    two sets of gradients and of a step in eager mode. A parameter that gets no
    gradient counts as one with a gradient of zeros.

    Not seen: what ``loss_fn`` itself holds (a batch moved by a rounding unit, a
    criterion's parameters), the optimizer, wrappers for distributed training, and
    errors below ``allowed`` of the report. Under autocast the unit is that of the low
    precision, for all parameters.

    Args:
        model: the model, compiled already or not, in the mode that is to be checked.
        loss_fn: takes the model, calls it on a batch and returns the loss. It is
            called five times, each time with another copy, so it must use its
            argument and not write its batch.
        options: of the backend, as ``memory_budget=0.5``. Inductor's
            ``fallback_random`` is on unless given: it draws as eager does, and
            otherwise dropout would have other masks.

    Raises:
        GcpassError: nothing trains, the loss is not a scalar with a gradient or not
            finite, the model cannot be copied, nothing was compiled, or the backend
            refuses (see `gcpass.errors`).
    """
    original: nn.Module = getattr(model, "_orig_mod", model)  # what was compiled
    if not any(p.requires_grad for p in original.parameters()):
        raise GcpassError(
            "gcpass.check: no parameter of the model requires a gradient; there is "
            "nothing to compare"
        )
    backend = _CountingBackend(make_backend(**{"fallback_random": True, **options}))

    def eager(move: Move) -> Values:
        twin = _copied(original)
        move(twin.parameters())
        with torch.compiler.set_stance("force_eager"):  # for what is compiled inside
            return _step(twin, loss_fn)

    def compiled() -> Values:
        twin = _copied(original)
        compile_in_place(twin, backend)
        return _step(twin, loss_fn)

    report = compare_with_eager(eager, compiled)
    if not backend.regions:
        raise GcpassError(
            "gcpass.check: no region of the model was compiled, so nothing was "
            "compared; loss_fn must call the model that it is given, and "
            "torch.compile must be able to capture some of it"
        )
    return report


class _CountingBackend:
    """A backend that counts regions; equal to no other, so that it has to compile."""

    compiler_name = "gcpass"
    __name__ = "gcpass"

    def __init__(self, backend: Callable[..., Any]) -> None:
        self.backend = backend
        self.regions = 0

    def __call__(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        self.regions += 1
        compiled: Callable[..., Any] = self.backend(gm, inputs)
        return compiled


def _copied(model: nn.Module) -> nn.Module:
    try:
        twin = copy.deepcopy(model)
    except (RuntimeError, TypeError) as error:
        raise GcpassError(
            "gcpass.check runs copies of the model, so that yours stays as it is, and "
            f"copy.deepcopy fails on it: {error}"
        ) from error
    twin.zero_grad(set_to_none=True)
    return twin


def _step(twin: nn.Module, loss_fn: LossFn) -> Values:
    """Run one step and return what it computes, by kind and name.

    `torch.autograd.grad` rather than ``backward``: a batch or criterion of the user's
    that requires gradients must not collect them.
    """
    trained = {n: p for n, p in twin.named_parameters() if p.requires_grad}
    with same_draws(twin.parameters()), torch.enable_grad():
        loss = loss_fn(twin)
        _require_scalar(loss)
        found = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
    if all(gradient is None for gradient in found):
        raise _unrelated()
    values: dict[tuple[Kind, str], Tensor] = {("loss", ""): loss.detach()}
    for (name, parameter), gradient in zip(trained.items(), found, strict=True):
        zeros = gradient is None
        values["gradient", name] = torch.zeros_like(parameter) if zeros else gradient
    values |= {("buffer", name): b.detach() for name, b in twin.named_buffers()}
    return values


def _require_scalar(loss: object) -> None:
    if not isinstance(loss, Tensor):
        raise GcpassError(
            f"gcpass.check: loss_fn must return a scalar tensor, got {type(loss)}"
        )
    if loss.numel() != 1 or loss.is_complex():
        raise GcpassError(
            "gcpass.check: loss_fn must return a real scalar, got a tensor of shape "
            f"{tuple(loss.shape)} and {loss.dtype}; reduce it, as by .mean()"
        )
    if not loss.requires_grad:
        raise _unrelated()


def _unrelated() -> GcpassError:
    return GcpassError(
        "gcpass.check: the loss depends on no parameter of the model that loss_fn was "
        "given; loss_fn must call its argument (a copy), and not detach the result"
    )
