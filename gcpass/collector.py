"""Python's cyclic collector, which planning does not need."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused_collector() -> Iterator[None]:
    """Keep Python's cyclic collector from walking torch's heap again and again.

    Planning allocates millions of small tuples and no cycles; each full collection
    walks everything that torch and the model hold (75 s instead of 8 on a GPT).
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
