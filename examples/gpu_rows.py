"""Compiles a step in every way that gpu_check.py compares, and measures it."""

from __future__ import annotations

import contextlib
import copy
import gc
import time
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from gpu_models import Through, Workload
from gpu_report import Row, described
from torch import Tensor, nn
from torch._functorch import config
from torch.utils.checkpoint import checkpoint

import gcpass
from gcpass.decisions import RegionPlan

PIECES = 4  # of a batch, for the reference
KINDS = ("eager", "inductor", "torch", "block", "gcpass")
STOCK = {"inductor": "inductor", "eager": "aot_eager_decomp_partition"}  # by codegen
Step = Callable[[], Tensor]  # a forward and backward; returns the loss


@dataclass(slots=True, kw_only=True)
class Subject:
    """A model on trial: its exact gradients, its rows, and the steps to be timed."""

    work: Workload
    reference: dict[str, Tensor]
    rows: list[Row] = field(default_factory=list)
    steps: dict[str, Step] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How gcpass plans, and whether anything generates code ("inductor", "eager")."""

    planning_s: float
    codegen: str


def on_trial(work: Workload) -> Subject:
    """Return a model whose gradients exist and are zero, with the reference."""
    reference = exact_gradients(work)
    for parameter in work.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return Subject(work=work, reference=reference)


def exact_gradients(work: Workload) -> dict[str, Tensor]:
    """Return the gradients of a float32 copy in eager mode, piece by piece."""
    model = copy.deepcopy(work.model).float()
    pieces = zip(*(tensor.chunk(PIECES) for tensor in work.batch), strict=True)
    for piece in pieces:
        share = len(piece[0]) / len(work.batch[0])
        (share * model(*piece, directly)).backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def directly(block: nn.Module, *arguments: Tensor) -> Tensor:
    """Call a block."""
    result: Tensor = block(*arguments)
    return result


def checkpointed(block: nn.Module, *arguments: Tensor) -> Tensor:
    """Call a block that is computed again in the backward."""
    result: Tensor = checkpoint(block, *arguments, use_reentrant=False)
    return result


def measure(subject: Subject, row: Row, settings: Settings) -> None:
    """Compile a row's step and take everything but its time.

    Raises:
        Exception: whatever the backend raises.
    """
    before = len(gcpass.plans())
    function, context = compiled(subject, row, settings)

    def step() -> Tensor:
        loss = function(*subject.work.batch)
        loss.backward()
        return loss.detach()

    with context:
        started = time.perf_counter()
        step()
        synchronize()
        row.first_step_s = time.perf_counter() - started
    describe(row, gcpass.plans()[before:])
    with torch.compiler.set_stance("fail_on_recompile"):
        row.step_s = seconds_of(step)
        compare(subject, row, step)
        take_peak(row, step)
    subject.steps[row.name] = step


def compiled(
    subject: Subject, row: Row, settings: Settings
) -> tuple[Callable[..., Tensor], contextlib.AbstractContextManager[Any]]:
    """Return the loss of a batch as the row has it, and what to compile it in."""
    kind, _, argument = row.name.partition("@")
    through = checkpointed if kind == "block" else directly
    function = loss_function(subject.work, through)
    if kind == "eager":
        return function, contextlib.nullcontext()
    if kind == "gcpass":
        backend, options = "gcpass", gcpass_options(subject, row, settings)
    else:
        backend, options = STOCK[settings.codegen], None
    # The shapes of one model say nothing about those of the other: never dynamic.
    function = torch.compile(
        function, backend=backend, options=options, fullgraph=True, dynamic=False
    )
    if kind == "torch":
        return function, config.patch(activation_memory_budget=float(argument))
    return function, contextlib.nullcontext()


def gcpass_options(subject: Subject, row: Row, settings: Settings) -> dict[str, Any]:
    """Return the options of a row of gcpass."""
    budget: int | str | None = row.name.partition("@")[2] or None
    if budget == "block":
        row.budget_bytes = budget = peak_of(subject, "block")
    return {
        "memory_budget": budget,
        "time_limit_s": settings.planning_s,
        "codegen": settings.codegen,
    }


def peak_of(subject: Subject, name: str) -> int | None:
    """Return the measured peak of an earlier row, in bytes."""
    peaks = {r.name: r.peak_bytes for r in subject.rows if r.status == "measured"}
    return peaks.get(name)


def loss_function(work: Workload, through: Through) -> Callable[..., Tensor]:
    """Return the loss of a batch, as a function with code of its own.

    Dynamo files what it compiled under the code. All rows would share one, and a row
    with activation_memory_budget would get what Inductor compiled without.
    """
    model, autocast, device = work.model, work.autocast, work.batch[0].device.type

    def loss(*batch: Tensor) -> Tensor:
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            result: Tensor = model(*batch, through)
        return result

    code, closure = loss.__code__.replace(), loss.__closure__
    return types.FunctionType(code, loss.__globals__, closure=closure)


def describe(row: Row, plans: Sequence[RegionPlan]) -> None:
    """Note what gcpass says about its plan, if it made one."""
    if not plans:
        return
    if len(plans) > 1:
        row.notes.append(f"{len(plans)} regions; figures are of the last one's plan")
    plan = plans[-1]
    if row.budget_bytes is None and plan.budget_bytes is not None:
        row.budget_bytes = plan.budget_bytes + plan.others_bytes
    if plan.scheduled_peak_bytes is not None:
        row.scheduled_bytes = plan.step_peak_bytes
    elif row.name != "gcpass@none":  # where no program is read, as nothing is asked
        row.notes.append(f"no scheduled peak: {plan.scheduled_note}")
    row.overhead, row.recomputations = plan.overhead, plan.recomputations
    row.solve_s, row.verify_s = plan.solve_time_s, plan.verify_time_s
    row.programs_read = plan.rounds
    row.from_cache = plan.from_cache


def compare(subject: Subject, row: Row, step: Step) -> None:
    """Set the errors of the gradients of one step against the reference."""
    model = subject.work.model
    model.zero_grad(set_to_none=False)
    row.loss = float(step())
    square = exact_square = worst = 0.0
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        exact = subject.reference[name]
        off, whole = norm(parameter.grad - exact), norm(exact)
        square, exact_square = square + off**2, exact_square + whole**2
        relative = off / whole if whole else off
        if not relative <= worst:  # so that NaN is the worst
            worst, row.worst_name = relative, name
    row.error, row.worst_error = (square / exact_square) ** 0.5, worst


def norm(tensor: Tensor) -> float:
    """Return the Euclidean norm, summed in double precision."""
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64))


def take_peak(row: Row, step: Step) -> None:
    """Set a step's peak beyond what is alive before, before and after rounding up."""
    gc.collect()  # what is collected later would hide as much of the peak
    before = requested_bytes("current")
    row.peak_bytes = gcpass.measure(step)
    row.requested_bytes = row.peak_bytes
    if torch.cuda.is_available():
        row.requested_bytes = requested_bytes("peak") - before


def requested_bytes(which: str) -> int:
    """Return what was asked of the GPU's allocator ("current", "peak"), 0 without."""
    if not torch.cuda.is_available():
        return 0
    return int(torch.cuda.memory_stats()[f"requested_bytes.all.{which}"])


def take_turns(subject: Subject, rounds: int, left_s: float) -> int:
    """Time the steps of a model in turns, after a round that is not counted.

    Args:
        rounds: at most; one at least.
        left_s: seconds after which no further round is begun.

    Returns:
        How many rounds there were.
    """
    started = time.perf_counter()
    with torch.compiler.set_stance("fail_on_recompile"):
        for number in range(rounds + 1):
            if number > 1 and time.perf_counter() - started > left_s:
                return number - 1
            take_turn(subject, counted=number > 0)
    return rounds


def take_turn(subject: Subject, *, counted: bool) -> None:
    """Time every step once; a row whose step raises has failed."""
    for row in subject.rows:
        if row.status != "measured":
            continue
        try:
            seconds = seconds_of(subject.steps[row.name])
        except Exception as error:  # of any backend; the others go on
            row.status, row.message = "failed", described(error)
        else:
            row.seconds += [seconds] * counted


def seconds_of(step: Step) -> float:
    """Return a step's time by CUDA events, or the CPU time of this process."""
    if not torch.cuda.is_available():
        started = time.process_time()
        step()
        return time.process_time() - started
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    step()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
