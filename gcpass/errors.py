"""Errors that gcpass raises on purpose; every one of them is a `GcpassError`.

Fields hold the data, the message says what happened, what was given and what to do.
Errors cross process borders (compile workers, data parallel ranks), so all of them
can be pickled.
"""

from __future__ import annotations

import copyreg
from collections.abc import Sequence

from gcpass.solvers.errors import GcpassError, InvalidProblemError, SolverError
from gcpass.units import format_bytes

__all__ = [
    "GcpassError",
    "GradientMismatchError",
    "InfeasibleBudgetError",
    "InfeasibleRegionError",
    "InvalidOptionError",
    "InvalidProblemError",
    "MissingCompilerError",
    "SolverError",
    "UnsupportedGraphError",
    "UnsupportedTorchError",
]

_OPERATIONS_SHOWN = 8  # a message is read by a person; the field has all of them


class _FieldsError(GcpassError):
    """An error whose constructor takes its fields and builds the message."""

    def __reduce__(self) -> tuple[object, ...]:
        # Exception's own would call the constructor with the message alone.
        rebuild = copyreg.__newobj__  # type: ignore[attr-defined]
        return rebuild, (type(self), *self.args), self.__dict__


class InfeasibleBudgetError(_FieldsError):
    """No plan within the budget exists, as far as gcpass can build plans.

    Attributes:
        budget_bytes: the budget that was asked for.
        floor_bytes: the least peak that gcpass reaches, `held_bytes` included.
        alive: names of the largest values alive at the floor's peak, largest first.
        held_bytes: bytes that other regions of the same step hold meanwhile.
        executions: of regions in a step, which share the budget.
    """

    def __init__(
        self,
        *,
        budget_bytes: int,
        floor_bytes: int,
        alive: Sequence[str] = (),
        held_bytes: int = 0,
        executions: int = 1,
    ) -> None:
        self.budget_bytes = budget_bytes
        self.floor_bytes = floor_bytes
        self.alive = tuple(alive)
        self.held_bytes = held_bytes
        self.executions = executions
        parts = [
            f"memory_budget {_exact(budget_bytes)} is below the floor, the least peak "
            f"that gcpass reaches here: {_exact(floor_bytes)}."
        ]
        if held_bytes:
            parts.append(
                f"Other regions of the same step hold {_exact(held_bytes)} of it."
            )
        if executions > 1:
            parts.append(f"A step runs {executions} regions, which share it.")
        if self.alive:
            parts.append(f"Alive at the floor's peak: {', '.join(self.alive)}.")
        parts.append(
            f"Ask for memory_budget={floor_bytes} or more, or take the floor with "
            'on_infeasible="min".'
        )
        super().__init__(" ".join(parts))


class InfeasibleRegionError(InfeasibleBudgetError):
    """What a region must save is more than its limit (`gcpass.region`).

    Attributes:
        region: its name or pattern, "" without one.
        budget_bytes: the limit on its saved bytes.
        floor_bytes: the least bytes that it must save.
        alive: names of the values that it saves then, in graph order.
    """

    def __init__(
        self,
        *,
        region: str,
        budget_bytes: int,
        floor_bytes: int,
        alive: Sequence[str] = (),
    ) -> None:
        super().__init__(
            budget_bytes=budget_bytes, floor_bytes=floor_bytes, alive=alive
        )
        self.region = region
        shown = ", ".join(self.alive[:_OPERATIONS_SHOWN])
        self.args = (
            f"region {region!r} may save {_exact(budget_bytes)} for the backward and "
            f"must save at least {_exact(floor_bytes)} ({shown}), which cannot be "
            f"recomputed. Give it memory_budget={floor_bytes} or more, or take the "
            'least with on_infeasible="min".',
        )


class GradientMismatchError(_FieldsError):
    """A compiled region does not compute what eager does (``check_gradients=True``).

    Attributes:
        mismatches: (name, relative error, what rounding explains of it) of every
            output, gradient or written input that is off, the worst first.
    """

    def __init__(
        self, summary: str, *, mismatches: Sequence[tuple[str, float, float]]
    ) -> None:
        self.mismatches = tuple(mismatches)
        super().__init__(
            f"the first step of this region is not eager's: {summary}\nPlease report "
            'it; compile this region with backend="inductor" meanwhile, and look '
            'whether codegen="eager" agrees.'
        )


class UnsupportedGraphError(_FieldsError):
    """The graph cannot be split into a forward and a backward.

    Attributes:
        operations: names of the operations that prevent it, in graph order.
    """

    def __init__(self, reason: str, *, operations: Sequence[str] = ()) -> None:
        self.operations = tuple(operations)
        shown = ", ".join(self.operations[:_OPERATIONS_SHOWN])
        more = len(self.operations) - _OPERATIONS_SHOWN
        parts = [f"gcpass cannot split this graph: {reason}."]
        if shown:
            parts.append(f"Operations: {shown}{f' and {more} more' * (more > 0)}.")
        parts.append(
            "Move them out of the compiled region (torch.compiler.disable), or compile "
            'this region with backend="inductor".'
        )
        super().__init__(" ".join(parts))


class InvalidOptionError(_FieldsError, ValueError):
    """An option has an unknown name or a value that it does not take.

    Attributes:
        option: the option's name as it was given.
    """

    def __init__(self, message: str, *, option: str) -> None:
        self.option = option
        super().__init__(message)


class UnsupportedTorchError(GcpassError):
    """The installed torch is missing, or does not fit what gcpass was read on."""


class MissingCompilerError(_FieldsError):
    """Inductor's CPU code cannot be built: something of the C++ toolchain is missing.

    Attributes:
        missing: what is missing ("C++ compiler" or "Python headers").
        searched: the commands or files that were looked for.
    """

    def __init__(self, *, missing: str, searched: Sequence[str], install: str) -> None:
        self.missing = missing
        self.searched = tuple(searched)
        super().__init__(
            f"no {missing} found (looked for {', '.join(self.searched)}), and Inductor "
            f"builds its CPU code with it. Install it: {install}"
        )


def _exact(size_bytes: int) -> str:
    return f"{size_bytes} bytes ({format_bytes(size_bytes)})"
