"""Nodes of graphs that are captured from a function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx


def nodes_of(
    function: Callable[..., Any], *args: Any, mode: str = "fake"
) -> list[fx.Node]:
    """Return the calls of the function's graph.

    Args:
        function: of tensors.
        args: tensors; only their metadata counts.
        mode: how sizes are traced, as in `make_fx`.
    """
    graph = make_fx(function, tracing_mode=mode)(*args).graph
    return [n for n in graph.nodes if n.op == "call_function"]


def node_of(function: Callable[..., Any], *args: Any) -> fx.Node:
    """Return the first call of the function's graph."""
    return nodes_of(function, *args)[0]
