"""Inductor's generated program for a graph, read before anything is built.

Inductor fuses, reorders and reuses buffers after gcpass has split the graph, so the
peak is verified on what will run: the text of the wrapper that Inductor generates. It
is caught where Inductor would compile it. The hook is installed once, and does
nothing unless `read_program` is running in the same context (thread).
"""

from __future__ import annotations

import contextvars
import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from gcpass.sizes import hint_int
from gcpass.torch_private import (
    BoxedBool,
    BoxedDeviceIndex,
    GraphLowering,
    V,
    inductor_config,
    without_modes,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What Inductor generated for one graph.

    Attributes:
        source: Python text of the wrapper; calling its ``call`` runs the graph.
        constants: tensors that the wrapper finds as module attributes.
        output_strides: strides of each output, None for what is no tensor.
    """

    source: str
    constants: Mapping[str, torch.Tensor]
    output_strides: tuple[tuple[int, ...] | None, ...]


class _Caught(BaseException):
    """Carries the program out of Inductor; no `Exception`, so that nothing eats it."""

    def __init__(self, program: Program) -> None:
        super().__init__("program read")
        self.program = program


_reading: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "gcpass_reading", default=False
)


def read_program(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    is_backward: bool,
    static_inputs: int,
    user_visible_outputs: Sequence[int],
    inner_compile: Callable[..., Any],
) -> Program:
    """Return the program that Inductor generates for a graph, without building it.

    Args:
        module: forward or backward module; it is not changed.
        inputs: fake tensors (and sizes) as Inductor will get them.
        is_backward: whether it is the backward.
        static_inputs: how many leading inputs live at a fixed address.
        user_visible_outputs: outputs whose strides must be kept.
        inner_compile: what will compile the graph for real.
    """
    _install()
    with without_modes():  # constants are real, and stay so
        work = copy.deepcopy(module)
    (output,) = work.graph.find_nodes(op="output")
    output.meta["user_visible_output_idxs"] = list(user_visible_outputs)
    token = _reading.set(True)
    try:
        with inductor_config.patch(force_disable_caches=True), torch.no_grad():
            inner_compile(
                work,
                inputs,
                static_input_idxs=list(range(static_inputs)),
                cudagraphs=BoxedBool(False),
                is_backward=is_backward,
                is_inference=False,
                boxed_forward_device_index=BoxedDeviceIndex(None),
            )
    except _Caught as caught:
        return caught.program
    finally:
        _reading.reset(token)
    raise RuntimeError("Inductor compiled a graph without generating a wrapper")


def _install() -> None:
    """Put the hook around GraphLowering.compile_to_module, once per process."""
    original = GraphLowering.compile_to_module
    if getattr(original, "_gcpass_hook", False):
        return
    GraphLowering.compile_to_module = _hooked(original)  # type: ignore[method-assign]


def _hooked(original: Callable[..., Any]) -> Callable[..., Any]:
    def compile_to_module(self: GraphLowering) -> Any:
        if not _reading.get():
            return original(self)
        code, _ = self.codegen()
        constants = {
            name: value
            for name, value in self.constants.items()
            if isinstance(value, torch.Tensor)
        }
        raise _Caught(
            Program(
                source=code.value,
                constants=constants,
                output_strides=tuple(_strides(out) for out in self.graph_outputs),
            )
        )

    compile_to_module._gcpass_hook = True  # type: ignore[attr-defined]
    return compile_to_module


def _strides(output: Any) -> tuple[int, ...] | None:
    layout = getattr(output, "maybe_get_layout", lambda: None)()
    if layout is None or not hasattr(layout, "stride"):
        return None
    return tuple(hint_int(_as_int(s)) for s in layout.stride)


def _as_int(size: Any) -> int:
    return int(V.graph.sizevars.optimization_hint(size))
