"""Small networks of the kinds that people train on a GPU; each returns one number."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

WIDTH, HEADS, WORDS = 64, 4, 32


class Block(nn.Module):
    """A transformer block as in GPT-2."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = dropout
        self.norm_1 = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.norm_2 = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm_1(x)).view(batch, length, 3, HEADS, width // HEADS)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        attended = self.out(attended.transpose(1, 2).reshape(batch, length, width))
        x = x + F.dropout(attended, self.dropout)
        hidden = self.down(F.gelu(self.up(self.norm_2(x))))
        return x + F.dropout(hidden, self.dropout)


class RotaryBlock(nn.Module):
    """A transformer block as in Llama: shared keys, rotary positions, gated MLP."""

    KEY_HEADS = 2

    def __init__(self) -> None:
        super().__init__()
        size = WIDTH // HEADS
        self.norm_1 = nn.RMSNorm(WIDTH)
        self.query = nn.Linear(WIDTH, WIDTH, bias=False)
        self.key = nn.Linear(WIDTH, self.KEY_HEADS * size, bias=False)
        self.value = nn.Linear(WIDTH, self.KEY_HEADS * size, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm_2 = nn.RMSNorm(WIDTH)
        self.gate = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.down = nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm_1(x)
        query, key = _rotated(self.query(normed)), _rotated(self.key(normed))
        repeat = HEADS // self.KEY_HEADS
        key = key.repeat_interleave(repeat, 1)
        value = _by_head(self.value(normed)).repeat_interleave(repeat, 1)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(x.shape))
        normed = self.norm_2(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


def _by_head(x: torch.Tensor) -> torch.Tensor:
    return x.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)


def _rotated(x: torch.Tensor) -> torch.Tensor:
    x = _by_head(x)
    half = x.shape[-1] // 2
    rate = 10000.0 ** -(torch.arange(half, device=x.device) / half)
    angle = torch.arange(x.shape[-2], device=x.device)[:, None] * rate
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    left, right = x[..., :half], x[..., half:]
    return torch.cat((left * cos - right * sin, right * cos + left * sin), -1)


class LanguageModel(nn.Module):
    """Blocks between an embedding and a head with the same weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embedding(words)
        for block in self.blocks:
            x = block(x)
        scores = self.head(self.norm(x))
        return F.cross_entropy(scores[:, :-1].flatten(0, 1), words[:, 1:].flatten())


class ConvNet(nn.Module):
    """Convolutions with batch and group normalization, and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.norm_1 = nn.BatchNorm2d(16)
        self.inner = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.GroupNorm(4, 16)
            )
            for _ in range(4)
        )
        self.narrow = nn.Conv2d(16, 32, 3, stride=2, padding=1, groups=2, bias=False)
        self.norm_2 = nn.BatchNorm2d(32)
        self.classes = nn.Linear(32, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm_1(self.stem(images)))
        inner = x
        for layer in self.inner:
            inner = F.silu(layer(inner))
        x = x + inner
        x = F.max_pool2d(F.relu(self.norm_2(self.narrow(x))), 2)
        return self.classes(x.mean((2, 3))).square().mean()


class Summed(nn.Module):
    """Blocks whose result is reduced to one number."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x).float().square().mean()


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is compiled and run.

    Attributes:
        build: returns the model.
        inputs: returns what it is called with.
        dtype: of parameters and inputs.
        attention: the kernels that attention may take.
        dynamic: whether the first size of every input is symbolic.
        draws: whether it draws random numbers, so that eager is no reference.
    """

    build: Callable[[], nn.Module]
    inputs: Callable[[], torch.Tensor]
    dtype: torch.dtype = torch.float32
    attention: tuple[SDPBackend, ...] = (SDPBackend.EFFICIENT_ATTENTION,)
    dynamic: bool = False
    draws: bool = False

    def model(self) -> nn.Module:
        """Return the model, the same each time."""
        torch.manual_seed(0)
        return self.build().to(self.dtype).train()

    def input(self) -> torch.Tensor:
        """Return its input, the same each time."""
        torch.manual_seed(1)
        given = self.inputs()
        if given.is_floating_point():
            given = given.to(self.dtype)
        return given

    def attending(self) -> AbstractContextManager[None]:
        """Pin the kernels of attention: the choice for fake tensors is simplified."""
        return sdpa_kernel(list(self.attention)) if self.attention else nullcontext()


def _sequences() -> torch.Tensor:
    return torch.randn(4, 64, WIDTH)


FLASH = (SDPBackend.FLASH_ATTENTION,)

CASES = {
    "block": Case(
        build=lambda: Summed(Block(), Block()),
        inputs=_sequences,
        dtype=torch.bfloat16,
        attention=FLASH,
    ),
    "llama": Case(
        build=lambda: Summed(RotaryBlock(), RotaryBlock()),
        inputs=_sequences,
        dtype=torch.bfloat16,
        attention=FLASH,
    ),
    "lm": Case(build=LanguageModel, inputs=lambda: torch.randint(0, WORDS, (4, 64))),
    "conv": Case(build=ConvNet, inputs=lambda: torch.randn(4, 3, 16, 16)),
    "dropout": Case(
        build=lambda: Summed(Block(0.5), Block(0.5)), inputs=_sequences, draws=True
    ),
    "dynamic": Case(
        build=lambda: Summed(Block(), Block()), inputs=_sequences, dynamic=True
    ),
}
