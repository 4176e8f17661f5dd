"""The reported cases that known_cases.py runs, and why it leaves out others."""

from __future__ import annotations

import torch
from case_models import (
    FLASH,
    PRODUCT,
    ROWS,
    WIDTH,
    Apply,
    Attention,
    Beside,
    Branch,
    Break,
    Case,
    Dropped,
    Gated,
    Gathered,
    Kept,
    Loss,
    LowPrecision,
    ReadThenWritten,
    Remembers,
    Residual,
    Routed,
    TwoTensor,
    Upsampled,
    changed_in_place,
    divided_by_sizes,
    filtered,
    linear,
    masks_agree,
    routes_agree,
    rows,
    scaled,
    slow,
    three_shapes,
    two_products,
)
from torch import nn


def normed(depth: int) -> Loss:
    """Return convolutions, batch norms and ReLUs."""
    layers = [
        (nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        for _ in range(depth)
    ]
    return Loss(*[module for layer in layers for module in layer])


def pre_norm() -> Residual:
    """Return a pre-norm block of two layers."""
    wide = 2 * WIDTH
    return Residual(nn.RMSNorm(WIDTH), linear(out=wide), nn.GELU(), linear(wide))


def between(*functions: object) -> Loss:
    """Return layers with something after each."""
    layers = [(linear(), nn.Tanh(), Apply(f)) for f in functions]
    return Loss(*[module for layer in layers for module in layer])


def products() -> Kept:
    """Return a region that saves its products, applied to its own result."""
    return Kept(Apply(two_products, WIDTH, WIDTH), PRODUCT)


def pair() -> TwoTensor:
    """Return a two-tensor."""
    return TwoTensor(*rows(), *rows())


def largest(x: torch.Tensor) -> torch.Tensor:
    """Return the largest of each column of a computed value."""
    return (torch.sin(x) * 2).amax(0)


CASES = (
    Case(
        name="C01",
        report="pytorch#197039",
        fault="state read before it is written is read again",
        make=lambda: (ReadThenWritten(), rows()),
    ),
    Case(
        name="C02",
        report="pytorch#190758",
        fault="the backward draws another dropout mask",
        make=lambda: (Dropped(), rows()),
        error=masks_agree,
    ),
    Case(
        name="C03",
        report="pytorch#187985",
        fault="attention that drops nothing counts as random",
        make=lambda: (Loss(*[Attention() for _ in range(3)]), rows()),
    ),
    Case(
        name="C04",
        report="pytorch#113737",
        fault="in-place operations in a selective region",
        make=lambda: (
            Loss(*[Kept(Apply(changed_in_place, WIDTH, WIDTH), PRODUCT)] * 2),
            rows(),
        ),
    ),
    Case(
        name="C05",
        report="pytorch#96136",
        fault="statistics of norms move twice a step",
        make=lambda: (normed(2), (torch.randn(4, 8, 32, 32),)),
    ),
    Case(
        name="C06",
        report="pytorch#149258",
        fault="a budget flips a whole family of decisions",
        make=lambda: (Loss(*[pre_norm() for _ in range(4)]), rows()),
    ),
    Case(
        name="C08",
        report="pytorch#197838",
        fault="a lower budget raises the peak",
        make=lambda: (
            Loss(*[Residual(Gated(), linear(2 * WIDTH)) for _ in range(6)]),
            rows(),
        ),
    ),
    Case(
        name="C09",
        report="pytorch#141881",
        fault="casts of weights are saved",
        make=lambda: (
            LowPrecision(*[linear(256, 256) for _ in range(4)]),
            (torch.randn(8, 256),),
        ),
        tolerance=2e-2,
    ),
    Case(
        name="C10",
        report="lightning-thunder#474",
        fault="what is alive anyway counts as saved",
        make=lambda: (Apply(scaled, WIDTH, WIDTH), rows()),
    ),
    Case(
        name="C11",
        report="pytorch#163139",
        fault="operators of unknown cost run again",
        make=lambda: (between(slow, slow, slow), rows()),
        counted="known_cases::slow",
    ),
    Case(
        name="C12",
        report="pytorch#141684",
        fault="a budget overrides what the user saves",
        make=lambda: (Loss(*[products()] * 2), rows()),
        counted="aten::mm",
    ),
    Case(
        name="C13",
        report="pytorch#161889",
        fault="compiled selective checkpoints save more",
        make=lambda: (
            Loss(*[Kept(Attention(), PRODUCT, FLASH) for _ in range(2)]),
            rows(),
        ),
        counted="aten::mm",
    ),
    Case(
        name="C15",
        report="pytorch#120188",
        fault="a subclass beside a written input fails to split",
        make=lambda: (Beside(), (pair(), *rows())),
    ),
    Case(
        name="C16",
        report="pytorch#196146",
        fault="values that are no tensors crash the byte count",
        make=lambda: (between(Remembers.apply, Remembers.apply), rows()),
    ),
    Case(
        name="C17",
        report="pytorch#147879",
        fault="operators with bodies are rejected",
        make=lambda: (Loss(Branch(), Branch()), rows()),
    ),
    Case(
        name="C18",
        report="pytorch#185473",
        fault="a size is not passed to the backward",
        make=lambda: (
            Apply(divided_by_sizes, WIDTH, WIDTH),
            (torch.randn(16, 128, WIDTH),),
        ),
        error=three_shapes,
    ),
    Case(
        name="C19",
        report="pytorch#147561",
        fault="collectives run again",
        make=lambda: (Gathered(), rows()),
        counted="_c10d_functional::all_gather_into_tensor",
    ),
    Case(
        name="C24",
        report="pytorch#139989",
        fault="each part of a step gets the budget",
        make=lambda: (
            Loss(*[pre_norm(), pre_norm(), Break(), pre_norm(), linear(out=4)]),
            rows(),
        ),
    ),
    Case(
        name="C25",
        report="pytorch#186572",
        fault="low bits of a recomputed value change a choice",
        make=lambda: (Routed(), rows()),
        error=routes_agree,
    ),
    Case(
        name="C25, bfloat16",
        report="pytorch#186572",
        fault="a value does not equal its own maximum",
        make=lambda: (
            Loss(linear(), Apply(largest), Apply(torch.exp)).bfloat16(),
            (torch.randn(ROWS, WIDTH, dtype=torch.bfloat16),),
        ),
        tolerance=5e-2,
    ),
    Case(
        name="C26",
        report="torchdynamo#1870",
        fault="bytes of complex values are not known",
        make=lambda: (Apply(filtered, WIDTH), rows()),
    ),
    Case(
        name="not listed",
        report="pytorch#185509",
        fault="a scatter is read before it is done",
        make=lambda: (Upsampled(), (torch.randn(4, 16, 16, 16),)),
    ),
)

NOT_RUN = {
    "C07": "an instance of a solver, no graph: tests/test_check.py",
    "C14": "budgets of regions, for which torch has another interface: "
    "tests/test_regions.py",
    "C20": "offloading, which gcpass does not do",
    "C21": "offloading, which gcpass does not do",
    "C22": "time of planning: examples/solver_growth.py",
    "C23": "which plan a compile cache returns: tests/test_cases_cache.py",
    "C27": "options and messages: tests/test_cases_explain.py",
}
