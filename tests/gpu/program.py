"""What Inductor generated for a GPU, as it goes from one process to the next."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeAlias

Call: TypeAlias = tuple[str, str]  # (name, operator) of a call in a graph


@dataclass(slots=True)
class Kernel:
    """A Triton kernel that Inductor generated; launching it does nothing.

    Attributes:
        name: of the function.
        source: a module of its own that defines it.
    """

    name: str
    source: str

    def run(self, *arguments: Any, **named: Any) -> None:
        """Stand in for the launch."""


@dataclass(slots=True, kw_only=True)
class Graph:
    """A graph that Inductor compiled.

    Attributes:
        is_backward: whether it is a backward.
        inputs: names of its inputs.
        source: the generated wrapper.
        kernels: of the wrapper, in the order in which they were generated.
    """

    is_backward: bool
    inputs: list[str]
    source: str = ""
    kernels: list[Kernel] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class Lowered:
    """A step of a model as it would run on a GPU.

    Attributes:
        budget: the option.
        budget_bytes: the limit, None without one.
        predicted_bytes: peak from the problem.
        scheduled_bytes: peak of the generated program, None if it was not read.
        recomputations: of the plan.
        arguments: what each input of the forward is: a parameter's or buffer's name,
            "" for the model's input, an int for a size.
        forward, backward: as Inductor generated them.
        planned: calls of the forward's and of the backward's graph, in their order.
        machine_code: bytes of the kernels' machine code by capability.
    """

    budget: Any
    budget_bytes: int | None
    predicted_bytes: int
    scheduled_bytes: int | None
    recomputations: int
    arguments: list[str | int]
    forward: Graph
    backward: Graph
    planned: tuple[list[Call], list[Call]]
    machine_code: dict[int, list[int]] = field(default_factory=dict)
