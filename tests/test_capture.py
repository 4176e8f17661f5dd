"""What a problem says of the operators of a graph."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from gcpass.capture import Capture, capture
from gcpass.cost_model import Roofline
from gcpass.hardware import find_device

aten = torch.ops.aten


def _captured(function: Callable[..., Tensor], *, fuses: bool = True) -> Capture:
    """Return the capture of a function of two matrices and a row."""
    a, b, row = torch.randn(6, 6), torch.randn(6, 6), torch.randn(6)
    graph: fx.Graph = make_fx(function, tracing_mode="fake")(a, b, row).graph
    return capture(
        graph,
        num_fwd_outputs=1,
        mutated=frozenset(),
        costs=Roofline(find_device("A100")),
        fuses=fuses,
        follow_hints=False,
    )


def _aligned(function: Callable[..., Tensor], *, fuses: bool = True) -> set[str]:
    """Return the names of what the last operation of a function reads aligned."""
    found = _captured(function, fuses=fuses)
    nodes = [found.value_nodes[v] for v in found.problem.operations[-1].aligned]
    return {node.name for node in nodes if node is not None}


@pytest.mark.parametrize(
    ("function", "aligned"),
    [
        (lambda a, b, row: aten.add(a, b), {"a_1", "b_1"}),
        (lambda a, b, row: aten.add(a, row), {"a_1"}),
        (lambda a, b, row: aten.add(a, b.t()), {"a_1"}),
        (lambda a, b, row: aten.add(a, a.t()), set()),
        (lambda a, b, row: aten.sin(a.t()), {"a_1"}),  # laid out as what it reads
        (lambda a, b, row: aten.mul(a, b.view(36).view(6, 6)), {"a_1", "b_1"}),
        (lambda a, b, row: aten.mul(row, b[1]), {"row_1"}),
        (lambda a, b, row: aten.where(a > 0, a, b), {"gt", "a_1", "b_1"}),
        (lambda a, b, row: a.to(torch.bfloat16), {"a_1"}),
        (lambda a, b, row: a.to(torch.int32), set()),  # as wide, of another type
        (lambda a, b, row: aten.roll(a, [1], [0]), set()),
        (lambda a, b, row: aten.gather(a, 0, (b > 0).long()), set()),
        (lambda a, b, row: aten.mm(a, b), set()),
        (lambda a, b, row: aten.sum(a, [0]), set()),
    ],
)
def test_what_is_read_at_the_places_that_are_written(
    function: Callable[..., Tensor], aligned: set[str]
) -> None:
    assert _aligned(function) == aligned


def test_without_fusion_nothing_is_written_in_place() -> None:
    assert _aligned(lambda a, b, row: aten.add(a, b), fuses=False) == set()


@pytest.mark.parametrize(
    ("function", "absorbing"),
    [
        (lambda a, b, row: aten.sum(a.sin(), [0]), True),
        (lambda a, b, row: aten.avg_pool2d(a.sin()[None], [2, 2]), False),
        (lambda a, b, row: aten.mm(a.sin(), b), False),
    ],
)
def test_what_computes_its_operands_in_its_own_kernel(
    function: Callable[..., Tensor], absorbing: bool
) -> None:
    assert _captured(function).problem.operations[-1].absorbing is absorbing
    assert not _captured(function, fuses=False).problem.operations[-1].absorbing
