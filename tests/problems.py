"""Generators of small and large problems; the same arguments give the same problem."""

from __future__ import annotations

import dataclasses
import random

from gcpass.solvers.generate import Builder, chain, transformer
from gcpass.solvers.plain import plain_sequence
from gcpass.solvers.problem import Origin, Phase, Problem, ValueId

__all__ = ["Builder", "chain", "random_plain", "random_problem", "transformer"]


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
        fusible = fused and rng.random() < 0.6
        aligned = _aligned(b, rng, reads, writes) if fusible else ()
        b.run(
            sorted(reads),
            writes,
            float(rng.randint(0, 9)),
            phase,
            recomputable=rng.random() >= rare,
            fusible=fusible,
            absorbing=fused and rng.random() < 0.7,
            aligned=aligned,
            workspace_bytes=rng.randint(0, 5) if rng.random() < rare else 0,
        )
        made += writes
    return made


def _aligned(
    b: Builder, rng: random.Random, reads: set[ValueId], writes: list[ValueId]
) -> tuple[ValueId, ...]:
    """Return some of the reads, and often give the result the size of one of them."""
    aligned = tuple(v for v in sorted(reads) if rng.random() < 0.7)
    if len(writes) > 1 or not aligned:
        return ()
    if rng.random() < 0.8:
        size = b.values[rng.choice(aligned)].size_bytes
        (result,) = writes
        b.values[result] = dataclasses.replace(b.values[result], size_bytes=size)
    return aligned


def random_plain(seed: int, operations: int = 8) -> Problem:
    """Return a random plain sequence: of all edges alike, or one that turns back.

    One that turns back is a step of training: the second half reads the first in
    reverse, so that a small budget asks for many repeats.
    """
    rng = random.Random(seed)
    turns = seed % 3 > 0
    half = operations // 2
    edges = []
    for node in range(1, operations):
        reads = {node - 1} if turns or rng.random() < 0.7 else set()
        if turns and node > half and rng.random() < 0.8:
            reads.add(2 * half - node)
        chance = 0.15 if turns else 0.35
        reads |= {i for i in range(node - 1) if rng.random() < chance}
        edges += [(i, node) for i in sorted(reads) if i >= 0]
    largest = 3 if seed % 2 else 9
    sizes = [rng.randint(1, largest) for _ in range(operations)]
    costs = [float(rng.randint(1, 9)) for _ in range(operations)]
    return plain_sequence(sizes, costs, edges, range(operations))
