"""A random training program: lines of Python that print as a self-contained file.

A program is a module (lines of ``__init__``, lines of ``forward``), the lines that make
its arguments, and how it is trained. Every line of the forward either binds one new
name (``v3 = torch.tanh(v1)``) or changes something in place (``v3.add_(1)``), so that
lines can be taken out one by one.
"""

from __future__ import annotations

import dataclasses
import linecache
import re
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

_NAME = re.compile(r"\b(?:v|x|leaf)\d+\b")
_STATE = re.compile(r"\bself\.(\w+\d+)\b")
_BINDS = re.compile(r"^(?:with [^:]+: )?((?:v|x|leaf)\d+) = (.*)$")
_MAKES_STATE = re.compile(r'^self\.(?:register_buffer\("(\w+)"|(\w+) = )')


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A module, its arguments, and how it is trained.

    Attributes:
        state: lines of ``__init__`` that make parameters, buffers and modules.
        arguments: lines that make the arguments, and the leaves behind them.
        lines: of the forward.
        outputs: expressions that the forward returns.
        losses: which of the outputs the loss reads.
        training: whether the module is in training mode.
        steps: how many steps, with an update of the parameters in between.
        backwards: how often each step's backward runs, on one graph.
    """

    state: tuple[str, ...]
    arguments: tuple[str, ...]
    lines: tuple[str, ...]
    outputs: tuple[str, ...]
    losses: tuple[int, ...]
    training: bool = True
    steps: int = 1
    backwards: int = 1

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the forward's arguments."""
        return tuple(n for n in map(bound, self.arguments) if n and n[0] == "x")

    def source(self) -> str:
        """Return the module and its arguments as Python, without imports."""
        init = ["super().__init__()", *self.state]
        forward = [*self.lines, f"return {_tuple(self.outputs)}"]
        arguments = [*self.arguments, f"return {_tuple(self.parameters)}"]
        return "\n".join(
            [
                "class Program(nn.Module):",
                "    def __init__(self):",
                *(f"        {line}" for line in init),
                "",
                f"    def forward(self, {', '.join(self.parameters)}):",
                *(f"        {line}" for line in forward),
                "",
                "",
                "def arguments():",
                *(f"    {line}" for line in arguments),
            ]
        )

    def pruned(self) -> Program:
        """Return the program without state and arguments that nothing reads."""
        text = "\n".join([*self.lines, *self.outputs])
        used = set(_STATE.findall(text))
        state = tuple(s for s in self.state if made_state(s) in used)
        wanted, kept = names(text), []
        for line in reversed(self.arguments):
            name = bound(line)
            if name is None or name in wanted:
                wanted |= names(line)
                kept.append(line)
        return dataclasses.replace(self, state=state, arguments=tuple(reversed(kept)))


def bound(line: str) -> str | None:
    """Return the name that a line binds, None for a change in place."""
    match = _BINDS.match(line)
    return match[1] if match else None


def value_of(line: str) -> str:
    """Return what a binding line binds its name to."""
    match = _BINDS.match(line)
    assert match is not None
    return match[2]


def made_state(line: str) -> str:
    """Return the attribute of the module that a line of ``__init__`` makes."""
    match = _MAKES_STATE.match(line)
    assert match is not None, line
    return match[1] or match[2]


def names(text: str) -> set[str]:
    """Return the names of values that a text mentions."""
    return set(_NAME.findall(text))


def renamed(text: str, old: str, new: str) -> str:
    """Return the text with one name put in another's place."""
    return re.sub(rf"\b{old}\b", new, text)


def scope() -> dict[str, Any]:
    """Return the names that every line may use."""
    return {"torch": torch, "F": F, "nn": nn, "checkpoint": checkpoint}


_loaded = 0


def load(source: str) -> dict[str, Any]:
    """Run a source and return its names; lines show in tracebacks."""
    global _loaded
    _loaded += 1
    file = f"<program {_loaded}>"
    linecache.cache[file] = len(source), None, source.splitlines(True), file
    space = scope()
    exec(compile(source, file, "exec"), space)
    return space


def _tuple(items: tuple[str, ...]) -> str:
    return f"({items[0]},)" if len(items) == 1 else f"({', '.join(items)})"
