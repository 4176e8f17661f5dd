"""A program while it is drawn: every line is run at once, so that shapes are known."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tests.fuzz.program import scope

LARGEST = 20_000  # elements of a value
SMALL = 32  # elements; values with fewer are picked less often
TAME = 100.0  # magnitude of a value

Accepts = Callable[[Tensor], bool]


class Skip(Exception):
    """An operation finds nothing to work on."""


@dataclass(slots=True, kw_only=True)
class Draft:
    """The lines so far, the values that they compute, and where the draws come from."""

    rng: random.Random
    space: dict[str, Any] = field(default_factory=scope)
    state: list[str] = field(default_factory=list)
    arguments: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    values: list[str] = field(default_factory=list)
    made: int = 0

    def __post_init__(self) -> None:
        self.space["self"] = nn.Module()

    def __getitem__(self, name: str) -> Tensor:
        value: Tensor = self.space[name]
        return value

    def pick(self, accepts: Accepts = lambda t: True) -> str:
        """Return a value that is accepted, more often a late one.

        Raises:
            Skip: there is none.
        """
        found = [name for name in reversed(self.values) if accepts(self[name])]
        if not found:
            raise Skip
        large = [name for name in found if self[name].numel() >= SMALL]
        if large and self.rng.random() < 0.8:
            found = large
        place = min(int(self.rng.expovariate(0.7)), len(found) - 1)
        return found[place]

    def real(self, least: int = 1, most: int = 4) -> str:
        """Return a value of floating numbers with so many dimensions."""
        return self.pick(lambda t: t.is_floating_point() and least <= t.dim() <= most)

    def full(self, least: int = 1, most: int = 4) -> str:
        """Return a float32 value with so many dimensions."""
        return self.pick(
            lambda t: t.dtype is torch.float32 and least <= t.dim() <= most
        )

    def same_shape(self, name: str) -> str:
        """Return a floating value of the same shape, perhaps the same one."""
        shape = self[name].shape
        return self.pick(lambda t: t.is_floating_point() and t.shape == shape)

    def add_state(self, text: str, prefix: str = "p") -> str:
        """Add a line of ``__init__``; ``NAME`` in it becomes a new attribute."""
        name = f"{prefix}{len(self.state)}"
        line = text.replace("NAME", name)
        exec(line, self.space)
        self.state.append(line)
        return f"self.{name}"

    def parameter(self, *shape: int) -> str:
        """Return a new parameter, sometimes frozen, scaled by its last size."""
        scale = round(shape[-1] ** -0.5, 3) if shape else 0.5
        frozen = ", requires_grad=False" if self.rng.random() < 0.15 else ""
        return self.add_state(
            f"self.NAME = nn.Parameter(torch.randn({list(shape)}) * {scale}{frozen})"
        )

    def buffer(self, value: str) -> str:
        """Return a new buffer."""
        return self.add_state(f'self.register_buffer("NAME", {value})', "b")

    def add_argument(self, value: str, prefix: str = "x") -> str:
        """Return a new argument; "leaf" for what only arguments are made of."""
        name = f"{prefix}{len(self.arguments)}"
        exec(f"{name} = {value}", self.space)
        self.arguments.append(f"{name} = {value}")
        if prefix == "x":
            self.values.append(name)
        return name

    def bind(self, value: str, within: str = "") -> str:
        """Add ``vN = value`` and return the name.

        Args:
            value: an expression.
            within: a context manager, for ``with ...: vN = value``.

        Raises:
            Skip: it cannot be computed, or the result is too large or too wild.
        """
        name = f"v{self.made}"
        line = f"with {within}: {name} = {value}" if within else f"{name} = {value}"
        self._run(line)
        result = self.space[name]
        if not isinstance(result, Tensor) or not 0 < result.numel() <= LARGEST:
            raise Skip
        if not _is_tame(result):
            raise Skip
        self.made += 1
        self.lines.append(line)
        self.values.append(name)
        return name

    def change(self, statement: str) -> None:
        """Add a line that changes something in place."""
        self._run(statement)
        self.lines.append(statement)

    def _run(self, line: str) -> None:
        try:
            exec(line, self.space)
        except (RuntimeError, TypeError, IndexError, ValueError) as error:
            raise Skip from error


def _is_tame(value: Tensor) -> bool:
    if value.is_complex():
        value = torch.view_as_real(value)
    return bool(value.float().abs().max() <= TAME)
