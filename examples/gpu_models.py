"""The two models that gpu_check.py trains, in plain torch, with their batches.

Llama: the blocks of Llama 3.2 1B (16 layers, width 2048, 32 heads of which 8 for keys
and values) with a vocabulary of 32,768 and a head of its own, 1.1 billion parameters.
Weights are bfloat16, as in full fine-tuning of language models.

ViT: ViT-L/16 for images of 224 x 224, 0.3 billion parameters. Weights are float32 under
bfloat16 autocast, as image models are trained.

No dropout. The loss is part of the forward, and so of what is compiled. Every block is
called through a function that the caller gives, which may put a checkpoint around it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Through = Callable[..., Tensor]  # takes a block and its arguments
INIT_STD = 0.02  # of weights, as GPT-2, Llama and ViT have it


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaShape:
    """Sizes of a Llama and of its batch."""

    layers: int = 16
    width: int = 2048
    heads: int = 32
    kv_heads: int = 8
    hidden: int = 8192
    vocabulary: int = 32_768
    length: int = 2048
    batch: int = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ViTShape:
    """Sizes of a vision transformer and of its batch."""

    layers: int = 24
    width: int = 1024
    heads: int = 16
    hidden: int = 4096
    image: int = 224
    patch: int = 16
    classes: int = 1000
    batch: int = 128


TINY_LLAMA = LlamaShape(
    layers=2,
    width=64,
    heads=4,
    kv_heads=2,
    hidden=176,
    vocabulary=128,
    length=32,
    batch=4,
)
TINY_VIT = ViTShape(
    layers=2, width=64, heads=4, hidden=256, image=64, patch=8, classes=10, batch=8
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A model and what it is trained on.

    Attributes:
        model: its forward takes the batch and a function to call blocks through.
        batch: tensors whose first dimension is the samples. The loss is a mean over
            samples of equal weight.
        autocast: whether the forward runs under bfloat16 autocast.
        about: sizes and dtypes, for people.
    """

    name: str
    model: nn.Module
    batch: tuple[Tensor, ...]
    autocast: bool
    about: str


class LlamaBlock(nn.Module):
    """Grouped-query attention with rotary positions, and SwiGLU, both after a norm."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        width, self.head_width = shape.width, shape.width // shape.heads
        kv_width = shape.kv_heads * self.head_width
        self.norm_1, self.norm_2 = (nn.RMSNorm(width, eps=1e-5) for _ in range(2))
        self.q = nn.Linear(width, width, bias=False)
        self.k, self.v = (nn.Linear(width, kv_width, bias=False) for _ in range(2))
        self.out = nn.Linear(width, width, bias=False)
        self.gate, self.up = (
            nn.Linear(width, shape.hidden, bias=False) for _ in range(2)
        )
        self.down = nn.Linear(shape.hidden, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return the residual stream."""
        y = self.norm_1(x)
        q, k, v = (self.by_head(part(y)) for part in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(
            rotated(q, cos, sin),
            rotated(k, cos, sin),
            v,
            is_causal=True,
            enable_gqa=True,
        )
        x = x + self.out(y.transpose(1, 2).flatten(2))
        y = self.norm_2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))

    def by_head(self, x: Tensor) -> Tensor:
        """Return (batch, heads, length, head width)."""
        return x.unflatten(-1, (-1, self.head_width)).transpose(1, 2)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return queries or keys turned by their positions (RoPE, halves side by side)."""
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat([-right, left], -1) * sin


class Llama(nn.Module):
    """A language model whose forward returns the loss."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(LlamaBlock(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width, eps=1e-5)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        head_width = shape.width // shape.heads
        frequencies = 10_000.0 ** (-torch.arange(0, head_width, 2) / head_width)
        angles = torch.outer(torch.arange(shape.length), frequencies).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, ids: Tensor, labels: Tensor, through: Through) -> Tensor:
        """Return the cross entropy of the labels, taken in float32."""
        x = self.tokens(ids)
        for block in self.blocks:
            x = through(block, x, self.cos, self.sin)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class ViTBlock(nn.Module):
    """Attention and a GELU network, both after a norm."""

    def __init__(self, shape: ViTShape) -> None:
        super().__init__()
        width, self.heads = shape.width, shape.heads
        self.norm_1, self.norm_2 = (nn.LayerNorm(width, eps=1e-6) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up = nn.Linear(width, shape.hidden)
        self.down = nn.Linear(shape.hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the residual stream."""
        parts = self.qkv(self.norm_1(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class ViT(nn.Module):
    """An image classifier whose forward returns the loss."""

    def __init__(self, shape: ViTShape) -> None:
        super().__init__()
        width, places = shape.width, (shape.image // shape.patch) ** 2 + 1
        self.patches = nn.Conv2d(3, width, shape.patch, shape.patch)
        self.first = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(torch.empty(1, places, width).normal_(0, INIT_STD))
        self.blocks = nn.ModuleList(ViTBlock(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, shape.classes)

    def forward(self, images: Tensor, labels: Tensor, through: Through) -> Tensor:
        """Return the cross entropy of the labels."""
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(len(x), -1, -1), x], 1) + self.places
        for block in self.blocks:
            x = through(block, x)
        logits = self.head(self.norm(x[:, 0]))
        return F.cross_entropy(logits, labels)


def make_llama(shape: LlamaShape, device: str) -> Workload:
    """Return a Llama in bfloat16 with random tokens and labels."""
    with torch.device(device):
        torch.manual_seed(0)
        model = Llama(shape).to(torch.bfloat16)
        model.apply(start_small)
        ids, labels = torch.randint(
            shape.vocabulary, (2, shape.batch, shape.length)
        ).unbind()
    about = f"bfloat16 weights, {shape.layers} layers, batch {shape.batch}"
    return Workload(
        name="llama",
        model=model,
        batch=(ids, labels),
        autocast=False,
        about=f"{millions(model)}, {about} x {shape.length} tokens",
    )


def make_vit(shape: ViTShape, device: str) -> Workload:
    """Return a ViT in float32, to run under autocast, with random images and labels."""
    with torch.device(device):
        torch.manual_seed(0)
        model = ViT(shape)
        model.apply(start_small)
        images = torch.randn(shape.batch, 3, shape.image, shape.image)
        labels = torch.randint(shape.classes, (shape.batch,))
    about = f"float32 weights, bfloat16 autocast, {shape.layers} layers, batch"
    return Workload(
        name="vit",
        model=model,
        batch=(images, labels),
        autocast=True,
        about=f"{millions(model)}, {about} {shape.batch} x {shape.image}^2",
    )


def start_small(module: nn.Module) -> None:
    """Draw the weights of a layer as these models do; biases start at 0."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=INIT_STD)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def millions(model: nn.Module) -> str:
    """Return the number of parameters in words."""
    return f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters"
