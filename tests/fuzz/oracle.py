"""Runs a program eagerly and with gcpass, and says where they differ.

Eager is the oracle. How far rounding may carry a program is measured on eager itself,
by moving parameters, inputs and the constants that are written by one part in a million
(and by computing in float32 what the program computes in bfloat16): what is
ill-conditioned moves as well.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch import config as functorch_config

import gcpass
from gcpass import step, store
from gcpass.errors import InfeasibleBudgetError
from tests.fuzz.plans import random_plans
from tests.fuzz.program import Program, bound, load, scope

EXACT = 2e-5  # of the largest magnitude of a tensor
NUDGE = 1e-6  # relative change of every number that goes in
NOISES = 8  # times as far as the nudged program may the compiled one be
DUST = 1e-7  # of the largest magnitude in the run: sums that cancel to nothing
# A constant that is written, whole tensors of which a normalization may be given.
WRITTEN = re.compile(
    r"^(.*(?:\] = |fill_?\(|index_put_?\().*?)(\d+\.\d+)(\)*)$", re.MULTILINE
)
CHAOS = 0.05  # of the magnitude: programs that a nudge moves this far prove nothing

Budget = int | float | str | None  # "plan 3": a random plan with this seed
Run = Callable[..., Any]


class Fault(Exception):
    """The compiled program does not do what the eager one does.

    Attributes:
        kind: equal for failures that look the same, for the minimizer.
    """

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind = kind


class InvalidProgramError(Exception):
    """Eager refuses the program, or its numbers are no use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """What eager computes, and how far from it rounding may lead."""

    values: dict[str, Tensor]
    tolerance: dict[str, float]
    outputs: list[str] = field(default_factory=list)


def reference(program: Program) -> Reference:
    """Return eager's results.

    Raises:
        InvalidProgramError: eager raises, a result is not finite, or the program is
            chaotic.
    """
    try:
        values, *others = _eager_runs(program)
    except Exception as error:
        raise InvalidProgramError(f"{type(error).__name__}: {error}") from error
    for name, value in values.items():
        if not torch.isfinite(_wide(value)).all():
            raise InvalidProgramError(f"{name} is not finite")
    largest = max((_largest(v) for v in values.values()), default=0.0)
    tolerance = {}
    for name, value in values.items():
        if any(other[name].shape != value.shape for other in others):
            raise InvalidProgramError(f"{name} changes its shape")
        noise = max(_distance(value, other[name]) for other in others)
        if noise > CHAOS * max(_largest(value), DUST * largest):
            raise InvalidProgramError(f"{name} moves by {noise:.1e} when nudged")
        rounding = EXACT if value.is_floating_point() or value.is_complex() else 0.0
        tolerance[name] = max(
            rounding * _largest(value), NOISES * noise, DUST * largest
        )
    return Reference(values=values, tolerance=tolerance)


def _eager_runs(program: Program) -> list[dict[str, Tensor]]:
    """Return what eager computes, then the same for slightly other numbers."""
    runs = [run(program, _as_it_is, nudge=NUDGE * sign) for sign in (0, 1, -1)]
    run(program, _as_it_is, everything=True)
    if "bfloat16" in program.source():
        exact = program.source().replace("torch.bfloat16", "torch.float32")
        runs.append(run(program, _as_it_is, source=exact))
    return runs


def compare(
    program: Program,
    expected: Reference,
    budget: Budget,
    *,
    backend: str = "gcpass",
    **options: object,
) -> int | None:
    """Train the program with gcpass and compare it with eager.

    Args:
        program: the program.
        expected: its eager results.
        budget: memory budget.
        backend: another backend tells whether a fault is gcpass's.
        options: of the backend.

    Returns:
        None, or the floor in bytes where the budget is under it.

    Raises:
        Fault: a difference, a refusal of "min", an exception, or a broken budget.
    """
    torch._dynamo.reset()
    store.clear()
    step.forget()
    plans: Any = nullcontext()
    if isinstance(budget, str) and budget.startswith("plan"):
        plans, budget = random_plans(int(budget.split()[1])), None
    if backend == "gcpass":
        defaults = {"memory_budget": budget, "codegen": "eager", "strict": True}
        options = defaults | options

    def compiled(module: nn.Module) -> Run:
        result: Run = torch.compile(module, backend=backend, options=options or None)
        return result

    try:
        with plans:
            values = run(program, compiled)
    except InfeasibleBudgetError as error:
        if budget in (None, "min") or budget == error.floor_bytes:
            raise Fault("refused", str(error)) from error
        return error.floor_bytes
    except Exception as error:
        text = str(error)
        raise Fault(f"{type(error).__name__} {text[:60]!r}", text[:3000]) from error
    _compare_values(values, expected)
    for plan in gcpass.plans():
        if plan.budget_bytes is not None and plan.peak_bytes > plan.budget_bytes:
            raise Fault(
                "over budget", f"{plan.peak_bytes} of {plan.budget_bytes} bytes"
            )
    return None


def run(
    program: Program,
    compiled: Callable[[nn.Module], Run],
    *,
    nudge: float = 0.0,
    source: str | None = None,
    everything: bool = False,
) -> dict[str, Tensor]:
    """Train a program and return everything that can be observed, by name.

    Args:
        program: the program.
        compiled: module -> what is called in its place.
        nudge: relative change of parameters, buffers, inputs and written constants.
        source: another source for the program.
        everything: let the loss read every output and every written argument.
            torch.compile traces the backward of them all, so all must be legal.
    """
    torch.manual_seed(1)
    text = WRITTEN.sub(
        lambda found: f"{found[1]}{float(found[2]) * (1 + nudge)}{found[3]}",
        source or program.source(),
    )
    module: nn.Module = load(text)["Program"]()
    module.train(program.training)
    noise = torch.Generator().manual_seed(2)
    for tensor in (*module.parameters(), *module.buffers()):
        _nudge(tensor, nudge, noise)
    function = compiled(module)
    seen: dict[str, Tensor] = {}
    for number in range(program.steps):
        torch.manual_seed(10 + number)
        space = scope()
        for line in program.arguments:
            exec(line, space)
            name = bound(line)
            if name is not None and space[name].is_leaf:
                _nudge(space[name], nudge, noise)
        arguments = [space[name] for name in program.parameters]
        with torch.random.fork_rng(), _one_graph_many_backwards(program.backwards):
            torch.manual_seed(100 + number)
            found = _train(program, module, function, arguments, everything)
        leaves = {n: t for n, t in space.items() if isinstance(t, Tensor)}
        found |= _gradients({**leaves, **dict(module.named_parameters())})
        seen |= {f"step {number}: {k}": v.detach().clone() for k, v in found.items()}
        _update(module)
    seen |= {f"state {k}": v.detach().clone() for k, v in module.state_dict().items()}
    return seen


def _train(
    program: Program,
    module: nn.Module,
    function: Run,
    arguments: list[Tensor],
    everything: bool,
) -> dict[str, Tensor]:
    outputs = function(*arguments)
    found = {f"output {i}": o for i, o in enumerate(outputs) if isinstance(o, Tensor)}
    found = {k: v.detach().clone() for k, v in found.items()}
    found["needs gradient"] = torch.tensor(
        [isinstance(o, Tensor) and o.requires_grad for o in outputs]
    )
    found["aliases"] = _aliases(arguments, outputs)
    read = [outputs[i] for i in program.losses]
    if everything:
        read = [t for t in (*outputs, *arguments) if isinstance(t, Tensor)]
        read = [t for t in read if t.requires_grad]
    loss: Any = sum(map(_loss, read))
    for i in range(program.backwards):
        loss.backward(retain_graph=i + 1 < program.backwards)
    for i, argument in enumerate(arguments):
        found[f"argument {i}"] = argument
    return found


def _loss(output: Tensor) -> Tensor:
    """Return a scalar that weighs every element differently."""
    if output.is_complex():
        output = torch.view_as_real(output)
    weights = torch.linspace(0, 3 * output.numel() ** 0.5, output.numel()).cos()
    return (output.float().flatten() * weights).sum()


def _gradients(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        f"gradient of {name}": tensor.grad
        for name, tensor in tensors.items()
        if tensor.is_leaf and tensor.grad is not None
    }


def _aliases(arguments: list[Tensor], outputs: tuple[Any, ...]) -> Tensor:
    """Return which arguments each output shares its storage with."""
    return torch.tensor(
        [
            [isinstance(o, Tensor) and _storage(o) == _storage(a) for a in arguments]
            for o in outputs
        ]
    )


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _update(module: nn.Module) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.grad is not None:
                size = parameter.grad.abs().max().clamp_min(1.0)
                parameter.sub_(0.05 * parameter.grad / size)
                parameter.grad = None


def _nudge(tensor: Tensor, by: float, noise: torch.Generator) -> None:
    if by and tensor.is_floating_point():
        change = 1 + by * torch.randn(tensor.shape, generator=noise)
        tensor.data.copy_(tensor.data * change)


@contextmanager
def _one_graph_many_backwards(backwards: int) -> Iterator[None]:
    """Ask torch, as its error message says, not to reuse what a backward read."""
    with functorch_config.patch(donated_buffer=backwards == 1):
        yield


def _as_it_is(module: nn.Module) -> Run:
    return module


def _compare_values(values: dict[str, Tensor], expected: Reference) -> None:
    for name in values.keys() | expected.values.keys():
        # Where eager has no gradient torch.compile gives zeros, and the other way round
        # nothing is as good as zeros.
        got, want = values.get(name), expected.values.get(name)
        if got is None or want is None:
            there = want if got is None else got
            if there is not None and there.any():
                raise Fault("other gradients", f"{name} is in one of the two only")
            continue
        if got.shape != want.shape or got.dtype != want.dtype:
            raise Fault(
                f"layout of {name}",
                f"{got.dtype} {tuple(got.shape)}, not {want.dtype} {tuple(want.shape)}",
            )
        distance, allowed = _distance(got, want), expected.tolerance[name]
        if not distance <= allowed:  # also for NaN
            raise Fault(
                "values",
                f"{name} is off by {distance:.2e} of {_largest(want):.2e}, "
                f"allowed {allowed:.2e}",
            )


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _distance(a: Tensor, b: Tensor) -> float:
    return float((_wide(a) - _wide(b)).abs().max()) if a.numel() else 0.0


def _largest(tensor: Tensor) -> float:
    return float(_wide(tensor).abs().max()) if tensor.numel() else 0.0
