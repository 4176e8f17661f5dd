"""Bytes of the storage that a value of a joint graph needs.

A value is a ``node.meta["val"]``: a fake tensor, a tuple or list of values, a symbolic
number, None, or an opaque object. Its size is what a fresh allocation of the same
sizes, strides and dtype would take: the extent that the strides span times the bytes
per element. An expanded tensor therefore counts once, a column slice of a matrix with
the gaps that its strides keep.

Symbolic sizes are read by their hint, the size seen at compile time. No guard is ever
added, since a size that only informs a plan must not specialise the program.

On CUDA the caching allocator hands out multiples of 512 bytes, and a size is what it
hands out. Not modelled: up to 1 MiB that it leaves at the end of a large block, and the
scales of a tensor quantised per channel.
"""

from __future__ import annotations

from math import ceil, prod
from typing import Any, TypeAlias

import torch

from gcpass.torch_private import optimization_hint

# Also private or unstable, read on torch 2.13.0: `SymInt.node.maybe_as_int`,
# `SymInt.node.is_nested_int`, `Tensor.__tensor_flatten__`, `Tensor._indices`,
# `Tensor._values`.

__all__ = ["UNBACKED_SIZE_HINT", "allocated_bytes", "element_count", "hint_int"]
__all__ += ["read_bytes", "storage_bytes", "tensors_in"]

IntLike: TypeAlias = "int | torch.SymInt"

UNBACKED_SIZE_HINT = 4096
"""Size assumed for a dimension that only running the program tells (`nonzero`), in
elements. Origin: torch's own partitioner assumes the same number."""

CUDA_BLOCK_BYTES = 512
"""What the CUDA caching allocator rounds up to: kMinBlockSize of its source, which
`torch.cuda.memory_allocated` counts."""

# Elements per byte where torch allocates less than `itemsize` per element. The shell
# dtypes int1..int7, uint1..uint7 are not here: `torch.empty` gives them one byte per
# element, and packed weights reach a graph as uint8. An element of float4_e2m1fn_x2 is
# a pair already.
_ELEMENTS_PER_BYTE = {torch.quint4x2: 2, torch.quint2x4: 4}

_COMPRESSED_PARTS = {
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}


def hint_int(x: IntLike) -> int:
    """Return the size seen at compile time, without adding a guard.

    Args:
        x: a number or a symbolic one.

    Returns:
        the number itself; the hint of a backed symbol; for an unbacked one the hint
        that the user declared, else a value near `UNBACKED_SIZE_HINT` that respects
        its known range. A ragged dimension (a nested int) has no extent of its own
        and counts as 1: the bytes of its tensor are those of its inner tensors.
    """
    if not isinstance(x, torch.SymInt):
        return int(x)
    node = x.node
    if node.is_nested_int():
        return 1
    constant = node.maybe_as_int()
    if constant is not None:
        return int(constant)
    return int(optimization_hint(x, fallback=UNBACKED_SIZE_HINT))


def allocated_bytes(size_bytes: int, device: torch.device) -> int:
    """Return the bytes that a device's allocator hands out for a storage.

    Args:
        size_bytes: of the storage.
        device: where it is. The CPU's allocator is counted as asked for.
    """
    if device.type != "cuda":
        return size_bytes
    return ceil(size_bytes / CUDA_BLOCK_BYTES) * CUDA_BLOCK_BYTES


def element_count(tensor: torch.Tensor) -> int:
    """Return the number of elements, symbolic sizes by hint."""
    return prod(hint_int(size) for size in tensor.shape)


def storage_bytes(val: Any) -> int:
    """Return the bytes of the storage that fresh values of this metadata need.

    Args:
        val: the value of a node.

    Returns:
        bytes; the sum of the parts for tuples, lists, sparse tensors and tensor
        subclasses that wrap tensors; 0 for everything that owns no tensor memory
        (symbolic numbers, None, generators, opaque objects, empty tensors).
    """
    if isinstance(val, torch.Tensor):
        return _tensor_bytes(val)
    if isinstance(val, tuple | list):
        return sum(storage_bytes(item) for item in val)
    return 0


def read_bytes(val: Any) -> int:
    """Return the bytes that a kernel moves when it reads the value once.

    A kernel skips the gaps of a sliced tensor, and reads an expanded one at its stored
    size: the rest are cache hits.
    """
    total = 0
    for tensor in tensors_in(val):
        dense = element_count(tensor) * tensor.dtype.itemsize
        total += min(dense, storage_bytes(tensor))
    return total


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors in a value or in nested call arguments, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, tuple | list):
        return [tensor for item in value for tensor in tensors_in(item)]
    return []


def _tensor_bytes(tensor: torch.Tensor) -> int:
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        return sum(storage_bytes(getattr(tensor, name)) for name in names)
    if tensor.layout is torch.sparse_coo:
        return storage_bytes((tensor._indices(), tensor._values()))
    if tensor.layout in _COMPRESSED_PARTS:
        parts = _COMPRESSED_PARTS[tensor.layout]
        return storage_bytes([getattr(tensor, part)() for part in parts])
    if tensor.layout is not torch.strided:  # mkldnn: opaque, no strides to ask for
        return _bytes_of(element_count(tensor), tensor.dtype)
    return allocated_bytes(_bytes_of(_extent(tensor), tensor.dtype), tensor.device)


def _extent(tensor: torch.Tensor) -> int:
    """Return the number of elements from the first to the last one, gaps included."""
    sizes = [hint_int(size) for size in tensor.shape]
    if 0 in sizes:
        return 0
    strides = [hint_int(stride) for stride in tensor.stride()]
    return 1 + sum(
        (size - 1) * stride for size, stride in zip(sizes, strides, strict=True)
    )


def _bytes_of(elements: int, dtype: torch.dtype) -> int:
    if dtype in _ELEMENTS_PER_BYTE:
        return ceil(elements / _ELEMENTS_PER_BYTE[dtype])
    return elements * dtype.itemsize
