"""Runs the rewritten graphs operation by operation, for tests and debugging.

Stands where Inductor's ``inner_compile`` would: same capture, same joint passes, same
split, but no code generation. Every value is freed after its last reader, so the
order and the lifetimes are those of the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx


def run_operations(
    module: fx.GraphModule, example_inputs: Sequence[Any], **_: Any
) -> Callable[[list[Any]], Any]:
    """Return a boxed callable that interprets the graph; an ``inner_compile``."""
    call = boxed(module)
    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def boxed(module: fx.GraphModule) -> Callable[[list[Any]], Any]:
    """Return a callable that takes a list, empties it, and runs the graph."""

    def call(arguments: list[Any]) -> Any:
        return fx.Interpreter(module).boxed_run(arguments)

    return call
