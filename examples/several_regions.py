"""Holds one budget over a step of several compiled regions.

    python examples/several_regions.py

The six layers of a transformer are compiled as one region, as three (two graph breaks),
and each by itself beside the loss, and trained within 80, 60 and 45 % of eager's peak.
The first step counts what a step runs, the second compiles it; peaks and gradients are
of a later one.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from typing import Any

import torch
from quickstart import Transformer, repeated_words
from torch import Tensor, nn

import gcpass

WAYS = ("whole", "two breaks", "by layer")
SHARES = (0.8, 0.6, 0.45)


class Unrolled(nn.Module):
    """The transformer with its loop over layers written out.

    Dynamo gives up a whole frame where a loop in it breaks.
    """

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        """Return the loss."""
        one, two, three, four, five, six = self.model.blocks
        x = self.model.embed(ids)
        x = two(one(x))
        torch._dynamo.graph_break()
        x = four(three(x))
        torch._dynamo.graph_break()
        return self.model.loss(six(five(x)), ids)


def main() -> None:
    """Print a table of measured peaks."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--codegen", default="inductor", choices=["inductor", "eager"])
    codegen = parser.parse_args().codegen
    torch.manual_seed(0)
    model, ids = Transformer(), repeated_words("cpu", 0)
    peak = gcpass.measure(lambda: model(ids).backward())
    expected = [p.grad for p in model.parameters() if p.grad is not None]
    print(f"eager: {peak / 1e6:.1f} MB")
    print("| compiled | budget | measured | extra time | executions | gradients |")
    print("| --- | --- | --- | --- | --- | --- |")
    for way in WAYS:
        for share in SHARES:
            budget = int(share * peak)
            print(row(model, ids, way, budget, codegen, expected), flush=True)


def row(
    model: Transformer,
    ids: Tensor,
    way: str,
    budget: int,
    codegen: str,
    expected: list[Tensor],
) -> str:
    """Return the table's row of one way and budget (bytes)."""
    torch.compiler.reset()
    before = len(gcpass.plans())
    trained, run = compiled(model, way, {"memory_budget": budget, "codegen": codegen})
    for _ in range(2):
        run(ids).backward()
        trained.zero_grad()
    measured = gcpass.measure(lambda: run(ids).backward())
    got = [p.grad for p in trained.parameters() if p.grad is not None]
    error = max(
        float((a - b).norm() / b.norm()) for a, b in zip(got, expected, strict=True)
    )
    plans = {p.region: p for p in gcpass.plans()[before:]}.values()
    extra = max(p.overhead for p in plans)
    executions = sum(p.executions for p in plans)
    return (
        f"| {way} | {budget / 1e6:.1f} MB | {measured / 1e6:.1f} MB "
        f"| {100 * extra:.1f} % at most | {executions} | {error:.0e} |"
    )


def compiled(
    model: Transformer, way: str, options: dict[str, Any]
) -> tuple[nn.Module, Callable[..., Tensor]]:
    """Return a copy of the model and what runs it."""
    model = copy.deepcopy(model)
    model.zero_grad()
    if way == "by layer":
        for block in model.blocks:
            block.compile(backend="gcpass", options=options)
        loss = torch.compile(model.loss, backend="gcpass", options=options)
        model.loss = loss  # type: ignore[method-assign]
        return model, model
    whole = model if way == "whole" else Unrolled(model)
    return model, torch.compile(whole, backend="gcpass", options=options)


if __name__ == "__main__":
    main()
