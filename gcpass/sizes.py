"""Bytes of the storage that a value of a joint graph needs.

A value is a ``node.meta["val"]``: a fake tensor, a tuple or list of values, a symbolic
number, None, or an opaque object. Its size is what a fresh allocation of the same
sizes, strides and dtype would take: the extent that the strides span times the bytes
per element. An expanded tensor therefore counts once, a column slice of a matrix with
the gaps that its strides keep.

Symbolic sizes are read by their hint, the size seen at compile time, or as functions of
the graph's symbols: the same formulas serve both, given what reads a size (`hint_int`,
`expression`). No guard is ever added, since a size that only informs a plan must not
specialise the program.

On CUDA the caching allocator hands out multiples of 512 bytes, and a size is what it
hands out. Not modelled: up to 1 MiB that it leaves at the end of a large block, and the
scales of a tensor quantised per channel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, TypeAlias

import sympy
import torch

from gcpass.symbols import Symbolic, plain
from gcpass.torch_private import optimization_hint

# Also private or unstable, read on torch 2.13.0: `SymInt.node.maybe_as_int`,
# `SymInt.node.is_nested_int`, `Tensor.__tensor_flatten__`, `Tensor._indices`,
# `Tensor._values`.

__all__ = [
    "UNBACKED_SIZE_HINT",
    "Reader",
    "ShapeOnly",
    "allocated_bytes",
    "at_least_one",
]
__all__ += ["ceil_div", "element_count", "expression", "hint_int", "read_bytes"]
__all__ += ["shape_only", "storage_bytes", "symbolic_storage_bytes", "tensors_in"]

IntLike: TypeAlias = "int | torch.SymInt"
Reader: TypeAlias = Callable[[IntLike], Symbolic]
"""What a size is taken for: a number, or a function of symbols."""

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
    constant = _constant(x)
    if constant is not None:
        return constant
    return int(optimization_hint(x, fallback=UNBACKED_SIZE_HINT))


def expression(x: IntLike) -> Symbolic:
    """Return a size as a function of the graph's symbols, without adding a guard.

    Args:
        x: a number or a symbolic one.

    Returns:
        a `sympy.Expr` where it depends on a symbol, else an int; a ragged dimension
        counts as 1, see `hint_int`.

    Raises:
        InexpressibleError: it has a function that sympy lacks.
    """
    constant = _constant(x)
    return plain(x.node.expr) if constant is None else constant  # type: ignore[union-attr]


def _constant(x: IntLike) -> int | None:
    """Return a size that depends on no symbol, else None."""
    if not isinstance(x, torch.SymInt):
        return int(x)
    if x.node.is_nested_int():
        return 1
    constant = x.node.maybe_as_int()
    return None if constant is None else int(constant)


def ceil_div(count: Symbolic, per: int) -> Symbolic:
    """Return how many times ``per`` a count fills, the last time perhaps in part."""
    if isinstance(count, int):
        return -(-count // per)
    return sympy.ceiling(count / per)


def at_least_one(count: Symbolic) -> Symbolic:
    """Return a count, 1 instead of 0."""
    return max(1, count) if isinstance(count, int) else sympy.Max(1, count)


def allocated_bytes(size_bytes: Symbolic, device: torch.device) -> Symbolic:
    """Return the bytes that a device's allocator hands out for a storage.

    Args:
        size_bytes: of the storage.
        device: where it is. The CPU's allocator is counted as asked for.
    """
    if device.type != "cuda":
        return size_bytes
    return ceil_div(size_bytes, CUDA_BLOCK_BYTES) * CUDA_BLOCK_BYTES


@dataclass(frozen=True, slots=True)
class ShapeOnly:
    """What FLOP formulas ask of a tensor, with sizes as functions of symbols.

    It can be hashed, and stands where a tensor of symbolic sizes would add guards.
    """

    shape: tuple[Symbolic, ...]
    dtype: torch.dtype
    device: torch.device

    def dim(self) -> int:
        """Return the number of dimensions."""
        return len(self.shape)

    def numel(self) -> Symbolic:
        """Return the number of elements."""
        return prod(self.shape)

    def size(self, dim: int) -> Symbolic:
        """Return the size of a dimension."""
        return self.shape[dim]


def shape_only(tensor: torch.Tensor) -> ShapeOnly:
    """Return the `ShapeOnly` of a tensor."""
    shape = tuple(expression(size) for size in tensor.shape)
    return ShapeOnly(shape, tensor.dtype, tensor.device)


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
    size_bytes: int = _storage_bytes(val, hint_int)
    return size_bytes


def symbolic_storage_bytes(val: Any) -> Symbolic:
    """Return `storage_bytes` as a function of the graph's symbols.

    Args:
        val: the value of a node.

    Returns:
        an int where no symbol decides, else a `sympy.Expr`. Its value at the hints is
        `storage_bytes`, except where torch guesses the sizes that only running the
        program tells not one by one.

    Raises:
        InexpressibleError: a size has a function that sympy lacks.
    """
    return _storage_bytes(val, expression)


def _storage_bytes(val: Any, read: Reader) -> Symbolic:
    if isinstance(val, torch.Tensor):
        return _tensor_bytes(val, read)
    if isinstance(val, tuple | list):
        return sum(_storage_bytes(item, read) for item in val)
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


def tensors_in(value: Any) -> list[Any]:
    """Return the tensors in a value or in nested call arguments, in order."""
    if isinstance(value, torch.Tensor | ShapeOnly):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, tuple | list):
        return [tensor for item in value for tensor in tensors_in(item)]
    return []


def _tensor_bytes(tensor: torch.Tensor, read: Reader) -> Symbolic:
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        return sum(_storage_bytes(getattr(tensor, name), read) for name in names)
    if tensor.layout is torch.sparse_coo:
        return _storage_bytes((tensor._indices(), tensor._values()), read)
    if tensor.layout in _COMPRESSED_PARTS:
        parts = _COMPRESSED_PARTS[tensor.layout]
        return _storage_bytes([getattr(tensor, part)() for part in parts], read)
    if tensor.layout is not torch.strided:  # mkldnn: opaque, no strides to ask for
        return _bytes_of(prod(map(read, tensor.shape)), tensor.dtype)
    sizes = tuple(read(size) for size in tensor.shape)
    strides = tuple(read(stride) for stride in tensor.stride())
    return allocated_bytes(
        _bytes_of(_extent(sizes, strides), tensor.dtype), tensor.device
    )


def _extent(sizes: Sequence[Symbolic], strides: Sequence[Symbolic]) -> Symbolic:
    """Return the number of elements from the first to the last one, gaps included."""
    if 0 in sizes:
        return 0
    last = 1 + sum(
        (size - 1) * stride for size, stride in zip(sizes, strides, strict=True)
    )
    if all(isinstance(size, int) for size in sizes):
        return last
    return _unless_empty(last, tuple(sizes))


@lru_cache(maxsize=4096)
def _unless_empty(extent: Symbolic, sizes: tuple[Symbolic, ...]) -> Symbolic:
    """Return an extent that is 0 where a size is, written as short as it goes.

    Args:
        extent: right where no size is 0.
        sizes: at least one depends on a symbol.
    """
    dense = prod(sizes)
    extent = sympy.expand(extent)
    if extent == sympy.expand(dense):
        return dense
    for size in sizes:
        if not sympy.sympify(size).is_positive:
            extent *= sympy.Min(1, size)
    return extent


def _bytes_of(elements: Symbolic, dtype: torch.dtype) -> Symbolic:
    if dtype in _ELEMENTS_PER_BYTE:
        return ceil_div(elements, _ELEMENTS_PER_BYTE[dtype])
    return elements * dtype.itemsize
