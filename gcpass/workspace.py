"""Memory that an operator allocates inside itself, measured once per call signature.

Convolutions on the CPU reorder their operands, attention keeps partial sums: bytes that
no graph shows (2.5 MB beside outputs of 1.3 MB for a small convolution's backward). The
operator is run once on zeros of the same layout while torch's allocations are recorded.
Only operators of ATen and oneDNN on the CPU are run; on a GPU, and for anything else,
the workspace counts as 0.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from gcpass.real_arguments import describe, real
from gcpass.sizes import Reader, hint_int
from gcpass.torch_private import (
    OpOverload,
    allocations_during,
    without_modes,
)

log = logging.getLogger("gcpass")

_NAMESPACES = ("aten", "mkldnn", "prims")
# Operators that allocate nothing but their result, or nothing at all.
_PLAIN = frozenset(
    {"empty_strided", "as_strided", "empty", "view", "permute", "expand", "copy_"}
)
_known: dict[tuple[object, ...], int] = {}


def node_workspace(node: fx.Node, read: Reader = hint_int) -> int:
    """Return the bytes that a node's operator allocates inside itself.

    Args:
        node: of a joint graph.
        read: gives a symbolic size as an int.
    """

    def value(argument: fx.Node) -> Any:
        return argument.meta.get("val")

    args, kwargs = map_arg(node.args, value), map_arg(node.kwargs, value)
    return workspace_bytes(node.target, args, kwargs, read)


def workspace_bytes(func: Any, args: Any, kwargs: Any, read: Reader = hint_int) -> int:
    """Return the bytes that a call needs beside its arguments and results.

    Args:
        func: the operator.
        args: its arguments; of tensors only the layout is used.
        kwargs: its keyword arguments, likewise.
        read: gives a symbolic size as an int.
    """
    if not isinstance(func, OpOverload) or func.namespace not in _NAMESPACES:
        return 0
    if func._schema.name.split("::")[1] in _PLAIN or _is_unsafe(func):
        return 0
    key = (str(func), describe(args, read), describe(kwargs, read))
    if key not in _known:
        _known[key] = _measure(func, args, kwargs, read)
    return _known[key]


def _is_unsafe(func: Any) -> bool:
    """Whether running the operator would have an effect."""
    if torch.Tag.nondeterministic_seeded in func.tags:
        return "attention" not in str(func)
    return bool(func._schema.is_mutable) and "out" not in func._overloadname


def _measure(func: Any, args: Any, kwargs: Any, read: Reader) -> int:
    if not _on_cpu((args, kwargs)):
        return 0
    try:
        with without_modes(), torch.random.fork_rng(devices=()):
            real_args, real_kwargs = real(args, read), real(kwargs, read)
            changes = allocations_during(lambda: func(*real_args, **real_kwargs))
    except (RuntimeError, NotImplementedError, IndexError, ValueError) as error:
        log.debug("workspace of %s is unknown: %s", func, error)
        return 0
    current = peak = 0
    for change in changes:
        current += change
        peak = max(peak, current)
    return max(0, peak - current)


def _on_cpu(values: Any) -> bool:
    tensors = [v for v in _leaves(values) if isinstance(v, torch.Tensor)]
    return bool(tensors) and all(t.device.type == "cpu" for t in tensors)


def _leaves(values: Any) -> list[Any]:
    if isinstance(values, (list, tuple)):
        return [leaf for item in values for leaf in _leaves(item)]
    if isinstance(values, dict):
        return [leaf for item in values.values() for leaf in _leaves(item)]
    return [values]
