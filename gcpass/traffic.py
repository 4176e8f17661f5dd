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
    result = []
    for op_id, step in enumerate(steps):
        moved = 0
        for value in step.reads:
            if not step.absorbing:
                moved += sizes[value]
            elif not _is_inside(
                step, writer[value], steps, readers[value], value in held
            ) and not _is_read_anyway(op_id, readers[value], steps, levels, kernels):
                moved += sizes[value]
        for value in step.writes:
            inside = step.fusible and value not in held
            late = [r for r in readers[value] if steps[r].phase is not Phase.FORWARD]
            if not inside or not all(
                steps[r].absorbing for r in late or readers[value]
            ):
                moved += sizes[value]
        result.append(moved)
    return result


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


def _is_inside(
    step: Step,
    writer: int | None,
    steps: Sequence[Step],
    readers: Sequence[int],
    is_held: bool,
) -> bool:
    """Whether what an absorbing operation reads is computed in its kernel.

    A value of the forward that the backward reads is, too, unless it is saved; then
    saving it has paid for the read.
    """
    if writer is None or not steps[writer].fusible or is_held:
        return False
    crosses = step.phase is not Phase.FORWARD and steps[writer].phase is Phase.FORWARD
    return crosses or len(readers) == 1


def _is_read_anyway(
    op_id: int,
    readers: Sequence[int],
    steps: Sequence[Step],
    levels: Sequence[int],
    kernels: Sequence[int],
) -> bool:
    """Whether something else in the operation's kernel pays for a value's read."""
    forward = steps[op_id].phase is Phase.FORWARD
    there = 0
    for reader in readers:
        phase = steps[reader].phase
        if not steps[reader].absorbing:
            continue
        if (phase is Phase.FORWARD) is forward and reader < op_id:
            if levels[reader] == levels[op_id]:
                return True
        if phase is Phase.BACKWARD:
            there |= 1 << levels[reader]
        elif phase is Phase.EITHER and (forward or reader < op_id):
            there |= kernels[reader]  # only the backward needs it
    again = steps[op_id].phase is not Phase.BACKWARD
    return again and kernels[op_id] != 0 and kernels[op_id] & ~there == 0
