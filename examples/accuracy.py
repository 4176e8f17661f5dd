"""Compares the predicted, the scheduled and the measured peak of training steps.

    python examples/accuracy.py [llama bert ...] [--budgets none 0.6 0.4 min]

Predicted is the peak by the plan, scheduled that of the program which Inductor
generated, read before it is built, measured that of torch's CPU allocator during a
step. Models are transformers' and diffusers' own with random weights, and a chain of
linear layers; each is one region with its loss.
"""

from __future__ import annotations

import argparse
import statistics
import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gcpass
from gcpass import InfeasibleBudgetError

Step = Callable[[], Tensor]


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
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=6,
        n_head=4,
        n_embd=256,
        vocab_size=2048,
        n_positions=256,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
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


MODELS = (llama, gpt2, bert, vit, resnet, unet, chain)


def main() -> None:
    """Print a row per model and budget, and the errors of all."""
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    names = [make.__name__ for make in MODELS]
    parser.add_argument("models", nargs="*", choices=[[], *names], help="all if none")
    parser.add_argument("--budgets", nargs="+", default=["none", "0.6", "0.4", "min"])
    given = parser.parse_args()
    print("| model | budget | of (MB) | predicted | scheduled | measured | error |")
    print("|---|---|---|---|---|---|---|")
    errors = []
    for make in MODELS:
        if not given.models or make.__name__ in given.models:
            errors += [row(make.__name__, make, budget) for budget in given.budgets]
    found = [abs(error) for error in errors if error is not None]
    if found:
        middle, largest = 100 * statistics.median(found), 100 * max(found)
        print(
            f"\nerror of the prediction: median {middle:.1f}, largest {largest:.1f} %"
        )


def row(
    name: str, make: Callable[[], tuple[nn.Module, dict[str, Tensor]]], budget: str
) -> float | None:
    """Print a row; return predicted / measured - 1, None where no plan fits."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    model, inputs = make()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    special = {"none": None, "min": "min"}
    asked = special[budget] if budget in special else float(budget)
    options = {"memory_budget": asked}
    compiled = torch.compile(model, backend="gcpass", options=options, fullgraph=True)

    def step() -> None:
        compiled(**inputs).backward()

    try:
        step()
    except InfeasibleBudgetError as error:
        print(f"| {name} | {budget} | floor {megabytes(error.floor_bytes)} | | | | |")
        return None
    measured = gcpass.measure(step)
    plan = gcpass.plans()[-1]
    error_of = plan.predicted_peak_bytes / measured - 1
    cells = (
        name,
        budget,
        megabytes(plan.budget_bytes),
        megabytes(plan.predicted_peak_bytes),
        megabytes(plan.scheduled_peak_bytes),
        megabytes(measured),
        f"{100 * error_of:+.1f} %",
    )
    print("| " + " | ".join(cells) + " |", flush=True)
    return error_of


def megabytes(size_bytes: int | None) -> str:
    """Return a size in MB (1e6 bytes), a dash for none."""
    return "-" if size_bytes is None else f"{size_bytes / 1e6:.2f}"


if __name__ == "__main__":
    main()
