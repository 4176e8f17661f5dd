"""Seconds of operations as measured on this device: `cost_model="profile"`.

Library calls (products, convolutions, attention, scatter, sort) are run on zeros of the
layout that the graph has, each distinct call once (several times, the least counts).
Operations that fuse have no time of their own: their kernel takes what its traffic
takes at the measured bandwidth or, on a CPU, what their arithmetic takes on numbers in
the cache, whichever is more. Times are kept in a file beside Inductor's cache, by
device, number of threads and release of torch. They are rounded, so that noise changes
few plans; ranks that must agree need that file in common.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import logging
import math
import os
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
from gcpass.real_arguments import describe, real
from gcpass.sizes import element_count, tensors_in
from gcpass.torch_private import (
    OpOverload,
    benchmarker,
    cache_dir,
    without_modes,
)

log = logging.getLogger("gcpass")

STREAMED_BYTES = 64 * 2**20  # copied to measure the bandwidth: more than caches hold
CACHED_ELEMENTS = 2**14  # of one tensor for arithmetic: 64 KiB in float32
SECONDS_EACH = 0.02  # of measuring one call
LEAST_RUNS = 3
DIGITS = 2  # significant ones that are kept of a time

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
        seconds: measured so far, by call.
        changed: whether the file lacks some of them.
    """

    nominal: Device
    torch_device: torch.device
    seconds: dict[str, float] = field(init=False, default_factory=dict)
    changed: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        try:
            self.seconds = json.loads(self._path().read_text())
        except (OSError, ValueError):  # there is none yet, or another writes it
            self.seconds = {}

    @property
    def device(self) -> Device:
        """The device with its measured bandwidth."""
        copied = self._timed("copy", self._copy)
        if copied is None:
            return self.nominal
        bandwidth = 2 * STREAMED_BYTES / copied / BANDWIDTH_EFFICIENCY
        return dataclasses.replace(self.nominal, bandwidth_bytes_per_s=bandwidth)

    def price(self, node: fx.Node, bytes_moved: int) -> NodeCost:
        """Return the cost of a node, with its measured time where it has one.

        Args:
            node: of the joint graph.
            bytes_moved: what it reads and writes in memory, see `node_cost`.
        """
        device = self.device
        cost = node_cost(node, device, bytes_moved=bytes_moved)
        seconds = cost.seconds
        kind = op_kind(node)
        if kind is Kind.EXTERN:
            call = self._call(node)
            measured = None if call is None else self._timed(*call)
            seconds = seconds if measured is None else measured
        elif kind is Kind.POINTWISE and self.torch_device.type == "cpu":
            seconds = max(seconds, self._arithmetic(node))
        return dataclasses.replace(cost, seconds=seconds)

    def save(self) -> None:
        """Write what was measured; a folder that cannot be written costs a warning."""
        if not self.changed:
            return
        path = self._path()
        text = json.dumps(dict(sorted(self.seconds.items())), indent=0)
        temporary = path.with_suffix(f".{uuid.uuid4().hex}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(text)
            os.replace(temporary, path)
            self.changed = False
        except OSError as error:
            log.warning("measured times are not kept: %s", error)

    def _path(self) -> Path:
        where = (
            self.nominal.name,
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
            except (RuntimeError, NotImplementedError, IndexError, ValueError) as error:
                log.warning("no time for %s, the roofline counts: %s", key, error)
                found = -1.0
            self.seconds[key] = float(f"{found:.{DIGITS - 1}e}")
            self.changed = True
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

    def _arithmetic(self, node: fx.Node) -> float:
        """Return the seconds of a pointwise operation on numbers in the cache."""
        target, out = node.target, tensors_in(node.meta.get("val"))
        if not is_elementwise(target) or len(out) != 1:
            return 0.0
        times = [self._on_elements(node, n) for n in (1, CACHED_ELEMENTS)]
        if times[0] is None or times[1] is None:
            return 0.0
        each = max(0.0, times[1] - times[0]) / CACHED_ELEMENTS
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
            return value

        def run() -> Callable[[], Any]:
            real_args = ones(args)
            real_kwargs = {name: ones(value) for name, value in kwargs.items()}
            target: Any = node.target
            return lambda: target(*real_args, **real_kwargs)

        return self._timed(f"{node.target} {describe(args)} {describe(kwargs)}", run)
