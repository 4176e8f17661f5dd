"""Small hand-written models; each computes its loss in the forward."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Mlp(nn.Module):
    """A chain of equal layers, the textbook case of recomputation."""

    def __init__(self, width: int = 16, depth: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        """Return the loss."""
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


class Block(nn.Module):
    """A pre-norm transformer block with causal attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the residual stream."""
        batch, length, width = x.shape
        shape = (batch, length, self.heads, width // self.heads)
        q, k, v = (
            part.view(shape).transpose(1, 2)
            for part in self.qkv(self.norm_1(x)).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class LanguageModel(nn.Module):
    """Embedding, blocks, a head tied to the embedding, cross entropy."""

    def __init__(
        self, *, vocabulary: int = 64, width: int = 32, depth: int = 2, p: float = 0.0
    ) -> None:
        super().__init__()
        self.p = p
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, 2) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        """Return the loss of predicting each next token."""
        x = F.dropout(self.embedding(ids), self.p)
        for block in self.blocks:
            x = F.dropout(block(x), self.p)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class ConvNet(nn.Module):
    """Convolutions with batch norm, whose statistics the forward updates."""

    def __init__(self, width: int = 8, depth: int = 3) -> None:
        super().__init__()
        channels = [3, *[width] * depth]
        self.convs = nn.ModuleList(
            nn.Conv2d(a, b, 3, padding=1) for a, b in itertools.pairwise(channels)
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(depth))
        self.head = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Return the loss of telling images 0, 1, 2, 3, 0, ... apart."""
        labels = torch.arange(x.shape[0], device=x.device) % 4
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = F.relu(norm(conv(x)))
        return F.cross_entropy(self.head(x.mean((2, 3))), labels)


class SkipNet(nn.Module):
    """Down, up and a skip connection, with group norm: a small UNet."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.middle = nn.Conv2d(2 * width, 2 * width, 3, padding=1)
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.last = nn.Conv2d(2 * width, 3, 3, padding=1)
        widths = (width, 2 * width, 2 * width, width)
        self.norms = nn.ModuleList(nn.GroupNorm(4, w) for w in widths)

    def forward(self, x: Tensor) -> Tensor:
        """Return the loss of reproducing the image."""
        top = F.silu(self.norms[0](self.first(x)))
        low = F.silu(self.norms[1](self.down(top)))
        low = low + F.silu(self.norms[2](self.middle(low)))
        up = F.silu(self.norms[3](self.up(low)))
        return F.mse_loss(self.last(torch.cat([top, up], 1)), x)
