"""What it costs to save a value."""

from __future__ import annotations

import pytest

from gcpass.solvers.generate import Builder
from gcpass.solvers.problem import Origin, Phase

WRITTEN, READ = 4.0, 4.0  # seconds for 8 bytes at 1 s a byte, half for each


@pytest.mark.parametrize(
    ("absorbed_by", "seconds"),
    [
        ({"forward": True, "backward": True}, WRITTEN + READ),
        ({"forward": False, "backward": True}, READ),
        ({"forward": True, "backward": False}, WRITTEN),
        ({"forward": False, "backward": False}, 0.0),
    ],
)
@pytest.mark.parametrize("fusible", [True, False])
def test_saving_costs_what_would_not_be_moved_otherwise(
    absorbed_by: dict[str, bool], seconds: float, fusible: bool
) -> None:
    b = Builder()
    x = b.value(8)
    tangent = b.value(1, Origin.TANGENT)
    b.run([], [x], 1.0, fusible=fusible)
    output, gradient = b.value(1, held=True), b.value(1, held=True)
    b.run([x], [output], 1.0, absorbing=absorbed_by["forward"])
    b.run(
        [x, tangent], [gradient], 1.0, Phase.BACKWARD, absorbing=absorbed_by["backward"]
    )
    problem = b.problem(save_seconds_per_byte=1.0)
    saving = dict(zip([x, tangent, output], problem.saving_seconds(), strict=False))
    assert saving[x] == (seconds if fusible else 0.0)
    assert saving[tangent] == saving[output] == 0.0


def test_what_is_held_is_written_without_being_saved() -> None:
    b = Builder()
    x, y = b.value(8, held=True), b.value(8)
    b.run([], [x], 1.0, fusible=True)
    b.run([x], [y], 1.0, Phase.EITHER, absorbing=True)
    assert set(b.problem(save_seconds_per_byte=1.0).saving_seconds()) == {0.0}
