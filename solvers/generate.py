"""Problems made to measure; the same arguments give the same problem.

- `random_layered`: look-alikes of the random layered graphs of M. Gagrani et al.,
  "Neural Topological Ordering for Computation Graphs", 2022, arXiv:2207.05899, appendix
  A, which MOCCASIN (B. Bartan et al., 2023, arXiv:2304.14463) publishes; plain
  sequences. Sizes are drawn from the histogram of the four published graphs.
- `transformer`, `chain`, `random_chain`: one step of training, forward and backward.
  `gcpass.solvers.plain.joint_sequence` turns them into plain sequences.

Random numbers are uniform doubles of PCG64 and nothing else, so that a seed does not
depend on how a release of numpy draws from distributions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gcpass.solvers.errors import InvalidProblemError
from gcpass.solvers.plain import plain_sequence
from gcpass.solvers.problem import (
    Operation,
    Origin,
    Phase,
    Problem,
    Value,
    ValueId,
)

OPERATIONS_PER_BLOCK = 23  # of `transformer`
# Nodes of the four published graphs by size, in bins of 500 bytes from 0 on.
SIZE_HISTOGRAM = (315, 359, 251, 165, 150, 135, 119, 102, 81, 62, 48, 33, 17, 7, 5)
SIZE_BIN, SIZE_STEP = 500, 10  # bytes; sizes are multiples of the step
LONGEST = 1000  # time of a node is uniform in 1..LONGEST

_Ints = npt.NDArray[np.int64]
_Edges = tuple[_Ints, _Ints]  # from, to


class Builder:
    """Collects values and operations in order."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self.values: list[Value] = []

    def value(
        self,
        size_bytes: int,
        origin: Origin = Origin.COMPUTED,
        held: bool = False,
        savable: bool = True,
    ) -> ValueId:
        """Add a value and return its id."""
        self.values.append(
            Value(size_bytes=size_bytes, origin=origin, held=held, savable=savable)
        )
        return ValueId(len(self.values) - 1)

    def run(
        self,
        reads: Sequence[ValueId],
        writes: Sequence[ValueId],
        cost_seconds: float,
        phase: Phase = Phase.FORWARD,
        **flags: bool | int | tuple[ValueId, ...],
    ) -> None:
        """Add an operation; `flags` are further fields of `Operation`."""
        self.operations.append(
            Operation(
                reads=tuple(sorted(set(reads))),
                writes=tuple(sorted(writes)),
                cost_seconds=cost_seconds,
                phase=phase,
                **flags,  # type: ignore[arg-type]
            )
        )

    def problem(
        self, save_seconds_per_byte: float = 0.0, between_bytes: int = 0
    ) -> Problem:
        """Return what was added."""
        return Problem(
            operations=tuple(self.operations),
            values=tuple(self.values),
            save_seconds_per_byte=save_seconds_per_byte,
            between_bytes=between_bytes,
        )


def random_layered(
    nodes: int,
    *,
    width: float,
    seed: int,
    variability: float = 0.75,
    edge_density: float = 0.2,
    skip_density: float = 0.14,
) -> Problem:
    """Return a random layered graph as a plain sequence, in order of layers.

    Between one source and one sink stand layers of about ``2 * width * sqrt(nodes)``
    nodes. The published graphs are (100, 0.27), (250, 0.43), (500, 0.36), (1000, 0.31).

    Args:
        nodes: number of operations, 3 or more.
        width: factor of the mean width of a layer.
        seed: 0 or more.
        variability: a layer is this fraction narrower or wider, at most.
        edge_density: probability of an edge between nodes of adjacent layers, beside
            one from the layer before that every node has, and one to the layer after
            for nodes left without a reader.
        skip_density: share of the edges that pass over a layer or more.

    Raises:
        InvalidProblemError: an argument is out of its range.
    """
    if nodes < 3 or width <= 0 or seed < 0 or not 0.0 <= variability <= 1.0:
        raise InvalidProblemError(
            f"no layered graph has {nodes} nodes, width {width}, variability "
            f"{variability} and seed {seed}"
        )
    if not (0.0 <= edge_density <= 1.0 and 0.0 <= skip_density < 1.0):
        raise InvalidProblemError(
            f"edge density {edge_density} or skip density {skip_density} is no share"
        )
    rng = _rng(seed)
    starts = _layers(rng, nodes, 2 * width * math.sqrt(nodes), variability)
    adjacent = [
        _adjacent(rng, start, middle, end, edge_density)
        for start, middle, end in zip(starts, starts[1:], starts[2:], strict=False)
    ]
    direct = sum(len(sources) for sources, _ in adjacent)
    skips = round(direct * skip_density / (1.0 - skip_density))
    edges = [*adjacent, _skips(rng, starts, skips)]
    sources, targets = (
        np.concatenate([edge[end] for edge in edges]).tolist() for end in (0, 1)
    )
    times = 1 + _below(rng, LONGEST, nodes)
    times[[0, -1]] = 0
    return plain_sequence(
        _sizes(rng, nodes),
        times.tolist(),
        zip(sources, targets, strict=True),
        range(nodes),
    )


def chain(layers: int, size_bytes: int, cost_seconds: float) -> Problem:
    """Return a chain: backward layer i reads the input of layer i and a gradient.

    Layer 0 reads an input of the step. The output of the last layer is not kept; the
    gradient that leaves the first one is.
    """
    return _chain([size_bytes] * (layers + 1), [cost_seconds] * (2 * layers))


def random_chain(layers: int, *, seed: int) -> Problem:
    """Return such a chain of unequal layers.

    Sizes are spread evenly over orders of magnitude from 1 to 64 KiB, times from 1 to
    100 us; a backward layer takes one to three times its forward.
    """
    rng = _rng(seed)
    sizes = np.floor(2.0 ** (10 + 6 * rng.random(layers + 1))).astype(np.int64)
    forward = 1e-6 * 100.0 ** rng.random(layers)
    backward = forward * (1 + 2 * rng.random(layers))
    return _chain(sizes.tolist(), [*forward.tolist(), *backward.tolist()])


def transformer(
    layers: int,
    *,
    tokens: int = 1024,
    width: int = 64,
    fused: bool = False,
    dropout: bool = False,
) -> Problem:
    """Return a stack of blocks with 23 operations each, most of them matrix products.

    Per block: norm, qkv, attention (result and statistics), projection, add, norm, up,
    gelu, down, add; gelu's derivative independent of the gradient; the backward.
    Costs are seconds at 1e12 FLOP/s and 1e11 B/s.
    """
    b = Builder()
    wide = 2 * tokens * width
    point, product = wide / 1e11, 2 * tokens * width * width / 1e12
    soft: dict[str, Any] = {"fusible": fused, "absorbing": fused}
    weight = b.value(8 * width * width, Origin.INPUT)
    x = b.value(wide, Origin.INPUT)
    saved: list[tuple[ValueId, ...]] = []
    for _ in range(layers):
        n1, qkv, a, stat = (b.value(k) for k in (wide, 3 * wide, wide, 4 * tokens))
        p, r1, n2, up, g, d, r2 = (b.value(k * wide) for k in (1, 1, 1, 4, 4, 1, 1))
        b.run([x], [n1], 2 * point, **soft)
        b.run([n1, weight], [qkv], 3 * product)
        b.run([qkv], [a, stat], 2 * product, recomputable=not dropout)
        b.run([a, weight], [p], product)
        b.run([x, p], [r1], 3 * point, **soft)
        b.run([r1], [n2], 2 * point, **soft)
        b.run([n2, weight], [up], 4 * product)
        b.run([up], [g], 8 * point, **soft)
        b.run([g, weight], [d], 4 * product)
        b.run([r1, d], [r2], 3 * point, **soft)
        saved.append((x, n1, qkv, a, stat, r1, n2, up, g))
        x = r2
    gradient = b.value(wide, Origin.TANGENT)
    for block in reversed(saved):
        gradient = _block_backward(b, block, weight, gradient, fused, wide)
    return b.problem(1e-11 if fused else 0.0)


def _block_backward(
    b: Builder,
    block: tuple[ValueId, ...],
    weight: ValueId,
    gradient: ValueId,
    fused: bool,
    wide: int,
) -> ValueId:
    x, n1, qkv, a, stat, r1, n2, up, g = block
    point, product = wide / 1e11, wide * b.values[weight].size_bytes / 8e14
    soft: dict[str, Any] = {"fusible": fused, "absorbing": fused}
    derivative, gg, gup, gn2, gr1, ga, gqkv, gn1, gx = (
        b.value(k * wide) for k in (4, 4, 4, 1, 1, 1, 3, 1, 1)
    )
    back = Phase.BACKWARD
    b.run([up], [derivative], 8 * point, Phase.EITHER, **soft)
    b.run([gradient, weight], [gg], 4 * product, back)
    b.run([gradient, g], [b.value(4096, held=True)], 4 * product, back)
    b.run([gg, derivative], [gup], 12 * point, back, **soft)
    b.run([gup, weight], [gn2], 4 * product, back)
    b.run([gup, n2], [b.value(4096, held=True)], 4 * product, back)
    b.run([gn2, r1, gradient], [gr1], 4 * point, back, **soft)
    b.run([gr1, weight], [ga], product, back)
    b.run([gr1, a], [b.value(1024, held=True)], product, back)
    b.run([ga, qkv, stat], [gqkv], 4 * product, back)
    b.run([gqkv, weight], [gn1], 3 * product, back)
    b.run([gqkv, n1], [b.value(3072, held=True)], 3 * product, back)
    b.run([gn1, x, gr1], [gx], 4 * point, back, **soft)
    return gx


def _chain(sizes_bytes: Sequence[int], costs_seconds: Sequence[float]) -> Problem:
    """Return a chain of layers.

    Args:
        sizes_bytes: of the input of each layer and the last output; gradients alike.
        costs_seconds: of the forward layers, then of the backward of each layer.
    """
    layers = len(sizes_bytes) - 1
    b = Builder()
    inputs = [b.value(sizes_bytes[0], Origin.INPUT)]
    for layer in range(layers):
        inputs.append(b.value(sizes_bytes[layer + 1]))
        b.run(inputs[-2:-1], inputs[-1:], costs_seconds[layer])
    gradient = b.value(sizes_bytes[layers], Origin.TANGENT)
    for layer in reversed(range(layers)):
        new = b.value(sizes_bytes[layer], held=layer == 0)
        cost = costs_seconds[layers + layer]
        b.run([inputs[layer], gradient], [new], cost, Phase.BACKWARD)
        gradient = new
    return b.problem()


def _rng(seed: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(seed))


def _layers(
    rng: np.random.Generator, nodes: int, mean: float, variability: float
) -> list[int]:
    """Return where each layer begins, and the number of nodes at the end."""
    starts = [0, 1]
    least, most = (1 - variability) * mean, (1 + variability) * mean
    while starts[-1] < nodes - 1:
        drawn = max(1, round(least + (most - least) * rng.random()))
        starts.append(min(nodes - 1, starts[-1] + drawn))
    return [*starts, nodes]


def _adjacent(
    rng: np.random.Generator, start: int, middle: int, end: int, density: float
) -> _Edges:
    """Return the edges from layer [start, middle) to layer [middle, end).

    One sure edge for each node beside those of the density gives as many edges as the
    published graphs have: 1 / width more than the density.
    """
    above, here = middle - start, end - middle
    linked = rng.random((above, here)) < density
    linked[_below(rng, above, here), np.arange(here)] = True
    unread = np.flatnonzero(~linked.any(axis=1))
    linked[unread, _below(rng, here, len(unread))] = True
    sources, targets = np.nonzero(linked)
    return sources + start, targets + middle


def _skips(rng: np.random.Generator, starts: Sequence[int], count: int) -> _Edges:
    """Return at most ``count`` different edges that pass over a layer or more.

    Ends are uniform: any node two layers and more before the sink, and any node two
    layers and more after it. In the published graphs the span of a skip, relative to
    what is left of the graph, is uniform.
    """
    nodes = starts[-1]
    beyond = np.repeat(  # of each node, the first node two layers on
        [*starts[2:], nodes], np.diff(starts)
    )
    sources = _below(rng, starts[-3], count)
    first = beyond[sources]
    targets = first + _below(rng, nodes - first, count)
    _, kept = np.unique(sources * nodes + targets, return_index=True)
    return sources[kept], targets[kept]


def _sizes(rng: np.random.Generator, count: int) -> list[int]:
    """Return sizes in bytes by the histogram, uniform within a bin."""
    shares = np.cumsum([0, *SIZE_HISTOGRAM]) / sum(SIZE_HISTOGRAM)
    edges = np.arange(len(shares)) * SIZE_BIN
    drawn = np.interp(rng.random(count), shares, edges)
    return [SIZE_STEP * math.ceil(size / SIZE_STEP) for size in drawn.tolist()]


def _below(rng: np.random.Generator, limit: int | _Ints, count: int) -> _Ints:
    """Return ``count`` integers, each uniform in [0, limit)."""
    return np.floor(rng.random(count) * limit).astype(np.int64)
