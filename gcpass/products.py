"""What share of a GPU's peak a matrix product reaches, by its sizes and dtype.

A product is cut into tiles of the result, one per multiprocessor at a time, so time
goes in waves: 109 tiles take as long on 108 multiprocessors as 216. Tiles that stick
out over the edge compute what nobody asked for, and small tiles load more than the
cache delivers. The library is taken to choose the best of a few tiles, and to split the
inner dimension where that fills the device, at the price of adding up the parts; or to
use the vector units, one thread for each element of the result, where tiles would be
mostly empty (a matrix and a vector, a convolution with a group per channel).
Convolutions are the products that implicit GEMM makes of them.

Sources: NVIDIA, "Matrix Multiplication Background User's Guide", DU-09799-001 (tiles,
waves, and which tiles are used); Chetlur et al., "cuDNN: Efficient Primitives for Deep
Learning", 2014, arXiv:1410.0759 (implicit GEMM). Not modelled: alignment, since
Inductor pads what is not aligned, complex numbers, and two products at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from gcpass.flop_formulas import Call, sizes_of
from gcpass.flops import op_names
from gcpass.hardware import Device
from gcpass.sizes import tensors_in

__all__ = ["Product", "product_efficiency", "products_of"]

TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64))
"""Rows and columns of the result that one multiprocessor computes at a time."""

SPLITS = (1, 2, 4, 8, 16, 32)
"""Parts of the inner dimension that may be summed by different multiprocessors."""

LEAST_DEPTH = 256
"""Elements of the inner dimension that a part has at least: below, filling and emptying
the pipeline costs as much as the part. An estimate."""

CACHE_FLOPS_PER_BYTE = 43
"""Half precision FLOPs at the peak rate for a byte from the L2 cache. Origin: an A100
has 312 TFLOP/s and reads 5,120 bytes per cycle of 1.41 GHz ("NVIDIA A100 Tensor Core
GPU Architecture", 2020); later devices are taken to keep the ratio."""

VECTOR_SHARE = 0.7
"""What the vector units reach of their peak, for 1 that full tiles reach of theirs: a
kernel without tiles loads every factor again. An estimate, as in `gcpass.cost`."""

THREADS = 256
"""Elements of a result that keep one multiprocessor's vector units busy, at least."""

SUM_BYTES = 8  # written and read for each element of a part of a split product, float32


@dataclass(frozen=True, slots=True)
class Product:
    """``batch`` products of (m, k) and (k, n) matrices."""

    batch: int
    m: int
    n: int
    k: int

    @property
    def flops(self) -> int:
        """Return the FLOPs of all of them."""
        return 2 * self.batch * self.m * self.n * self.k

    def seconds(self, rate: float, item_bytes: int, device: Device) -> float:
        """Return the time of the best kernel, at the peak where nothing is wasted.

        Args:
            rate: peak FLOP/s of the device for the dtype.
            item_bytes: of one element of the factors.
            device: with its multiprocessors.
        """
        tiled = min(self._tiled(rate, item_bytes, device))
        vectors = device.peak_flops("float64" if item_bytes == 8 else "float32")
        outputs = self.batch * self.m * self.n
        busy = min(1.0, outputs / (THREADS * device.multiprocessors))
        if not busy:
            return tiled
        return min(tiled, self.flops / (VECTOR_SHARE * busy * min(vectors, rate)))

    def _tiled(self, rate: float, item_bytes: int, device: Device) -> Iterator[float]:
        cache = device.peak_flops("float16") / CACHE_FLOPS_PER_BYTE
        one = rate / device.multiprocessors
        for rows, columns in TILES:
            tiles = self.batch * -(-self.m // rows) * -(-self.n // columns)
            flops_per_byte = 2 * rows * columns / ((rows + columns) * item_bytes)
            reached = one * min(1.0, flops_per_byte * cache / rate)
            for parts in SPLITS:
                depth = -(-self.k // parts)
                if parts > 1 and depth < LEAST_DEPTH:
                    break
                waves = -(-tiles * parts // device.multiprocessors)
                summed = SUM_BYTES * parts * self.batch * self.m * self.n
                yield (
                    waves * 2 * rows * columns * depth / reached
                    + (parts > 1) * summed / device.bandwidth_bytes_per_s
                )


def product_efficiency(call: Call, rate: float, device: Device) -> float:
    """Return the share of the peak that the call's products reach, in (0, 1].

    Args:
        call: of any operator.
        rate: peak FLOP/s of the device for the dtype.
        device: where it runs. 1.0 where its multiprocessors are not known (a CPU).
    """
    products = products_of(call) if device.multiprocessors else ()
    flops = sum(p.flops for p in products)
    dtypes = [t.dtype for t in tensors_in(call.args)]
    dtype = min(dtypes, key=lambda d: d.itemsize, default=None)
    if not flops or dtype is None or dtype.is_complex:
        return 1.0
    # the narrowest tensor is a factor: biases and scales can be wider
    seconds = sum(p.seconds(rate, dtype.itemsize, device) for p in products)
    return flops / (rate * seconds)


def products_of(call: Call) -> tuple[Product, ...]:
    """Return the matrix products that a call consists of, () for others."""
    names = op_names(call.target)
    shapes = _SHAPES.get(names[-1]) if names else None
    return () if shapes is None else shapes(call)


def _matrices(left: str, right: str) -> Callable[[Call], tuple[Product, ...]]:
    """Return what reads the sizes of left (.., m, k) @ right (.., k, n)."""

    def shapes(call: Call) -> tuple[Product, ...]:
        named = call.named()
        *batch, m, k = map(int, sizes_of(named[left]))
        n = int(sizes_of(named[right])[-1])
        return (Product(math.prod(batch), m, n, k),)

    return shapes


def _convolution(call: Call) -> tuple[Product, ...]:
    named = call.named()
    output = tensors_in(call.out)[0]
    if named["transposed"]:
        return (_products(named, named["input"], output).scattered,)
    return (_products(named, output, named["input"]).gathered,)


def _convolution_backward(call: Call) -> tuple[Product, ...]:
    named = call.named()
    images, gradient = named["input"], named["grad_output"]
    to_input, to_weight, _ = named["output_mask"]
    if named["transposed"]:
        products = _products(named, images, gradient)
        of_input = products.gathered
    else:
        products = _products(named, gradient, images)
        of_input = products.scattered
    found = (to_input, of_input), (to_weight, products.to_weight)
    return tuple(product for wanted, product in found if wanted)


class _Products(NamedTuple):
    """What a convolution and its gradients compute.

    Attributes:
        gathered: every position of the narrow images from a window of the wide ones.
        scattered: every position of the wide images from those that cover it.
        to_weight: every weight from all positions.
    """

    gathered: Product
    scattered: Product
    to_weight: Product


def _products(named: Mapping[str, Any], narrow: Any, wide: Any) -> _Products:
    """Return the products between the images that a stride makes narrow and the others.

    Narrow are the output of a convolution and the input of a transposed one; the weight
    is (narrow channels, wide channels of a group, kernel) in both.
    """
    groups = int(named["groups"])
    channels, of_group, *kernel = map(int, sizes_of(named["weight"]))
    channels, window = channels // groups, math.prod(kernel)
    images, _, *places = map(int, sizes_of(narrow))
    few, many = math.prod(places), math.prod(map(int, sizes_of(wide)[2:]))
    covering = -(-channels * window * few // max(1, many))  # a stride leaves some out
    return _Products(
        gathered=Product(groups, images * few, channels, of_group * window),
        scattered=Product(groups, images * many, of_group, covering),
        to_weight=Product(groups, channels, of_group * window, images * few),
    )


_SHAPES = {
    "aten::mm": _matrices("self", "mat2"),
    "aten::bmm": _matrices("self", "mat2"),
    "aten::addmm": _matrices("mat1", "mat2"),
    "aten::_addmm_activation": _matrices("mat1", "mat2"),
    "aten::baddbmm": _matrices("batch1", "batch2"),
    "aten::_scaled_mm": _matrices("self", "mat2"),
    "aten::_int_mm": _matrices("self", "mat2"),
    "aten::convolution": _convolution,
    "aten::convolution_backward": _convolution_backward,
}
