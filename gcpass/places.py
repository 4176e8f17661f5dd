"""Where a node reads and writes in memory, element by element."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from gcpass.op_facts import is_elementwise
from gcpass.sizes import hint_int

__all__ = ["changes_only_dtype", "reads_aligned"]


def reads_aligned(node: fx.Node, source: fx.Node) -> bool:
    """Return whether each element is computed from a source's element at its place.

    Then the result can take the memory of the source. Types of equal width are told
    apart, as Inductor does; of other widths the result has another size anyway.

    Args:
        node: an operation of the joint graph.
        source: one of its arguments.
    """
    places = _places(node)
    if not is_elementwise(node.target) or places is None or places != _places(source):
        return False
    dtypes = node.meta["val"].dtype, source.meta["val"].dtype
    return dtypes[0] is dtypes[1] or dtypes[0].itemsize != dtypes[1].itemsize


def changes_only_dtype(node: fx.Node, source: fx.Node) -> bool:
    """Return whether a node is its source in another type, on the same device."""
    places = _places(node)
    if places is None or places != _places(source):
        return False
    return bool(node.meta["val"].dtype is not source.meta["val"].dtype)


def _places(node: fx.Node) -> tuple[Any, ...] | None:
    """Return where a tensor's elements are in its storage, None for other values."""
    val = node.meta.get("val")
    if not isinstance(val, torch.Tensor) or val.layout is not torch.strided:
        return None
    dimensions = [
        (hint_int(size), hint_int(stride))
        for size, stride in zip(val.shape, val.stride(), strict=True)
    ]
    offset = hint_int(val.storage_offset())
    return val.device, offset, [d for d in dimensions if d[0] != 1]
