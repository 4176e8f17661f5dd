"""The option ``check_gradients``: a region's first step against its captured graph.

Before a region first runs for the user it runs on copies of its inputs, compiled and
in eager mode operation by operation as Dynamo captured it, with the same random state
and the same random gradients of its outputs. Random ones, because the user's are
known only after the forward has returned; a backward is linear in them. The user's
step then runs as always. The yardstick is eager's own noise, see `gcpass.deviation`.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from gcpass.deviation import Kind, Move, Values, compare_with_eager, same_draws
from gcpass.errors import GradientMismatchError
from gcpass.torch_private import tree_leaves

log = logging.getLogger("gcpass")

Run = Callable[..., Any]


class CheckedOnce:
    """A compiled region that is compared with eager when it is first called."""

    def __init__(self, captured: fx.GraphModule, compiled: Run) -> None:
        self._captured = captured
        self._compiled = compiled
        self._checked = False

    def __call__(self, *arguments: Any) -> Any:
        """Run the region.

        Raises:
            GradientMismatchError: it does not compute what eager does.
        """
        if not self._checked:
            compare_region(self._captured, self._compiled, arguments)
            self._checked = True
        return self._compiled(*arguments)


def captured_copy(gm: fx.GraphModule) -> fx.GraphModule:
    """Return the graph with the same parameters, safe from what compiling does."""
    return fx.GraphModule(gm, copy.deepcopy(gm.graph))


def compare_region(
    captured: fx.GraphModule, compiled: Run, arguments: Sequence[Any]
) -> None:
    """Compare outputs, gradients and written inputs of one call.

    Args:
        captured: the region as Dynamo captured it.
        compiled: the same, compiled.
        arguments: of the call; they are copied.

    Raises:
        GradientMismatchError: a difference is larger than rounding explains.
        GcpassError: a gradient of eager is not finite.
    """
    names = [node.name for node in captured.graph.find_nodes(op="placeholder")]

    def eager(move: Move) -> Values:
        return _step(captured, names, arguments, move)

    def ours() -> Values:
        return _step(compiled, names, arguments, lambda tensors: None)

    report = compare_with_eager(eager, ours)
    if report.mismatches:
        raise GradientMismatchError(
            report.summary(),
            mismatches=[(d.name, d.error, d.allowed) for d in report.mismatches],
        )
    log.info("check_gradients: %s", report.summary())


def _step(
    run: Run, names: Sequence[str], arguments: Sequence[Any], move: Move
) -> Values:
    """Run forward and backward and return what they compute, by kind and name."""
    copies = copy.deepcopy([_detached(a) for a in arguments])
    move([c for c in copies if isinstance(c, Tensor)])
    for given, twin in zip(arguments, copies, strict=True):
        if isinstance(twin, Tensor):
            twin.requires_grad_(given.requires_grad)
    inputs = [_like(a, twin) for a, twin in zip(arguments, copies, strict=True)]
    with same_draws([i for i in inputs if isinstance(i, Tensor)]):
        outputs = [o for o in tree_leaves(run(*inputs)) if isinstance(o, Tensor)]
        # Here, as the backward may draw as well.
        found = _gradients(outputs, copies)
    named = list(zip(names, inputs, strict=True))
    values: dict[tuple[Kind, str], Tensor] = {}
    values |= {("output", str(i)): o.detach() for i, o in enumerate(outputs)}
    values |= {("gradient", names[i]): gradient for i, gradient in found}
    values |= {("input", n): x.detach() for n, x in named if _may_be_written(x)}
    return values


def _gradients(
    outputs: Sequence[Tensor], copies: Sequence[Any]
) -> list[tuple[int, Tensor]]:
    """Return (position, gradient) of every input that requires one."""
    trained = [
        (i, c)
        for i, c in enumerate(copies)
        if isinstance(c, Tensor) and c.requires_grad
    ]
    read = [o for o in outputs if o.requires_grad]
    if not read or not trained:
        return []
    torch.manual_seed(0)  # the same tangents, whatever the forward drew
    found = torch.autograd.grad(
        read,
        [c for _, c in trained],
        [torch.randn_like(o) for o in read],  # of a subclass where o is
        allow_unused=True,
    )
    return [
        (i, torch.zeros_like(c) if gradient is None else gradient)
        for (i, c), gradient in zip(trained, found, strict=True)
    ]


def _detached(argument: Any) -> Any:
    return argument.detach() if isinstance(argument, Tensor) else argument


def _like(argument: Any, twin: Any) -> Any:
    """Return the twin, as an intermediate result where the argument is one.

    Code may write intermediate results but no leaf that requires a gradient.
    """
    if not isinstance(twin, Tensor) or argument.is_leaf or 0 in twin.stride():
        return twin
    empty = torch.empty_strided(
        twin.size(), twin.stride(), dtype=twin.dtype, device=twin.device
    )
    return empty.copy_(twin)


def _may_be_written(value: Any) -> bool:
    return isinstance(value, Tensor) and not (value.is_leaf and value.requires_grad)
