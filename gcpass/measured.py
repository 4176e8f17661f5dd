"""The peak of a step as torch's allocator saw it."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch

from gcpass.torch_private import allocations_during

__all__ = ["measure"]


def measure(step: Callable[[], object], *, device: str | None = None) -> int:
    """Return the most bytes that a step allocates beyond what is alive before it.

    This is the peak that a `memory_budget` limits. Gradients count unless they were
    there before: run a step first, and set them to zero rather than to None. On a GPU
    these are the blocks that the caching allocator handed out (`memory_allocated`), on
    the CPU every allocation of torch's in this thread, where backwards run, too.

    Args:
        step: a forward and a backward; what it returns is dropped.
        device: "cpu", or a GPU as torch names it; by default the current GPU if there
            is one, else the CPU.

    Raises:
        RuntimeError: the device is not there, or a profiler is active already.
    """
    gc.collect()
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if where.type == "cuda":
        torch.cuda.synchronize(where)
        torch.cuda.reset_peak_memory_stats(where)
        before = torch.cuda.memory_allocated(where)
        step()
        torch.cuda.synchronize(where)
        return torch.cuda.max_memory_allocated(where) - before
    alive = peak = 0
    for change in allocations_during(step):
        alive += change
        peak = max(peak, alive)
    return peak
