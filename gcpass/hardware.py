"""What a device can do at most: peak rates, memory, bandwidth. Loads no torch.

The table is data, ``devices.json``, with the source of every entry. Rates are dense:
without structured sparsity, which vendors like to print and training does not use.

Why not torch's own table (`torch._inductor.analysis.device_info`): it knows few
devices, looks names up exactly, so that the driver's "NVIDIA H100 80GB HBM3" is
missing, and mixes sparse with dense rates.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Any

from gcpass.errors import InvalidOptionError

__all__ = ["Device", "current_device", "find_device", "known_devices", "this_cpu"]

GPU_LAUNCH_SECONDS = 2e-6
"""Time that one more kernel costs on a GPU besides its own work, seconds. Origin: about
1 us between overlapped launches and 2 us to 3 us for an empty kernel in NVIDIA's
"Getting Started with CUDA Graphs" (2019, V100); in between."""

CPU_LAUNCH_SECONDS = 2e-6
"""The same for a CPU: dispatch of one operator (about 1 us) and the fork and join of a
small OpenMP team (about 1 us). An estimate, not measured on this machine."""

# The CPU entry is a stated estimate of a server core with AVX2: 2 fused multiply-adds
# of 8 floats per cycle at 2.5 GHz. It depends on the number of cores only, so that
# every process and rank on one machine plans alike; a measurement would not.
_CPU_CORE_TFLOPS = (
    ("fp64", 0.04),
    ("fp32", 0.08),
    ("tf32", 0.08),
    ("fp16", 0.08),  # widened to fp32 before each operation
    ("bf16", 0.08),
    ("int8", 0.16),
)
_CPU_CORE_BANDWIDTH = 8e9  # bytes/s: a DDR4-3200 channel, 25.6 GB/s, for about 3 cores
_CPU_MAX_BANDWIDTH = 200e9  # bytes/s: 8 such channels, one socket
_CPU_CORE_MEMORY_BYTES = 4 * 2**30  # 4 GiB per core, the usual cloud machine

_RATE_BY_DTYPE = {
    "float64": "fp64",
    "complex128": "fp64",
    "float32": "fp32",
    "complex64": "fp32",
    "float16": "fp16",
    "complex32": "fp16",
    "bfloat16": "bf16",
    "int8": "int8",
    "uint8": "int8",
}
_NEXT_RATE = {  # where a device has no unit for a rate, the one that does the work
    "fp8": "fp16",
    "int8": "fp16",
    "fp16": "fp32",
    "bf16": "fp32",
    "tf32": "fp32",
    "fp64": "fp32",
}

# Words of a driver's name that do not tell two devices apart. Every other word that an
# entry lacks ("Laptop", "Ti", "MIG", another memory size) makes it another device.
_NEUTRAL_WORDS = frozenset(
    "nvidia amd instinct tesla geforce rtx gpu graphics tensor core accelerator oam "
    "sxm sxm2 sxm3 sxm4 sxm5 sxm6 hbm2 hbm2e hbm3 hbm3e gddr6 gddr6x gddr7".split()
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """Peak rates and memory of one device.

    Attributes:
        name: as its driver says it, or "CPU (n cores)".
        torch_device_type: "cuda" (ROCm included) or "cpu".
        peaks: (rate name, FLOP/s) pairs, dense, in the table's order. Rate names:
            fp64, fp32, tf32, fp16, bf16, fp8, int8.
        memory_bytes: what a process can allocate.
        bandwidth_bytes_per_s: of device memory.
        host_link_bytes_per_s: host to device, one direction.
        launch_seconds: cost of one more kernel besides its own work.
        multiprocessors: how many work at once (AMD: compute units); 0 where products
            are not cut into tiles for them (a CPU).
        source: where the numbers are from.
    """

    name: str
    torch_device_type: str
    peaks: tuple[tuple[str, float], ...]
    memory_bytes: int
    bandwidth_bytes_per_s: float
    host_link_bytes_per_s: float
    launch_seconds: float
    multiprocessors: int
    source: str

    def peak_flops(self, dtype_name: str) -> float:
        """Return the dense peak for a dtype, FLOP/s.

        Args:
            dtype_name: torch's name without the prefix ("bfloat16"), or a rate name
                ("tf32"). All float8 types share one rate; dtypes without arithmetic
                units of their own (bool, int64) take the fp32 rate.
        """
        rate = _rate_name(dtype_name)
        peaks = dict(self.peaks)
        while rate not in peaks:
            rate = _NEXT_RATE[rate]
        return peaks[rate]


def find_device(name: str) -> Device:
    """Return the device with this name, exact first, then by its words.

    Args:
        name: a name or alias of the table in any case ("h100", "A100-SXM4-40GB"), a
            driver's name ("NVIDIA H100 80GB HBM3"), or "cpu" for this machine.

    Raises:
        InvalidOptionError: no entry fits; the message names the closest ones.
    """
    words = _words(name)
    if words == {"cpu"}:
        return this_cpu()
    for device, names in _table():
        if any(words == _words(known) for known in names):
            return device
    best, best_score = None, 0
    for device, names in _table():
        score = max(_score(words, _words(known)) for known in names)
        if score > best_score:
            best, best_score = device, score
    if best is None:
        raise InvalidOptionError(_unknown_message(name), option="device")
    return best


def current_device(torch_device_type: str, name: str | None) -> Device:
    """Return the device that a region runs on.

    Args:
        torch_device_type: `torch.device.type` of the region's tensors.
        name: the driver's name (`torch.cuda.get_device_name()`) or the name that the
            user gave; None for a CPU.

    Raises:
        InvalidOptionError: the name is unknown, or missing for an accelerator.
    """
    if name is not None:
        return find_device(name)
    if torch_device_type == "cpu":
        return this_cpu()
    raise InvalidOptionError(
        f"no device name for device type {torch_device_type!r}: name one of "
        f"{', '.join(known_devices())}",
        option="device",
    )


def this_cpu() -> Device:
    """Return the stated estimate for this machine's CPU (see the constants above)."""
    cores = os.cpu_count() or 1
    return Device(
        name=f"CPU ({cores} cores)",
        torch_device_type="cpu",
        peaks=tuple((rate, cores * t * 1e12) for rate, t in _CPU_CORE_TFLOPS),
        memory_bytes=cores * _CPU_CORE_MEMORY_BYTES,
        bandwidth_bytes_per_s=min(cores * _CPU_CORE_BANDWIDTH, _CPU_MAX_BANDWIDTH),
        host_link_bytes_per_s=min(cores * _CPU_CORE_BANDWIDTH, _CPU_MAX_BANDWIDTH),
        launch_seconds=CPU_LAUNCH_SECONDS,
        multiprocessors=0,
        source="estimate from the number of cores (AVX2 at 2.5 GHz); not measured",
    )


def known_devices() -> tuple[str, ...]:
    """Return the names of the table, in its order."""
    return tuple(device.name for device, _ in _table())


def _rate_name(dtype_name: str) -> str:
    name = dtype_name.removeprefix("torch.").lower()
    if name.startswith("float8"):
        return "fp8"
    if name in _NEXT_RATE:
        return name
    return _RATE_BY_DTYPE.get(name, "fp32")


@lru_cache(maxsize=1)
def _table() -> tuple[tuple[Device, tuple[str, ...]], ...]:
    """Return (device, name and aliases) for every entry of the file."""
    text = files("gcpass").joinpath("devices.json").read_text(encoding="utf-8")
    entries = json.loads(text)["devices"]
    return tuple((_device(e), (e["name"], *e["aliases"])) for e in entries)


def _device(entry: dict[str, Any]) -> Device:
    return Device(
        name=entry["name"],
        torch_device_type=entry["torch_device_type"],
        peaks=tuple((rate, t * 1e12) for rate, t in entry["tflops"].items()),
        memory_bytes=int(entry["memory_gib"] * 2**30),
        bandwidth_bytes_per_s=entry["bandwidth_gb_s"] * 1e9,
        host_link_bytes_per_s=entry["host_link_gb_s"] * 1e9,
        launch_seconds=GPU_LAUNCH_SECONDS,
        multiprocessors=entry["multiprocessors"],
        source=entry["source"],
    )


def _words(name: str) -> frozenset[str]:
    """Return the lower-case words of a name; "80 GB" and "80GiB" are one word, 80gb."""
    joined = re.sub(r"(\d+)\s*gi?b\b", r" \1gb ", name.lower())
    return frozenset(re.findall(r"[a-z0-9.]+", joined))


def _score(words: frozenset[str], known: frozenset[str]) -> int:
    """Return how well an entry's name fits, 0 when it is another device.

    Every telling word of the query must be in the entry's name, among them the model.
    The entry may say more: "A100 40GB" fits "A100-SXM4-40GB".
    """
    telling = words - _NEUTRAL_WORDS
    if not telling or not telling <= known or not _has_model(telling):
        return 0
    return 100 * len(words & known) + 99 - min(99, len(known - words))


def _has_model(words: Iterable[str]) -> bool:
    return any(
        re.search(r"[a-z]+\d|\d{4}", w) and not re.fullmatch(r"\d+gb", w) for w in words
    )


def _unknown_message(name: str) -> str:
    aliases = {known.lower(): known for _, names in _table() for known in names}
    near = difflib.get_close_matches(name.lower(), aliases, n=4, cutoff=0.4)
    shown = [aliases[item] for item in near] or known_devices()
    return f"unknown device {name!r}; close entries: {', '.join(shown)}"
