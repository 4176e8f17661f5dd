"""What a user is told: every form of the budget, and numbers that agree.

pytorch#161650: users cannot find the knob, its units or its effect. Errors for other
values and misspelt names are in test_options.py and test_backend_errors.py.
"""

from __future__ import annotations

import pytest
import torch

import gcpass
from gcpass.units import format_bytes
from tests.nets import Mlp
from tests.training import compiled, plan


@pytest.mark.parametrize("budget", [10**6, "977 KiB", "70%", "min"])
def test_c27_every_form_of_a_budget(budget: int | float | str | None) -> None:
    function = compiled(Mlp(depth=6), budget, on_infeasible="min")
    function(torch.randn(1024, 16)).backward()
    made = plan()
    assert made.requested == str(budget)
    exact = {10**6: 10**6, "977 KiB": 977 * 1024}
    if budget in exact:
        assert made.budget_bytes == exact[budget]
    elif budget == "70%":
        assert made.budget_bytes == int(0.7 * made.fastest_peak_bytes)
    else:
        assert made.budget_bytes is None
    if made.budget_bytes is not None:
        assert made.floor_bytes <= made.peak_bytes <= made.budget_bytes


def test_c27_the_numbers_agree() -> None:
    compiled(Mlp(depth=6), 0.6)(torch.randn(1024, 16)).backward()
    made = plan()
    kept = [v for v in made.values if v.decision == "saved"]
    assert made.saved_bytes == sum(v.size_bytes for v in kept)
    again = sum(len(v.recompute_positions) for v in made.values)
    assert 0 < made.recomputations <= again
    extra = sum(v.flops * len(v.recompute_positions) for v in made.values)
    assert extra > 0
    assert made.overhead_flops > 0
    assert 0 <= made.bound <= made.overhead
    assert made.gap_points == pytest.approx(100 * (made.overhead - made.bound))
    for part in (
        "requested 0.6",
        format_bytes(made.budget_bytes or 0),
        f"scheduled peak {format_bytes(made.peak_bytes)}",
        f"floor {format_bytes(made.floor_bytes)}",
        f"overhead {100 * made.overhead:.1f} %",
        f"{made.recomputations} recomputations",
        "solved in",
    ):
        assert part in made.summary()


def test_c27_a_misspelt_option_names_the_nearest() -> None:
    options = {"memory_buget": 0.5, "codegen": "eager"}
    function = torch.compile(Mlp(), backend="gcpass", options=options)
    with pytest.raises(gcpass.InvalidOptionError, match="did you mean 'memory_budget'"):
        function(torch.randn(8, 16))
