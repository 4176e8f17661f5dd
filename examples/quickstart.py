"""Trains a small transformer without and with a memory budget, and compares.

    python examples/quickstart.py --budget 0.5 --steps 5

Every way starts from the same weights and sees the same batches: eager, gcpass without
a budget, gcpass within it. The step time ratio is against gcpass without a budget.
"""

from __future__ import annotations

import argparse
import copy
import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gcpass

VOCABULARY, WIDTH, HEADS, LAYERS, LENGTH, BATCH = 1024, 256, 4, 6, 256, 4
LEARNING_RATE = 1e-3
TIMED_ROUNDS = 5


class Block(nn.Module):
    """A pre-norm transformer block with causal attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return the residual stream."""
        shape = (*x.shape[:2], HEADS, WIDTH // HEADS)
        q, k, v = (
            part.view(shape).transpose(1, 2)
            for part in self.qkv(self.norm_1(x)).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Transformer(nn.Module):
    """A language model whose forward returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the cross entropy of predicting each next token."""
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.loss(x, ids)

    def embed(self, ids: Tensor) -> Tensor:
        """Return what the first block takes."""
        return self.tokens(ids) + self.places.weight[: ids.shape[1]]

    def loss(self, x: Tensor, ids: Tensor) -> Tensor:
        """Return the loss of what the last block gives."""
        logits = self.head(self.norm(x))[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


@dataclass(slots=True, kw_only=True)
class Way:
    """One way of training: eager where ``options`` is None."""

    name: str
    model: nn.Module
    options: dict[str, Any] | None
    function: Callable[..., Tensor]
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    plan: Any = None


def main() -> None:
    """Train in three ways and print the table."""
    arguments = parse_arguments()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = Transformer().to(device)
    batches = [repeated_words(device, seed) for seed in range(arguments.steps + 1)]
    free = {"memory_budget": None, "codegen": arguments.codegen}
    ways = [
        make_way("eager", model, None),
        make_way("no budget", model, free),
        make_way("budget", model, {**free, "memory_budget": arguments.budget}),
    ]
    for way in ways:
        print(f"training: {way.name} ...", flush=True)
        train(way, batches)
        step = functools.partial(forward_and_backward, way, batches[0])
        way.peak_bytes = gcpass.measure(step)
    for _ in range(TIMED_ROUNDS):  # taking turns, so that all see the same machine
        for way in ways:
            way.seconds.append(step_seconds(way, batches[0]))
    print_table(ways)


def parse_arguments() -> argparse.Namespace:
    """Return the command line's arguments."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--budget",
        default="0.5",
        help='fraction of the peak without a budget, bytes ("40MB") or "min"',
    )
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--codegen", default="inductor", choices=["inductor", "eager"])
    return parser.parse_args()


def repeated_words(device: str, seed: int) -> Tensor:
    """Return sequences that repeat one of eight words, so that there is a lesson."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(
        0, VOCABULARY, (8, 8), generator=torch.Generator().manual_seed(9)
    )
    chosen = torch.randint(0, 8, (BATCH, 1, 1), generator=generator)
    return words[chosen.squeeze()].repeat(1, LENGTH // 8).to(device)


def make_way(name: str, model: nn.Module, options: dict[str, Any] | None) -> Way:
    """Return a way of training, with a copy of the model."""
    model = copy.deepcopy(model)
    function: Callable[..., Tensor] = model
    if options is not None:
        function = torch.compile(model, backend="gcpass", options=options)
    return Way(name=name, model=model, options=options, function=function)


def train(way: Way, batches: list[Tensor]) -> None:
    """Train over the batches, noting the loss of each."""
    optimizer = torch.optim.AdamW(way.model.parameters(), LEARNING_RATE)
    for ids in batches:
        loss = way.function(ids)
        loss.backward()
        way.losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    if way.options is not None:
        way.plan = gcpass.plans()[-1]


def forward_and_backward(way: Way, ids: Tensor) -> None:
    """Run a step without an update."""
    way.function(ids).backward()


def step_seconds(way: Way, ids: Tensor) -> float:
    """Return how long a forward and backward take."""
    started = time.perf_counter()
    forward_and_backward(way, ids)
    if ids.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - started


def print_table(ways: list[Way]) -> None:
    """Print one column per way of training."""
    fastest = min(ways[1].seconds)
    rows = {
        "requested": [requested(w) for w in ways],
        "floor": [size(w.plan and w.plan.floor_bytes) for w in ways],
        "predicted peak": [size(w.plan and w.plan.predicted_peak_bytes) for w in ways],
        "scheduled peak": [size(w.plan and w.plan.scheduled_peak_bytes) for w in ways],
        "measured peak": [size(w.peak_bytes) for w in ways],
        "predicted overhead": [
            f"{100 * w.plan.overhead:.1f} %" if w.plan else "-" for w in ways
        ],
        "step time ratio": [f"{min(w.seconds) / fastest:.2f}" for w in ways],
        "first loss": [f"{w.losses[0]:.5f}" for w in ways],
        f"loss after {len(ways[0].losses) - 1} steps": [
            f"{w.losses[-1]:.5f}" for w in ways
        ],
    }
    print(f"\n{'':24}" + "".join(f"{way.name:>18}" for way in ways))
    for label, cells in rows.items():
        print(f"{label:24}" + "".join(f"{cell:>18}" for cell in cells))


def requested(way: Way) -> str:
    """Return the budget, with its bytes where the plan knows them."""
    if way.plan is None:
        return "-"
    if way.plan.budget_bytes is None:
        return str(way.plan.requested)
    return f"{way.plan.requested} = {size(way.plan.budget_bytes)}"


def size(size_bytes: int | None) -> str:
    """Return megabytes, "-" for None."""
    return "-" if size_bytes is None else f"{size_bytes / 1e6:.2f} MB"


if __name__ == "__main__":
    main()
