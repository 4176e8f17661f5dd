"""Two faults of Inductor that lose or misplace gradients on the CPU, corrected.

**What reads a written buffer stays behind the write.** A write in place has a name of
its own in Inductor's scheduler: a kernel that reads the zeros after a scatter was added
to them depends on the scatter's name, not on that of the zeros. To fuse kernels of
other loops, such as a copy into channels-last order, the CPU backend computes a node's
loops and dependencies anew (`SchedulerNode.recompute_size_and_body`), and there torch
2.13 finds the name of the zeros: what says that the scatter comes first is lost. Where
the node then runs before the scatter it reads zeros, and every gradient behind it is
lost without a word. Seen on a UNet: the backward of nearest upsampling is such a
scatter, and a division and convolutions in channels-last order follow it (relative
error 0.19). pytorch#185509 reports the same of max pooling; the correction is that of
pytorch#185873 and, for what orders a write after earlier reads, pytorch#177816. Layouts
are not the cause: a model in channels-last memory format is wrong without Inductor's
layout optimization too.

**Positions are read as they lie.** The backward of some poolings reads its positions as
if they were contiguous. Eager mode never hands it others; Inductor lays them out like
the input, and in channels-last order gradients go to wrong places (pytorch#197888).

Both change nothing where torch has them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gcpass.torch_private import (
    OrderedSet,
    SchedulerNode,
    StarDep,
    WeakDep,
    add_layout_constraint,
    require_contiguous,
)

READ_AS_CONTIGUOUS = (
    torch.ops.aten.adaptive_max_pool3d_backward,
    torch.ops.aten.fractional_max_pool2d_backward,
    torch.ops.aten.fractional_max_pool3d_backward,
)


def correct_inductor() -> None:
    """Correct Inductor, once per process."""
    original = SchedulerNode.recompute_size_and_body
    if getattr(original, "_gcpass_corrected", False):
        return
    corrected: Any = _keeping_order(original)
    SchedulerNode.recompute_size_and_body = corrected  # type: ignore[method-assign]
    for operator in READ_AS_CONTIGUOUS:
        add_layout_constraint(operator, require_contiguous)


def _keeping_order(original: Callable[..., None]) -> Callable[..., None]:
    def recompute_size_and_body(self: Any, *arguments: Any, **named: Any) -> None:
        order = OrderedSet(
            d for d in self.read_writes.reads if isinstance(d, (WeakDep, StarDep))
        )
        original(self, *arguments, **named)
        found = self.read_writes.with_read(order) if order else self.read_writes
        self.set_read_writes(found.rename(self.mutation_renames))

    recompute_size_and_body._gcpass_corrected = True  # type: ignore[attr-defined]
    return recompute_size_and_body
