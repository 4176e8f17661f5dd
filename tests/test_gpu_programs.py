"""What gcpass plans for CUDA, lowered to Triton, compiled, and run without a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gcpass.plan_order import MOST_CALLS_SPANNED
from tests.gpu.run import results_of

# What stands in for CUDA is private to a release, see tests/gpu/fake_cuda.py.
pytestmark = [
    pytest.mark.triton,
    pytest.mark.slow,
    pytest.mark.skipif(
        torch.version.cuda is not None or not torch.__version__.startswith("2.13.0"),
        reason="stands in for a GPU in the CPU build of torch 2.13.0 only",
    ),
]
ALLOWED = {"block": 3e-2, "llama": 3e-2, "lm": 1e-5, "conv": 1e-5, "dynamic": 1e-5}
SURE = 1e-3  # error of a difference of losses, where random numbers are drawn


def _check_plan(result: dict[str, Any]) -> None:
    """Check what holds for every case: it compiles, keeps its order and its peak."""
    kernels = sum(result["kernels"])
    assert all(code >= kernels > 0 for code in result["machine_code"].values())
    assert result["draws_in_backward"] == 0
    if result["budget"] is None:
        return
    assert result["recomputations"] > 0
    assert result["calls_as_planned"]  # none merged, none moved before another
    assert result["values_found"] > kernels
    assert result["most_calls_early"] <= MOST_CALLS_SPANNED
    assert result["scheduled_bytes"] == result["counted_bytes"]
    # Less than predicted where kernels write in place.
    assert 0.94 <= result["counted_bytes"] / result["predicted_bytes"] <= 1.01
    if result["budget_bytes"] is not None:
        assert result["counted_bytes"] <= result["budget_bytes"]


@pytest.mark.parametrize("case", sorted(ALLOWED))
def test_generated_programs_compute_eagers_gradients(case: str, tmp_path: Path) -> None:
    results = results_of(case, tmp_path)
    assert [r["budget"] for r in results] == [None, 0.5, "min"]
    for result in results:
        _check_plan(result)
        assert result["error"] <= ALLOWED[case]
    free, half, least = (r["counted_bytes"] for r in results)
    assert half <= 0.55 * free
    assert least <= half


def test_masks_of_the_backward_are_those_of_the_forward(tmp_path: Path) -> None:
    results = results_of("dropout", tmp_path)
    for result in results:
        _check_plan(result)
        assert result["error"] <= SURE
    assert results[-1]["error_of_others"] > 10 * SURE  # a wrong mask is noticed
