"""The measured peak of a step against the one that gcpass's plan says.

Only for programs that return one scalar, their loss: what a caller computes between
forward and backward is none of gcpass's memory.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import gcpass
from gcpass import step, store
from tests.fuzz.oracle import Budget, Fault
from tests.fuzz.program import Program, load, scope

HIDDEN_SHARE = 0.02  # of the peak: what operators allocate inside themselves
HIDDEN_BYTES = 4096  # the same, for peaks of some KiB


def is_measurable(program: Program) -> bool:
    """Return whether the program returns its loss and nothing else.

    Arguments with a graph of their own do not count: a second step would have to retain
    the first one's graph, and with it what the backward frees otherwise.
    """
    alone = program.losses == (0,) and len(program.outputs) == 1
    return alone and not any(n.startswith("leaf") for n in program.arguments)


def compare_peaks(program: Program, budget: Budget) -> float | None:
    """Return the measured peak over the scheduled one, None if that is unknown.

    Raises:
        Fault: the measured peak is larger, by more than is hidden.
    """
    torch._dynamo.reset()
    store.clear()
    step.forget()
    torch.manual_seed(1)
    module: nn.Module = load(program.source())["Program"]()
    module.train(program.training)
    options = {"memory_budget": budget, "codegen": "eager", "on_infeasible": "min"}
    function = torch.compile(module, backend="gcpass", options=options)
    space = scope()
    for line in program.arguments:
        exec(line, space)
    given = [space[name] for name in program.parameters]
    leaves = [t for n, t in space.items() if isinstance(t, Tensor) and t.is_leaf]
    for leaf in (*leaves, *module.parameters()):
        if leaf.requires_grad:
            leaf.grad = torch.zeros_like(leaf)

    def one_step() -> None:
        function(*given)[0].sum().backward()

    one_step()
    plans = gcpass.plans()
    if len(plans) != 1 or plans[0].scheduled_peak_bytes is None:
        return None
    scheduled = plans[0].scheduled_peak_bytes
    measured = gcpass.measure(one_step)
    if measured > scheduled * (1 + HIDDEN_SHARE) + HIDDEN_BYTES:
        raise Fault("measured", f"{measured} bytes, scheduled are {scheduled}")
    return measured / max(1, scheduled)
