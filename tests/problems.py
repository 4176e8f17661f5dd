"""Generators of small and large problems; the same arguments give the same problem."""

from __future__ import annotations

import random
from collections.abc import Sequence

from gcpass.solvers.problem import (
    Operation,
    Origin,
    Phase,
    Problem,
    Value,
    ValueId,
)


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
        **flags: bool | int,
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


def chain(layers: int, size_bytes: int, cost_seconds: float) -> Problem:
    """Return a chain: backward layer i reads the input of layer i and a gradient.

    Layer 0 reads an input of the step. The output of the last layer is not kept; the
    gradient that leaves the first one is.
    """
    b = Builder()
    inputs = [b.value(size_bytes, Origin.INPUT)]
    for _ in range(layers):
        inputs.append(b.value(size_bytes))
        b.run(inputs[-2:-1], inputs[-1:], cost_seconds)
    gradient = b.value(size_bytes, Origin.TANGENT)
    for layer in reversed(range(layers)):
        new = b.value(size_bytes, held=layer == 0)
        b.run([inputs[layer], gradient], [new], cost_seconds, Phase.BACKWARD)
        gradient = new
    return b.problem()


def transformer(
    layers: int,
    *,
    tokens: int = 1024,
    width: int = 64,
    fused: bool = False,
    dropout: bool = False,
) -> Problem:
    """Return a stack of blocks with 21 operations each, most of them matrix products.

    Per block: norm, qkv, attention (result and statistics), projection, add, norm, up,
    gelu, down, add; gelu's derivative independent of the gradient; the backward.
    Costs are seconds at 1e12 FLOP/s and 1e11 B/s.
    """
    b = Builder()
    wide = 2 * tokens * width
    point, product = wide / 1e11, 2 * tokens * width * width / 1e12
    soft = {"fusible": fused, "absorbing": fused}
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
    soft = {"fusible": fused, "absorbing": fused}
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


def random_problem(
    seed: int,
    operations: int = 7,
    *,
    fused: bool = False,
    largest_bytes: int = 9,
) -> Problem:
    """Return a random forward and backward with every feature of a problem.

    Several results, held and not savable values, operations that cannot be recomputed
    or run on either side, workspace and tangents occur, each in some of the seeds.
    """
    rng = random.Random(seed)
    b = Builder()
    first = [b.value(rng.randint(1, largest_bytes), Origin.INPUT)]
    forward_count = max(1, round(operations * rng.uniform(0.4, 0.65)))
    either_count = rng.choice((0, 0, 1))
    rare = rng.choice((0.0, 0.0, 0.2))  # how often the rarer features occur
    forward = _random_part(
        b, rng, Phase.FORWARD, forward_count, [first], rare, fused, largest_bytes
    )
    either = _random_part(
        b, rng, Phase.EITHER, either_count, [first, forward], rare, fused, largest_bytes
    )
    tangent = [b.value(rng.randint(1, largest_bytes), Origin.TANGENT)]
    if rng.random() < 0.2:
        held = rng.random() < 0.5
        size = rng.randint(1, largest_bytes)
        tangent.append(b.value(size, Origin.TANGENT, held=held))
    count = max(1, operations - forward_count - either_count)
    early = [forward, either, forward, first]
    _random_part(
        b, rng, Phase.BACKWARD, count, [tangent, *early], rare, fused, largest_bytes
    )
    between = rng.choice((0, 0, 3 * largest_bytes))
    return b.problem(rng.choice((0.0, 0.5)) if fused else 0.0, between)


def _random_part(
    b: Builder,
    rng: random.Random,
    phase: Phase,
    count: int,
    pools: list[list[ValueId]],
    rare: float,
    fused: bool,
    largest_bytes: int,
) -> list[ValueId]:
    """Add `count` operations; they read from `pools` and from each other."""
    made: list[ValueId] = []
    for i in range(count):
        reads: set[ValueId] = set()
        if made and rng.random() < 0.85:
            reads.add(made[-1])
        for pool in pools:
            if pool and rng.random() < (0.9 if i == 0 else 0.5):
                reads.add(rng.choice(pool))
        if made and rng.random() < 0.3:
            reads.add(rng.choice(made))
        held = 0.3 if phase is Phase.BACKWARD else rare
        writes = [
            b.value(
                rng.randint(1, largest_bytes),
                held=rng.random() < held,
                savable=rng.random() >= rare,
            )
            for _ in range(1 + (rng.random() < 0.2))
        ]
        b.run(
            sorted(reads),
            writes,
            float(rng.randint(0, 9)),
            phase,
            recomputable=rng.random() >= rare,
            fusible=fused and rng.random() < 0.6,
            absorbing=fused and rng.random() < 0.7,
            workspace_bytes=rng.randint(0, 5) if rng.random() < rare else 0,
        )
        made += writes
    return made
