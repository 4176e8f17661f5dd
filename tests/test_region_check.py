"""The option `check_gradients`: a wrong region raises in its first step, once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import gcpass
from gcpass.errors import GcpassError, GradientMismatchError
from tests.nets import ConvNet, LanguageModel, Mlp
from tests.training import compiled, difference


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "bfloat16"])
def test_right_regions_train_as_without(autocast: bool) -> None:
    # Dropout and batch norm show whether the trial run leaves a trace.
    limit = 2e-2 if autocast else 2e-6
    ids, images = torch.randint(0, 64, (2, 16)), torch.randn(4, 3, 8, 8)
    for model, x in [(LanguageModel(depth=1, p=0.3), ids), (ConvNet(depth=2), images)]:
        options: dict[str, Any] = {"check_gradients": True, "autocast": autocast}
        assert difference(model, x, budget="min", steps=2, **options) < limit


def test_a_wrong_backward_raises_in_the_first_step(wrong_backward: None) -> None:
    model, x = Mlp(), torch.randn(64, 16)
    draws = torch.get_rng_state()
    run = compiled(model, "min", check_gradients=True)
    with pytest.raises(GradientMismatchError, match="differ from eager") as caught:
        run(x)
    name, error, allowed = caught.value.mismatches[0]
    assert "parameters_weight" in name
    assert error == pytest.approx(2)
    assert allowed < 1e-3
    assert torch.equal(torch.get_rng_state(), draws)
    assert all(p.grad is None for p in model.parameters())


def test_written_inputs_are_written_once() -> None:
    def function(x: Tensor, state: Tensor) -> Tensor:
        state.add_(1)
        return (x * state).sin().sum()

    state, x = torch.zeros(8), torch.randn(8, requires_grad=True)
    compiled(function, check_gradients=True)(x, state).backward()
    assert torch.equal(state, torch.ones(8))


@pytest.mark.parametrize("way", [gcpass.enable, gcpass.partitioner])
def test_ways_that_see_no_step_refuse(way: Any) -> None:
    with pytest.raises(GcpassError, match="check_gradients needs the whole region"):
        way(check_gradients=True)
