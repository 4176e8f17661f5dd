"""Several regions in one step: what earlier ones hold counts against later ones.

A graph break splits a model into regions that are compiled one after the other, each
when it first runs. A region is *outstanding* from the end of its forward until its
backward starts; what it holds then (saved tensors and outputs) is memory that a
region compiled in between does not have.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Bytes that outstanding regions hold between forward and backward.

    Attributes:
        bytes: with the plans that run.
        fastest_bytes: with the plans that have no budget: the base of fractions.
        peak_bytes: largest peak of one of those regions without a budget.
    """

    bytes: int = 0
    fastest_bytes: int = 0
    peak_bytes: int = 0


@dataclass(slots=True, kw_only=True)
class _Region:
    held: Held
    graphs: list[weakref.ref[Any]] = field(default_factory=list)


_lock = threading.Lock()
_regions: dict[str, _Region] = {}


def outstanding() -> Held:
    """Return what regions whose backward has not started hold now."""
    with _lock:
        alive = [r.held for r in _regions.values() if any(g() for g in r.graphs)]
    return Held(
        bytes=sum(h.bytes for h in alive),
        fastest_bytes=sum(h.fastest_bytes for h in alive),
        peak_bytes=max((h.peak_bytes for h in alive), default=0),
    )


def forward_ran(key: str, held: Held, results: Any) -> None:
    """Note that a region's forward has run; its backward's start takes it back."""
    node = _autograd_node(results)
    if node is None:
        return
    try:
        graph: weakref.ref[Any] = weakref.ref(node)
    except TypeError:  # not every node can be referenced weakly: count nothing
        return
    with _lock:
        region = _regions.setdefault(key, _Region(held=held))
        region.held = held
        region.graphs = [g for g in region.graphs if g() is not None]
        region.graphs.append(graph)
    node.register_prehook(lambda gradients: _backward_started(key, graph))


def forget() -> None:
    """Forget every region (tests)."""
    with _lock:
        _regions.clear()


def _backward_started(key: str, graph: weakref.ref[Any]) -> None:
    with _lock:
        region = _regions.get(key)
        if region is not None and graph in region.graphs:
            region.graphs.remove(graph)


def _autograd_node(results: Any) -> Any:
    items: Sequence[Any] = results if isinstance(results, (list, tuple)) else (results,)
    for item in items:
        if isinstance(item, torch.Tensor) and item.grad_fn is not None:
            return item.grad_fn
    return None
