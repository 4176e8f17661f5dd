"""How far a compiled step is from eager, with eager's own noise as the yardstick.

How far may a right program be from eager? Eager often repeats itself to the bit, and
the same sums in another order are as right as eager's own. So the yardstick is what
rounding does to this very step: eager also runs with every number that goes in moved
by one rounding unit, up or down by chance. The distance between such a run and the
plain one is eager's *noise*: stochastic arithmetic (D. S. Parker: Monte Carlo
Arithmetic, 1997) with the inputs as the only place where noise comes in. The unit is
that of the coarsest type in which the step computes, bfloat16 under autocast.

Why not a run in float64: low precision training is as imprecise as eager is, on
purpose, and the distance from exact numbers says little about two ways of rounding.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from gcpass.errors import GcpassError
from gcpass.torch_private import TorchDispatchMode, tree_leaves

__all__ = ["Deviation", "GradientReport", "compare_with_eager", "same_draws"]

NUDGES = 2  # runs of eager with moved inputs
NOISES = 4  # times eager's noise that may be off; right models needed up to 1.5
FLOAT32 = torch.finfo(torch.float32).eps  # sums are kept in float32 or better
SUM_UNITS = 160  # units of float32 that another order of a long sum may be off
ROUNDED_UNITS = 4  # units of the step's type that rounding a result may be off
UNJUDGED = 0.5  # of the magnitude: who may be off this far is not checked at all
SHOWN = 5  # rows of a summary

_COMPUTED_IN = (torch.float64, torch.float32, torch.float16, torch.bfloat16)

Kind = Literal["loss", "gradient", "output", "buffer", "input"]
Values = Mapping[tuple[Kind, str], Tensor]
Move = Callable[[Iterable[Tensor]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Deviation:
    """How far one tensor of a step is from eager's.

    The three numbers are the largest absolute difference over the largest magnitude
    in eager's tensor; where that is zero, over the largest of its kind.

    Attributes:
        kind: what the tensor is.
        name: of the parameter, buffer, input or output.
        error: of the compiled step, infinite where that is not finite.
        noise: of eager itself.
        allowed: the most that rounding explains.
    """

    kind: Kind
    name: str
    error: float
    noise: float
    allowed: float

    @property
    def within(self) -> bool:
        """Whether rounding explains the error."""
        return self.error <= self.allowed

    @property
    def judged(self) -> bool:
        """Whether eager is steady enough here for an error to show."""
        return self.allowed < UNJUDGED


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientReport:
    """How far a compiled step is from eager, tensor by tensor.

    Attributes:
        deviations: of everything that was compared, in the model's order.
        unit: rounding unit of the coarsest type in which eager computes.
    """

    deviations: tuple[Deviation, ...]
    unit: float

    @property
    def gradients(self) -> tuple[Deviation, ...]:
        """Those of the gradients."""
        return tuple(d for d in self.deviations if d.kind == "gradient")

    @property
    def mismatches(self) -> tuple[Deviation, ...]:
        """What rounding does not explain, the worst first."""
        return tuple(d for d in self._worst_first() if not d.within)

    @property
    def ok(self) -> bool:
        """Whether rounding explains every error, and some gradient was judged."""
        return not self.mismatches and any(d.judged for d in self.gradients)

    def summary(self, shown: int = SHOWN) -> str:
        """Return the verdict and the worst tensors as a table.

        Args:
            shown: rows, at most.
        """
        worst = self._worst_first()[:shown]
        rows = [(f"{d.kind} {d.name}", d) for d in worst]
        width = max((len(label) for label, _ in rows), default=0)
        head = f"{'':{width}}     error     noise   allowed"
        return "\n".join([self._verdict(), head, *(_row(r, width) for r in rows)])

    def __str__(self) -> str:
        return self.summary()

    def _worst_first(self) -> list[Deviation]:
        return sorted(self.deviations, key=lambda d: _ratio(d.error, d.allowed))[::-1]

    def _verdict(self) -> str:
        off, all_ = len(self.mismatches), len(self.deviations)
        text = (
            f"{off} of {all_} tensors differ from eager by more than rounding"
            if off
            else f"all {all_} tensors agree with eager within rounding"
        )
        unjudged = sum(not d.judged for d in self.deviations)
        return f"{text}; {unjudged} too noisy in eager to judge" if unjudged else text


def compare_with_eager(
    eager: Callable[[Move], Values], compiled: Callable[[], Values]
) -> GradientReport:
    """Run a step in eager mode, with noise and compiled, and compare.

    Every run must start from the same state, random state included. Eager runs
    ``2 + NUDGES`` times: as it is, again (operators that are not deterministic show
    here), and with moved inputs.

    Args:
        eager: runs the step after it has called its argument with all tensors that
            go in, which are moved in place, and returns what the step computes.
        compiled: runs the compiled step and returns the same tensors.

    Raises:
        GcpassError: eager's loss or a gradient of eager is not finite.
    """
    with _CoarsestType() as seen:
        expected = eager(_leave)
    _require_finite(expected)
    moves: list[Move] = [
        functools.partial(_nudge, seen.unit, seed) for seed in range(NUDGES)
    ]
    noise = dict.fromkeys(expected, 0.0)
    for move in [_leave, *moves]:
        again = eager(move)
        for key, value in expected.items():
            noise[key] = max(noise[key], _distance(again[key], value))
    got = compiled()
    sizes = {key: _largest(value) for key, value in expected.items()}
    errors = {key: _distance(got[key], value) for key, value in expected.items()}
    return GradientReport(
        deviations=tuple(
            _deviation(key, value, errors, noise, sizes, seen.unit)
            for key, value in expected.items()
        ),
        unit=seen.unit,
    )


@contextmanager
def same_draws(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Put every random state back at the end, so that the next run draws the same.

    Args:
        tensors: torch's states of their devices count, besides the CPU's.
    """
    devices = {t.device for t in tensors if t.device.type != "cpu"}
    kind = min((d.type for d in devices), default="cuda")
    indices = sorted(d.index for d in devices if d.type == kind)
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(indices, device_type=kind):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


class _CoarsestType(TorchDispatchMode):
    """Watches in which floating-point types operators give their results."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.unit = 0.0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        results = func(*args, **(kwargs or {}))
        for result in tree_leaves(results):
            if isinstance(result, Tensor) and result.dtype in _COMPUTED_IN:
                self.unit = max(self.unit, torch.finfo(result.dtype).eps)
        return results


def _leave(tensors: Iterable[Tensor]) -> None:
    """Move nothing."""


@torch.no_grad()
def _nudge(unit: float, seed: int, tensors: Iterable[Tensor]) -> None:
    """Move every number by a rounding unit, its tensor's own if that is coarser."""
    for index, tensor in enumerate(tensors):
        if not (tensor.is_floating_point() or tensor.is_complex()):
            continue
        generator = torch.Generator(tensor.device).manual_seed(1_000_003 * seed + index)
        signs = torch.randint(
            0, 2, tensor.shape, generator=generator, device=tensor.device
        )
        size = max(unit, torch.finfo(tensor.dtype).eps)
        tensor.mul_((1 + size * (2 * signs - 1)).to(tensor.dtype))


def _require_finite(expected: Values) -> None:
    for (kind, name), value in expected.items():
        if kind in ("loss", "gradient") and not torch.isfinite(value).all():
            raise GcpassError(
                f"eager itself gives a {kind} that is not finite ({name}): there is "
                "nothing to compare with; use inputs and weights that train"
            )


def _deviation(
    key: tuple[Kind, str],
    value: Tensor,
    errors: Mapping[tuple[Kind, str], float],
    noise: Mapping[tuple[Kind, str], float],
    sizes: Mapping[tuple[Kind, str], float],
    unit: float,
) -> Deviation:
    kind, name = key
    largest = max(size for (other, _), size in sizes.items() if other == kind)
    scale = sizes[key] or largest or 1.0
    allowed = 0.0
    if value.is_floating_point() or value.is_complex():
        fine = min(unit, FLOAT32)
        rounding = (SUM_UNITS * fine + ROUNDED_UNITS * unit) * sizes[key]
        # The last: sums that cancel to nothing, as a bias before a normalization.
        allowed = max(NOISES * noise[key], rounding, fine * largest)
    return Deviation(
        kind=kind,
        name=name,
        error=errors[key] / scale,
        noise=noise[key] / scale,
        allowed=allowed / scale,
    )


def _row(row: tuple[str, Deviation], width: int) -> str:
    label, d = row
    numbers = f"{d.error:10.1e}{d.noise:10.1e}{d.allowed:10.1e}"
    note = "" if d.judged else "  too noisy to judge"
    return f"{label:{width}}{numbers}{note if d.within else '  differs'}"


def _ratio(error: float, allowed: float) -> float:
    if error == 0:
        return 0.0
    return error / allowed if allowed else math.inf


def _distance(a: Tensor, b: Tensor) -> float:
    """Return the largest difference: 0 for equal infinities, infinite for a NaN."""
    a, b = _wide(a), _wide(b)
    if not a.numel():
        return 0.0
    same = (a == b) | (a.isnan() & b.isnan())
    distance = float(torch.where(same, 0.0, (a - b).abs()).max())
    return math.inf if math.isnan(distance) else distance


def _largest(tensor: Tensor) -> float:
    """Return the largest finite magnitude."""
    wide = _wide(tensor).abs().nan_to_num(0.0, 0.0, 0.0)
    return float(wide.max()) if wide.numel() else 0.0


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)
