"""Seconds of operations as measured on this device: `cost_model="profile"`.

Library calls (products, convolutions, attention, scatter, sort) are run on zeros of the
layout that the graph has, each distinct call once (several times, the least counts).
Operations that fuse have no time of their own: their kernel takes what its traffic
takes at the measured bandwidth or, on a CPU, what their arithmetic takes on numbers in
the cache, whichever is more. Times are kept in a file beside Inductor's cache, by
device, number of threads and release of torch. They are rounded, so that noise changes
few plans; ranks that must agree need that file in common. Indices are all 0: scatter
onto one row is what is timed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import logging
import math
import os
import platform
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from gcpass.cost import BANDWIDTH_EFFICIENCY, NodeCost, node_cost
from gcpass.hardware import Device
from gcpass.op_facts import Kind, draws_random, is_elementwise, op_kind
from gcpass.real_arguments import describe, plain, real
from gcpass.sizes import element_count, tensors_in
from gcpass.torch_private import (
    OpOverload,
    benchmarker,
    cache_dir,
    without_modes,
)

__all__ = ["Profile", "least_seconds"]

log = logging.getLogger("gcpass")

STREAMED_BYTES = 64 * 2**20  # copied to measure the bandwidth: more than caches hold
CACHED_ELEMENTS = 2**14  # of one tensor for arithmetic: 64 KiB in float32
SECONDS_EACH = 0.02  # of measuring one call
LEAST_RUNS = 3
DIGITS = 2  # significant ones that are kept of a time

_NOT_RUNNABLE = (
    *(RuntimeError, NotImplementedError, AssertionError),
    *(IndexError, TypeError, ValueError),
)
_NAMESPACES = ("aten", "mkldnn", "prims")


def least_seconds(run: Callable[[], object], device: torch.device) -> float:
    """Return the least time of a call, of as many as fit into `SECONDS_EACH`."""
    if device.type != "cpu":
        return float(benchmarker.benchmark_gpu(run)) / 1e3
    run()
    least, end = math.inf, time.perf_counter() + SECONDS_EACH
    for count in itertools.count():
        started = time.perf_counter()
        if count >= LEAST_RUNS and started > end:
            return least
        run()
        least = min(least, time.perf_counter() - started)
    raise AssertionError("the loop has no other end")


@dataclass(slots=True, kw_only=True)
class Profile:
    """Measured times of one device.

    Attributes:
        nominal: the device as the table has it.
        torch_device: where operations are run.
        seconds: measured so far, by call; -1 where the call failed (not written: what
            failed for want of memory, say, is tried again by the next process).
        device: as the table has it, with the measured bandwidth.
        measured: calls that the file lacks.
    """

    nominal: Device
    torch_device: torch.device
    seconds: dict[str, float] = field(init=False, default_factory=dict)
    device: Device = field(init=False)
    measured: set[str] = field(init=False, default_factory=set)

    def __post_init__(self) -> None:
        self.seconds = self._kept()
        self.device = self.nominal
        copied = self._timed("copy", self._copy)
        if copied is not None:
            bandwidth = 2 * STREAMED_BYTES / copied / BANDWIDTH_EFFICIENCY
            self.device = dataclasses.replace(
                self.nominal, bandwidth_bytes_per_s=bandwidth
            )

    def price(self, node: fx.Node, bytes_moved: int) -> NodeCost:
        """Return the cost of a node, with its measured time where it has one.

        Args:
            node: of the joint graph.
            bytes_moved: what it reads and writes in memory, see `node_cost`.
        """
        cost = node_cost(node, self.device, bytes_moved=bytes_moved)
        seconds = cost.seconds
        kind = op_kind(node)
        if kind is Kind.EXTERN:
            call = self._call(node)
            measured = None if call is None else self._timed(*call)
            if call is not None and measured is None:
                log.warning("no time for %s, the roofline counts", call[0])
            seconds = seconds if measured is None else measured
        elif kind is Kind.POINTWISE and self.torch_device.type == "cpu":
            seconds = max(seconds, self._arithmetic(node))
        return dataclasses.replace(cost, seconds=seconds)

    def save(self) -> None:
        """Write what was measured; a folder that cannot be written costs a warning."""
        if not self.measured:
            return
        if self.torch_device.type == "cuda":
            torch.cuda.empty_cache()  # the operands of what was timed
        path = self._path()
        new = {c: self.seconds[c] for c in self.measured if self.seconds[c] >= 0.0}
        times = self._kept() | new  # others may have written meanwhile
        text = json.dumps(dict(sorted(times.items())), indent=0)
        temporary = path.with_suffix(f".{uuid.uuid4().hex}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(text)
            os.replace(temporary, path)
            self.measured.clear()
        except OSError as error:
            log.warning("measured times are not kept: %s", error)

    def _kept(self) -> dict[str, float]:
        try:
            kept = json.loads(self._path().read_text())
        except (OSError, ValueError):  # there is none yet, or it is spoilt
            return {}
        return kept if isinstance(kept, dict) else {}

    def _path(self) -> Path:
        where = (
            self.nominal.name,
            _processor(),
            torch.backends.cpu.get_cpu_capability(),
            str(torch.get_num_threads()),
            torch.__version__,
        )
        digest = hashlib.sha256("\0".join(where).encode()).hexdigest()[:16]
        return Path(cache_dir(), "gcpass", f"times_{digest}.json")

    def _timed(self, key: str, run: Callable[[], Callable[[], Any]]) -> float | None:
        """Return seconds by the table, measured if they are not in it.

        Args:
            key: of the table.
            run: makes what is to be timed.
        """
        if key not in self.seconds:
            try:
                with without_modes(), torch.random.fork_rng(devices=()):
                    found = least_seconds(run(), self.torch_device)
            except _NOT_RUNNABLE as error:
                log.debug("no time for %s: %s", key, error)
                found = -1.0
            self.seconds[key] = float(f"{found:.{DIGITS - 1}e}")
            self.measured.add(key)
        known = self.seconds[key]
        return known if known >= 0.0 else None

    def _copy(self) -> Callable[[], Any]:
        source = torch.zeros(STREAMED_BYTES, dtype=torch.uint8).to(self.torch_device)
        target = torch.empty_like(source)
        return lambda: target.copy_(source)

    def _call(self, node: fx.Node) -> tuple[str, Callable[[], Any]] | None:
        """Return a call's key and what runs it, None where it must not be run."""
        target = node.target
        if (
            not isinstance(target, OpOverload)
            or target.namespace not in _NAMESPACES
            or target._schema.is_mutable
            or draws_random(node)
            or not self._is_here(node)
        ):
            return None
        args = map_arg(node.args, lambda n: n.meta.get("val"))
        kwargs = map_arg(node.kwargs, lambda n: n.meta.get("val"))
        key = f"{target} {describe(args)} {describe(kwargs)}"

        def run() -> Callable[[], Any]:
            real_args: Any = real(args)
            real_kwargs: Any = real(kwargs)
            return lambda: target(*real_args, **real_kwargs)

        return key, run

    def _is_here(self, node: fx.Node) -> bool:
        values = [n.meta.get("val") for n in (node, *node.all_input_nodes)]
        return all(t.device == self.torch_device for t in tensors_in(values))

    def _arithmetic(self, node: fx.Node) -> float:
        """Return the seconds of a pointwise operation on numbers in the cache."""
        target, out = node.target, tensors_in(node.meta.get("val"))
        if not is_elementwise(target) or len(out) != 1:
            return 0.0
        one = self._on_elements(node, 1)
        many = None if one is None else self._on_elements(node, CACHED_ELEMENTS)
        if one is None or many is None:
            return 0.0
        each = max(0.0, many - one) / CACHED_ELEMENTS
        return each * element_count(out[0]) / torch.get_num_threads()

    def _on_elements(self, node: fx.Node, count: int) -> float | None:
        def flat(n: fx.Node) -> Any:
            val = n.meta.get("val")
            if not isinstance(val, torch.Tensor):
                return val
            return torch.empty(count, dtype=val.dtype, device="meta")

        args, kwargs = map_arg(node.args, flat), map_arg(node.kwargs, flat)

        def ones(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return torch.ones(count, dtype=value.dtype, device=self.torch_device)
            if isinstance(value, (list, tuple)):
                return type(value)(ones(item) for item in value)
            return plain(value)

        def run() -> Callable[[], Any]:
            real_args = ones(args)
            real_kwargs = {name: ones(value) for name, value in kwargs.items()}
            target: Any = node.target
            return lambda: target(*real_args, **real_kwargs)

        return self._timed(f"{node.target} {describe(args)} {describe(kwargs)}", run)


def _processor() -> str:
    """Return the name of the machine's processor, "" where it is not said."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if "model name" in line]
    return next(iter(names), "")
