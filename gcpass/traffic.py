"""The bytes that operations read and write in the kernels of a fusing compiler.

A kernel reads a value once, however many of its operations do. Which operations share a
kernel is not known before a plan is made. Assumed is that those do which read the same
value and have as many library calls behind them in the longest chain (their *level*),
as no call can then lie between. The first of them pays for the read.

An operation of the forward is worth its price when it is executed again, in the kernel
of the backward that reads its result. What that kernel reads anyway is free, and so is
the result, unless a library call reads it. Saving the result is what costs a read
(`gcpass.solvers.problem.Problem.saving_seconds`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gcpass.solvers.problem import Phase

__all__ = ["Step", "bytes_moved"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One operation as far as traffic is concerned.

    Attributes:
        reads: values read.
        writes: values written.
        phase: see `Phase`.
        fusible: pointwise, may run inside the kernels of its readers.
        absorbing: takes fusible operations into its kernel.
    """

    reads: Sequence[int]
    writes: Sequence[int]
    phase: Phase
    fusible: bool
    absorbing: bool


def bytes_moved(
    steps: Sequence[Step], sizes: Sequence[int], held: set[int]
) -> list[int]:
    """Return the bytes that each operation moves, in topological order.

    Args:
        steps: the operations.
        sizes: bytes of each value.
        held: values that leave the region: always in memory.
    """
    readers: list[list[int]] = [[] for _ in sizes]
    writer: list[int | None] = [None] * len(sizes)
    for op_id, step in enumerate(steps):
        for value in step.reads:
            readers[value].append(op_id)
        for value in step.writes:
            writer[value] = op_id
    levels = _levels(steps, writer)
    kernels = _backward_kernels(steps, readers, levels)
    moved = [0] * len(steps)
    for value, size in enumerate(sizes):
        free = _free_readers(steps, readers[value], levels, kernels)
        for reader in readers[value]:
            inside = _is_inside(steps, writer[value], readers[value], reader)
            if not steps[reader].absorbing or not (
                reader in free or (inside and value not in held)
            ):
                moved[reader] += size
        source = writer[value]
        if source is not None and (
            value in held or not _stays_inside(steps, source, readers[value])
        ):
            moved[source] += size
    return moved


def _levels(steps: Sequence[Step], writer: Sequence[int | None]) -> list[int]:
    """Return how many library calls the longest chain to each operation has."""
    levels: list[int] = []
    for step in steps:
        sources = [w for value in step.reads if (w := writer[value]) is not None]
        levels.append(
            max((levels[w] + (not steps[w].absorbing) for w in sources), default=0)
        )
    return levels


def _backward_kernels(
    steps: Sequence[Step], readers: Sequence[Sequence[int]], levels: Sequence[int]
) -> list[int]:
    """Return the levels at which the backward uses each result, as bits.

    Whatever is computed inside of a kernel uses what it reads where it is used itself.
    """
    kernels = [0] * len(steps)
    for op_id in reversed(range(len(steps))):
        for value in steps[op_id].writes:
            for reader in readers[value]:
                step = steps[reader]
                if not step.absorbing:
                    continue
                if step.phase is Phase.BACKWARD:
                    kernels[op_id] |= 1 << levels[reader]
                elif step.fusible:
                    kernels[op_id] |= kernels[reader]
    return kernels


def _free_readers(
    steps: Sequence[Step],
    readers: Sequence[int],
    levels: Sequence[int],
    kernels: Sequence[int],
) -> set[int]:
    """Return the readers of a value in whose kernel something else pays for the read.

    What only the backward needs (`Phase.EITHER`) is in the kernels that use it there.
    """
    late = either = 0
    absorbing = [r for r in readers if steps[r].absorbing]
    for reader in absorbing:
        if steps[reader].phase is Phase.BACKWARD:
            late |= 1 << levels[reader]
        elif steps[reader].phase is Phase.EITHER:
            either |= kernels[reader]
    free = set()
    paid: set[tuple[bool, int]] = set()
    earlier = late
    for reader in absorbing:
        phase = steps[reader].phase
        there = {Phase.FORWARD: late | either, Phase.EITHER: earlier}.get(phase, 0)
        place = phase is Phase.FORWARD, levels[reader]
        if place in paid or (kernels[reader] and not kernels[reader] & ~there):
            free.add(reader)
        paid.add(place)
        if phase is Phase.EITHER:
            earlier |= kernels[reader]
    return free


def _is_inside(
    steps: Sequence[Step], writer: int | None, readers: Sequence[int], reader: int
) -> bool:
    """Whether a value is computed in the kernel of one that reads it.

    A value of the forward that the backward reads is, too, unless it is saved; then
    saving it has paid for the read.
    """
    if writer is None or not steps[writer].fusible:
        return False
    is_late = steps[reader].phase is not Phase.FORWARD
    return (is_late and steps[writer].phase is Phase.FORWARD) or len(readers) == 1


def _stays_inside(steps: Sequence[Step], writer: int, readers: Sequence[int]) -> bool:
    """Whether no library call reads a result where it is computed again."""
    late = [r for r in readers if steps[r].phase is not Phase.FORWARD]
    return steps[writer].fusible and all(steps[r].absorbing for r in late or readers)
