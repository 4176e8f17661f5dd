"""What share of a GPU's peak a matrix product reaches, by its sizes and dtype.

A product is cut into tiles of the result, one per multiprocessor at a time, so time
goes in waves: 109 tiles take as long on 108 multiprocessors as 216. Tiles that stick
out over the edge compute what nobody asked for, and small tiles load more than the
cache delivers. The library is taken to choose the best of a few tiles, and to split the
inner dimension where that fills the device, at the price of adding up the parts.
Convolutions are the products that implicit GEMM makes of them.

Sources: NVIDIA, "Matrix Multiplication Background User's Guide", DU-09799-001 (tiles,
waves, and which tiles are used); Chetlur et al., "cuDNN: Efficient Primitives for Deep
Learning", 2014, arXiv:1410.0759 (implicit GEMM). Not modelled: alignment, since
Inductor pads what is not aligned, clocks, and kernels of two products at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

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
        """Return the time of the best tiles, at the peak where nothing is wasted.

        Args:
            rate: peak FLOP/s of the device for the dtype.
            item_bytes: of one element of the factors.
            device: with its multiprocessors.
        """
        return min(self._choices(rate, item_bytes, device))

    def _choices(self, rate: float, item_bytes: int, device: Device) -> Iterator[float]:
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
    products = products_of(call)
    if not products or not device.multiprocessors:
        return 1.0
    # the first tensor is a factor or a bias: scales behind it can be wider
    item_bytes = tensors_in((call.args, call.kwargs))[0].dtype.itemsize
    seconds = sum(p.seconds(rate, item_bytes, device) for p in products)
    flops = sum(p.flops for p in products)
    return flops / (rate * seconds) if flops else 1.0


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
    groups = int(named["groups"])
    output = tensors_in(call.out)[0]
    images = named["input"] if named["transposed"] else output
    weight = sizes_of(named["weight"])
    return (_forward(sizes_of(images), weight, groups, bool(named["transposed"])),)


def _convolution_backward(call: Call) -> tuple[Product, ...]:
    named = call.named()
    transposed, groups = bool(named["transposed"]), int(named["groups"])
    images = named["input"] if transposed else named["grad_output"]
    weight = sizes_of(named["weight"])
    forward = _forward(sizes_of(images), weight, groups, transposed)
    batch, m, n, k = forward.batch, forward.m, forward.n, forward.k
    to_input, to_weight, _ = named["output_mask"]
    gradients = (
        (to_input, Product(batch, m, k, n)),
        (to_weight, Product(batch, n, k, m)),
    )
    return tuple(product for wanted, product in gradients if wanted)


def _forward(
    images: list[int], weight: list[int], groups: int, transposed: bool
) -> Product:
    """Return rows by image and position, columns by channel of each group."""
    first, second, *kernel = map(int, weight)
    positions = int(images[0]) * math.prod(map(int, images[2:]))
    if transposed:  # each input channel spreads over channels and kernel
        return Product(groups, positions, second * math.prod(kernel), first // groups)
    return Product(groups, positions, first // groups, second * math.prod(kernel))


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
