"""Programs that `tests.fuzz` found and minimized, one for each kind of fault."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.training import EXACT, Budget, difference

TIGHT: list[Budget] = [None, 0.9, "min"]


class WritesAfterwards(nn.Module):
    """Reads an argument, then adds a parameter to it where autograd must see it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        h = x.cos()
        for _ in range(4):
            h = (h * self.scale).tanh()
        x.add_(self.scale)
        return h.sum()


@pytest.mark.parametrize("budget", TIGHT, ids=str)
def test_arguments_that_are_written_after_the_graph(budget: Budget) -> None:
    # Such a write is no operation of the graph: the cosine was recomputed from the
    # written argument, which autograd refuses.
    x = torch.randn(4, 4, 4, 4)
    assert difference(WritesAfterwards(), x, budget=budget) < EXACT
