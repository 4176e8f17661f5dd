"""Plan for one batch, predict the peak of others, and measure it.

    python examples/other_sizes.py [--rows 8192] [--budget 0.5] [--limit 64MB]

The model is that of the README. Prints the predicted peak as a function of the batch
and, for twice the batch and the largest one within the limit, predicted and measured
peak in bytes.
"""

from __future__ import annotations

import argparse

import torch

import gcpass

WIDTH = 64


def main() -> None:
    """Print the function, and a line for each batch."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--budget", type=float, default=0.5)
    parser.add_argument("--limit", default="64MB")
    arguments = parser.parse_args()
    layers = ((torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh()) for _ in range(12))
    model = torch.nn.Sequential(*(module for pair in layers for module in pair))
    compiled = torch.compile(
        lambda x: model(x).square().mean(),
        backend="gcpass",
        options={"memory_budget": arguments.budget},
    )
    x = torch.randn(arguments.rows, WIDTH)
    torch._dynamo.mark_dynamic(x, 0)
    compiled(x).backward()
    plan = gcpass.plans()[-1]
    (symbol,) = plan.symbols
    print(f"{symbol.name} = {symbol.planned}: {plan.symbolic_peak_bytes} bytes")
    largest = plan.largest(symbol.name, arguments.limit)
    for rows in (2 * arguments.rows, largest):
        model.zero_grad()
        batch = torch.randn(rows, WIDTH)
        measured = gcpass.measure(lambda x=batch: compiled(x).backward())
        predicted = plan.peak_at(**{symbol.name: rows})
        print(f"{symbol.name} = {rows}: predicted {predicted}, measured {measured}")
    print(f"plans made: {len(gcpass.plans())}")


if __name__ == "__main__":
    main()
