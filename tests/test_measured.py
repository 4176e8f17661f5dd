"""`gcpass.measure` on steps whose allocations are known."""

from __future__ import annotations

import pytest
import torch
from torch.autograd.profiler import profile

import gcpass

MIB = 2**20


def _bytes(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8)


def test_the_most_at_one_moment_counts() -> None:
    before = _bytes(8 * MIB)

    def step() -> None:
        first = _bytes(3 * MIB)
        second = _bytes(2 * MIB)
        del first
        third = _bytes(MIB)
        del second, third

    assert gcpass.measure(step) == 5 * MIB
    del before


def test_what_a_step_returns_is_dropped() -> None:
    assert gcpass.measure(lambda: _bytes(MIB)) == MIB
    assert gcpass.measure(lambda: None) == 0


def test_the_peak_of_a_training_step_by_hand() -> None:
    x = torch.randn(256, 256)
    weight = torch.randn(256, 256, requires_grad=True)
    weight.grad = torch.zeros_like(weight)

    def step() -> None:
        y = x @ weight
        y.backward(x)  # the gradient is in memory beside y, and is then added

    assert gcpass.measure(step) == 2 * 256 * 256 * 4


def test_an_active_profiler_is_refused() -> None:
    with profile(profile_memory=True), pytest.raises(RuntimeError, match="rofiler"):
        gcpass.measure(lambda: None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there() -> None:
    with pytest.raises((RuntimeError, AssertionError), match=r"CUDA|NVIDIA"):
        gcpass.measure(lambda: None, device="cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_on_a_gpu() -> None:
    def step() -> None:
        first = torch.empty(3 * MIB, dtype=torch.uint8, device="cuda")
        del first

    assert gcpass.measure(step) == 3 * MIB
