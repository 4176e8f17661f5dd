"""Compares predicted, scheduled and measured peaks, and predicted and measured times.

    python examples/accuracy.py [llama ...] [--budgets none 0.6 0.4 min] [--rounds 25]
        [--cost-model profile]

Predicted is the peak by the plan, scheduled that of the program which Inductor
generated, read before it is built, measured that of torch's CPU allocator during a
step. Times are relative to the first budget's: predicted by `--cost-model`, measured in
process CPU seconds, budgets by turns, the least of the rounds, since whatever disturbs
a step makes it longer. The C library keeps freed memory meanwhile (as allocators of
GPUs do), else it is returned after each step and faulted in by the next, which makes
steps with much memory slow. Models are those of transformers and diffusers with random
weights, and a chain of linear layers; each is one region with its loss.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gcpass
from gcpass import InfeasibleBudgetError
from gcpass.decisions import RegionPlan


class WithLoss(nn.Module):
    """A model and its loss in one region.

    Args:
        model: called with the inputs by name.
        of: the name of what it returns.
    """

    def __init__(self, model: nn.Module, of: str = "logits") -> None:
        super().__init__()
        self.model, self.of = model, of

    def forward(self, target: Tensor, **inputs: Tensor) -> Tensor:
        """Return the loss."""
        found = getattr(self.model(**inputs), self.of)
        if target.is_floating_point():
            return F.mse_loss(found, target)
        return F.cross_entropy(found.flatten(0, -2), target.flatten())


def llama() -> tuple[nn.Module, dict[str, Tensor]]:
    """Return six layers with grouped queries and gated layers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        hidden_size=256,
        intermediate_size=704,
        vocab_size=2048,
        use_cache=False,
    )
    ids = torch.randint(2048, (4, 256))
    return WithLoss(LlamaForCausalLM(config)), {"input_ids": ids, "target": ids}


def gpt2() -> tuple[nn.Module, dict[str, Tensor]]:
    """Return six layers with a tied head, without dropout."""
    return _gpt2(layers=6, p=0.0)


def gpt2_dropout() -> tuple[nn.Module, dict[str, Tensor]]:
    """Return four such layers with dropout."""
    return _gpt2(layers=4, p=0.1)


def _gpt2(*, layers: int, p: float) -> tuple[nn.Module, dict[str, Tensor]]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=layers,
        n_head=4,
        n_embd=256,
        vocab_size=2048,
        n_positions=256,
        resid_pdrop=p,
        embd_pdrop=p,
        attn_pdrop=p,
        use_cache=False,
    )
    ids = torch.randint(2048, (4, 256))
    return WithLoss(GPT2LMHeadModel(config)), {"input_ids": ids, "target": ids}


def bert() -> tuple[nn.Module, dict[str, Tensor]]:
    """Return six post-norm layers, without dropout."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        num_hidden_layers=6,
        num_attention_heads=4,
        hidden_size=256,
        intermediate_size=1024,
        vocab_size=2048,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    ids = torch.randint(2048, (4, 256))
    return WithLoss(BertForMaskedLM(config)), {"input_ids": ids, "target": ids}


def vit() -> tuple[nn.Module, dict[str, Tensor]]:
    """Return six layers over 256 patches, without dropout."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        num_hidden_layers=6,
        num_attention_heads=4,
        hidden_size=256,
        intermediate_size=1024,
        image_size=128,
        patch_size=8,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=10,
    )
    pixels, target = torch.randn(4, 3, 128, 128), torch.randint(10, (4,))
    model = WithLoss(ViTForImageClassification(config))
    return model, {"pixel_values": pixels, "target": target}


def resnet() -> tuple[nn.Module, dict[str, Tensor]]:
    """Return eight bottlenecks with batch norm."""
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        depths=[2, 2, 2, 2],
        hidden_sizes=[64, 128, 256, 512],
        embedding_size=32,
        layer_type="bottleneck",
        num_labels=10,
    )
    pixels, target = torch.randn(8, 3, 96, 96), torch.randint(10, (8,))
    model = WithLoss(ResNetForImageClassification(config))
    return model, {"pixel_values": pixels, "target": target}


def unet() -> tuple[nn.Module, dict[str, Tensor]]:
    """Return a denoising net with skips, group norm and attention."""
    from diffusers import UNet2DModel

    model = UNet2DModel(
        sample_size=32,
        in_channels=3,
        out_channels=3,
        layers_per_block=1,
        block_out_channels=(32, 64, 64),
        down_block_types=("DownBlock2D", "AttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=8,
    )
    noisy, noise = torch.randn(4, 3, 32, 32), torch.randn(4, 3, 32, 32)
    times = torch.randint(100, (4,))
    inputs = {"sample": noisy, "timestep": times, "target": noise}
    return WithLoss(model, of="sample"), inputs


class Chain(nn.Module):
    """Equal linear layers: the textbook case of recomputation."""

    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        """Return the loss."""
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return F.mse_loss(x, target)


def chain() -> tuple[nn.Module, dict[str, Tensor]]:
    """Return 32 layers."""
    x, target = torch.randn(2, 4096, 64).unbind()
    return Chain(32, 64), {"x": x, "target": target}


MODELS = (llama, gpt2, gpt2_dropout, bert, vit, resnet, unet, chain)
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of glibc's malloc.h
Make = Callable[[], tuple[nn.Module, dict[str, Tensor]]]


@dataclass(kw_only=True)
class Trained:
    """A model compiled for a budget, after its first step.

    Attributes:
        budget: as asked for.
        step: runs another step.
        plan: what gcpass planned; None where the budget is under the floor.
        floor_bytes: then the floor.
        peak_bytes: measured.
        seconds: process CPU time of steps.
    """

    budget: str
    step: Callable[[], None]
    plan: RegionPlan | None
    floor_bytes: int = 0
    peak_bytes: int = 0
    seconds: list[float] = field(default_factory=list)

    @property
    def error(self) -> float:
        """Return by how much the predicted peak is above the measured one."""
        assert self.plan is not None
        return self.plan.predicted_peak_bytes / self.peak_bytes - 1


def main() -> None:
    """Print a row per model and budget, the errors, and how well times are ranked."""
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    names = [make.__name__ for make in MODELS]
    parser.add_argument("models", nargs="*", choices=[[], *names], help="all if none")
    parser.add_argument("--budgets", nargs="+", default=["none", "0.6", "0.4", "min"])
    parser.add_argument("--rounds", type=int, default=25, help="of timing")
    parser.add_argument("--cost-model", default="roofline", help="or profile")
    given = parser.parse_args()
    keep_freed_memory()
    print(
        "| model | budget | of (MB) | predicted | scheduled | measured | error |",
        end="",
    )
    print(" time, predicted | measured |")
    print("|---|---|---|---|---|---|---|---|---|")
    torch._dynamo.config.recompile_limit = max(8, len(given.budgets))
    errors, times = [], []
    for make in MODELS:
        if given.models and make.__name__ not in given.models:
            continue
        torch._dynamo.reset()
        trained = [train(make, budget, given.cost_model) for budget in given.budgets]
        fitting = [one for one in trained if one.plan is not None]
        for _ in range(given.rounds):
            for one in fitting:
                started = time.process_time()
                one.step()
                one.seconds.append(time.process_time() - started)
        for one in trained:
            ratios = time_ratios(one, fitting[0])
            print_row(make.__name__, one, ratios)
            if one.plan is not None:
                errors.append(abs(one.error))
            if ratios is not None and one is not fitting[0]:
                times.append(ratios)
    if errors:
        middle, largest = 100 * statistics.median(errors), 100 * max(errors)
        print(
            f"\nerror of predicted peaks: median {middle:.1f}, largest {largest:.1f} %"
        )
    if len(times) > 2:
        predicted, measured = zip(*times, strict=True)
        rank = statistics.correlation(ranks(predicted), ranks(measured))
        print(f"rank correlation of {len(times)} ratios of time: {rank:.2f}")


def keep_freed_memory() -> None:
    """Tell the C library to return no memory to the system, where it can be told."""
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    mallopt = getattr(library, "mallopt", lambda option, number: 0)
    if not (mallopt(M_TRIM_THRESHOLD, 2**31 - 1) and mallopt(M_MMAP_MAX, 0)):
        print("freed memory is returned: steps that need much look slow")


def train(make: Make, budget: str, cost_model: str) -> Trained:
    """Compile a new model for a budget, run a step and measure another."""
    torch.manual_seed(0)
    model, inputs = make()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    special = {"none": None, "min": "min"}
    asked = special[budget] if budget in special else float(budget)
    options = {"memory_budget": asked, "cost_model": cost_model}
    compiled = torch.compile(model, backend="gcpass", options=options, fullgraph=True)

    def step() -> None:
        compiled(**inputs).backward()

    try:
        step()
    except InfeasibleBudgetError as error:
        floor = error.floor_bytes
        return Trained(budget=budget, step=step, plan=None, floor_bytes=floor)
    plan = gcpass.plans()[-1]
    peak = gcpass.measure(step)
    return Trained(budget=budget, step=step, plan=plan, peak_bytes=peak)


def time_ratios(one: Trained, first: Trained) -> tuple[float, float] | None:
    """Return predicted and measured time over those of the first budget."""
    if one.plan is None or first.plan is None or not one.seconds:
        return None
    measured = min(one.seconds) / min(first.seconds)
    return (1 + one.plan.overhead) / (1 + first.plan.overhead), measured


def ranks(numbers: Sequence[float]) -> list[float]:
    """Return the place of each number among them, equal ones share the mean place."""
    return [
        sum(other < number for other in numbers)
        + (sum(other == number for other in numbers) - 1) / 2
        for number in numbers
    ]


def print_row(name: str, one: Trained, ratios: tuple[float, float] | None) -> None:
    """Print what one budget came to."""
    plan = one.plan
    if plan is None:
        cells = [f"floor {megabytes(one.floor_bytes)}", *[""] * 6]
    else:
        times = ["-", "-"] if ratios is None else [f"{ratio:.3f}" for ratio in ratios]
        cells = [
            megabytes(plan.budget_bytes),
            megabytes(plan.predicted_peak_bytes),
            megabytes(plan.scheduled_peak_bytes),
            megabytes(one.peak_bytes),
            f"{100 * one.error:+.1f} %",
            *times,
        ]
    print("| " + " | ".join([name, one.budget, *cells]) + " |", flush=True)


def megabytes(size_bytes: int | None) -> str:
    """Return a size in MB (1e6 bytes), a dash for none."""
    return "-" if size_bytes is None else f"{size_bytes / 1e6:.2f}"


if __name__ == "__main__":
    main()
