"""The device table: names as drivers say them, dense rates, no torch."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.resources import files

import pytest

from gcpass.errors import GcpassError, InvalidOptionError
from gcpass.hardware import current_device, find_device, known_devices, this_cpu


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("NVIDIA H100 80GB HBM3", "NVIDIA H100 80GB HBM3"),
        ("h100", "NVIDIA H100 80GB HBM3"),
        ("H100 SXM5", "NVIDIA H100 80GB HBM3"),
        ("H100-SXM5-80GB", "NVIDIA H100 80GB HBM3"),
        ("NVIDIA H100 PCIe", "NVIDIA H100 PCIe"),
        ("nvidia h100 nvl", "NVIDIA H100 NVL"),
        ("NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-40GB"),
        ("A100-SXM4-80GB", "NVIDIA A100-SXM4-80GB"),
        ("NVIDIA A100-SXM-80GB", "NVIDIA A100-SXM4-80GB"),
        ("NVIDIA A100-PCIE-40GB", "NVIDIA A100-PCIE-40GB"),
        ("NVIDIA A100 80GB PCIe", "NVIDIA A100 80GB PCIe"),
        ("a100 80 GB", "NVIDIA A100-SXM4-80GB"),
        ("a100", "NVIDIA A100-SXM4-40GB"),  # the smaller one: a plan for it fits both
        ("NVIDIA H200", "NVIDIA H200"),
        ("NVIDIA B300 SXM6 AC", "NVIDIA B300"),
        ("NVIDIA A10", "NVIDIA A10"),
        ("NVIDIA A10G", "NVIDIA A10G"),
        ("GeForce RTX 4090", "NVIDIA GeForce RTX 4090"),
        ("NVIDIA L40S", "NVIDIA L40S"),
        ("NVIDIA L4", "NVIDIA L4"),
        ("Tesla V100-SXM2-32GB", "Tesla V100-SXM2-32GB"),
        ("Tesla V100-SXM3-32GB", "Tesla V100-SXM2-32GB"),
        ("Tesla T4", "Tesla T4"),
        ("AMD Instinct MI300X", "AMD Instinct MI300X"),
        ("AMD Instinct MI300X OAM", "AMD Instinct MI300X"),
        ("AMD Instinct MI250X/MI250", "AMD Instinct MI250X"),
    ],
)
def test_names_as_drivers_and_people_say_them(asked, found):
    assert find_device(asked).name == found


@pytest.mark.parametrize(
    "asked",
    [
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 3090 Ti",
        "NVIDIA A100-SXM-64GB",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA",
        "80GB",
        "TPU v5e",
        "",
    ],
)
def test_other_devices_are_refused_by_name(asked):
    with pytest.raises(InvalidOptionError, match="unknown device") as caught:
        find_device(asked)
    assert isinstance(caught.value, GcpassError)
    assert caught.value.option == "device"


def test_refusal_names_close_entries():
    with pytest.raises(InvalidOptionError, match="H100"):
        find_device("H1000")


@pytest.mark.parametrize("name", known_devices())
def test_every_entry_finds_itself_and_is_plausible(name):
    device = find_device(name)
    assert device.name == name
    peaks = dict(device.peaks)
    assert peaks["fp16"] >= peaks["fp32"] >= peaks["fp64"] > 1e11
    if "fp8" in peaks:  # dense rates double from 16 to 8 bits; sparse would be fourfold
        assert peaks["fp8"] / peaks["fp16"] == pytest.approx(2, rel=0.03)
    assert 14 * 2**30 <= device.memory_bytes <= 288 * 2**30
    assert 2e11 < device.bandwidth_bytes_per_s < 1e13
    assert 1e10 < device.host_link_bytes_per_s < device.bandwidth_bytes_per_s
    assert 40 <= device.multiprocessors <= 304
    assert device.source[-4:].isdigit() or ", 20" in device.source


def test_table_is_data_with_unique_names():
    text = files("gcpass").joinpath("devices.json").read_text(encoding="utf-8")
    entries = json.loads(text)["devices"]
    names = [name.lower() for e in entries for name in (e["name"], *e["aliases"])]
    assert len(set(names)) == len(names)
    assert all(e["source"] for e in entries)
    assert len(entries) >= 25


def test_rates_by_dtype_with_fallbacks():
    h100, v100 = find_device("H100"), find_device("V100")
    assert h100.peak_flops("bfloat16") == 989.5e12
    assert h100.peak_flops("torch.float32") == 67e12
    assert h100.peak_flops("tf32") == 494.5e12
    assert h100.peak_flops("float8_e4m3fn") == 1979e12
    assert h100.peak_flops("int64") == 67e12
    assert v100.peak_flops("bfloat16") == 15.7e12  # emulated in fp32
    assert v100.peak_flops("float8_e5m2") == 125e12


def test_devices_are_hashable_values():
    assert hash(find_device("L4")) == hash(find_device("NVIDIA L4"))
    assert this_cpu() == this_cpu() == find_device("cpu")


def test_current_device():
    assert current_device("cpu", None) == this_cpu()
    assert current_device("cuda", "NVIDIA H200").name == "NVIDIA H200"
    assert current_device("cpu", "h100").name == "NVIDIA H100 80GB HBM3"
    with pytest.raises(InvalidOptionError, match="no device name"):
        current_device("cuda", None)


def test_cpu_scales_with_cores_only(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    four = this_cpu()
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    assert this_cpu().peak_flops("float32") == 2 * four.peak_flops("float32")
    monkeypatch.setattr("os.cpu_count", lambda: None)
    assert this_cpu().name == "CPU (1 cores)"


def test_importing_the_table_loads_no_torch():
    code = (
        "import sys; from gcpass.hardware import find_device; find_device('h100'); "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("name", "count"),
    [("A100", 108), ("H100", 132), ("H100 PCIe", 114), ("GB200", 152), ("L4", 58)],
)
def test_multiprocessors_as_drivers_report_them(name, count):
    assert find_device(name).multiprocessors == count
