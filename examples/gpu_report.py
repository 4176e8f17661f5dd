"""What gpu_check.py measured: rows, what they are judged by, the tables.

A row of gcpass breaks a promise if

- the step's peak is over the budget: in bytes that were asked of the allocator at all,
  in bytes that it gave by more than `ROUNDING` (it may leave the end of a large block
  unused, which no plan knows);
- its gradients are further from the reference than `TOLERANCE` times the yardstick, the
  larger error of inductor and of eager in the model's own dtypes: all gradients
  together, or the worst one of a single parameter;
- it failed with anything but `InfeasibleBudgetError`.

Rows of torch are judged by nobody.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

import torch

ROUNDING = 0.01  # share of the budget; up to 1 MiB of each large block
TOLERANCE = 2.0  # errors of one model in several ways of rounding are well within
LEAST_ERROR = 1e-5  # below it, float32 sums in another order are all there is
YARDSTICKS = ("inductor", "eager")
BASE = "inductor"  # what times are relative to
PACKAGES = ("torch", "gcpass", "ortools", "numba", "triton")

Status = Literal["measured", "infeasible", "failed", "skipped"]


@dataclass(slots=True, kw_only=True)
class Row:
    """One way of training one model.

    Attributes:
        model: its name.
        name: of the way: "gcpass@0.5".
        status: "infeasible" is gcpass's documented error, "skipped" for lack of time.
        message: why nothing was measured.
        notes: what is odd about the row, but breaks no promise.
        warnings: first lines of what was warned of meanwhile.
        broken: the promises of gcpass that it broke.
        budget_bytes: the limit of the step's peak, None without one.
        scheduled_bytes: the peak that gcpass announced, None if unknown.
        peak_bytes: the most that the allocator gave beyond what it had given before.
        requested_bytes: the same before its rounding; the same number on a CPU.
        error: of all gradients together: norm of the difference / norm.
        worst_error: the largest error of one parameter's gradient.
        worst_name: that parameter.
        loss: of the measured step.
        first_step_s: wall time with compilation.
        step_s: time of a later step, for estimates.
        row_s: wall time of everything but the timed rounds.
        overhead: predicted by gcpass, against its own fastest plan.
        recomputations: in gcpass's plan.
        solve_s: seconds that gcpass spent on plans.
        verify_s: seconds that gcpass spent on reading generated programs.
        programs_read: how many.
        from_cache: whether a compile cache answered instead of the planner.
        seconds: of every timed round: by CUDA events, or CPU time of the process.
        ratio: median over the rounds of the time against inductor's in the same round.
    """

    model: str
    name: str
    status: Status = "skipped"
    message: str = ""
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    budget_bytes: int | None = None
    scheduled_bytes: int | None = None
    peak_bytes: int | None = None
    requested_bytes: int | None = None
    error: float | None = None
    worst_error: float | None = None
    worst_name: str = ""
    loss: float | None = None
    first_step_s: float | None = None
    step_s: float | None = None
    row_s: float = 0.0
    overhead: float | None = None
    recomputations: int | None = None
    solve_s: float | None = None
    verify_s: float | None = None
    programs_read: int | None = None
    from_cache: bool = False
    seconds: list[float] = field(default_factory=list)
    ratio: float | None = None

    @property
    def kind(self) -> str:
        """The name without its budget."""
        return self.name.partition("@")[0]

    @property
    def is_ours(self) -> bool:
        """Whether gcpass answers for it."""
        return self.kind == "gcpass"

    @property
    def work(self) -> str:
        """What takes its time: nothing much ("eager"), compiling, or planning too."""
        return self.kind if self.kind in ("eager", "gcpass") else "compiled"


def judge(rows: Sequence[Row]) -> int:
    """Return the exit status and note what each row broke.

    Args:
        rows: of one model, yardsticks among them.
    """
    ours = [row for row in rows if row.is_ours]
    for row in ours:
        row.broken = broken_promises(row, rows)
    return int(any(row.broken for row in ours))


def broken_promises(row: Row, rows: Sequence[Row]) -> list[str]:
    """Return in words what a row of gcpass broke, among the rows of its model."""
    if row.status == "failed":
        return ["failed"]
    if row.status != "measured":
        return []
    return [*over_budget(row), *wrong_gradients(row, rows)]


def over_budget(row: Row) -> list[str]:
    """Return in words by how much the peak is over the budget."""
    assert row.peak_bytes is not None
    assert row.requested_bytes is not None
    if row.budget_bytes is None:
        return []
    over = row.requested_bytes > row.budget_bytes
    if not over and row.peak_bytes <= (1 + ROUNDING) * row.budget_bytes:
        return []
    return [f"peak is {100 * row.peak_bytes / row.budget_bytes:.1f} % of the budget"]


def wrong_gradients(row: Row, rows: Sequence[Row]) -> list[str]:
    """Return in words how far the gradients are beyond the tolerance."""
    known = [r for r in rows if r.name in YARDSTICKS and r.status == "measured"]
    if not known:
        return ["no yardstick: neither inductor nor eager was measured"]
    found = []
    for what, own, theirs in (
        ("gradients", row.error, [r.error for r in known]),
        (row.worst_name, row.worst_error, [r.worst_error for r in known]),
    ):
        allowed = TOLERANCE * max(LEAST_ERROR, *(e for e in theirs if e is not None))
        if own is None or not own <= allowed:  # not so where it is NaN
            found.append(f"{what} off by {own:.1e}, allowed {allowed:.1e}")
    return found


def set_ratios(rows: Sequence[Row]) -> None:
    """Set the time ratios of the rows of one model, where inductor was timed."""
    base = next((row.seconds for row in rows if row.name == BASE), [])
    for row in rows:
        turns = list(zip(row.seconds, base, strict=False))
        row.ratio = statistics.median(a / b for a, b in turns) if turns else None


def print_table(rows: Sequence[Row]) -> None:
    """Print the rows of one model, and below what needs words."""
    base = next((r.error for r in rows if r.name == BASE), None)
    print(
        f"{'':14}{'budget':>10}{'scheduled':>11}{'peak':>10}{'gradients':>11}"
        f"{'/ind.':>7}{'worst':>9}{'ms':>9}{'/ind.':>7}{'plan s':>8}{'1st step s':>12}"
    )
    for row in rows:
        if row.status != "measured":
            print(f"{row.name:14}{row.status}")
            continue
        ratio = row.error / base if row.error is not None and base else None
        median = statistics.median(row.seconds) * 1e3 if row.seconds else None
        planning = (row.solve_s or 0.0) + (row.verify_s or 0.0) if row.is_ours else None
        print(
            f"{row.name:14}{size(row.budget_bytes):>10}{size(row.scheduled_bytes):>11}"
            f"{size(row.peak_bytes):>10}{number(row.error, '.1e'):>11}"
            f"{number(ratio, '.2f'):>7}{number(row.worst_error, '.1e'):>9}"
            f"{number(median, '.1f'):>9}{number(row.ratio, '.2f'):>7}"
            f"{number(planning, '.1f'):>8}{number(row.first_step_s, '.1f'):>12}"
        )
    for row in rows:
        for text in remarks(row):
            print(f"  {row.name}: {text}")


def remarks(row: Row) -> list[str]:
    """Return what is to be said about a row besides its figures."""
    found = [f"{row.status}: {row.message}"] if row.status != "measured" else []
    return found + row.notes + [f"BROKEN PROMISE: {text}" for text in row.broken]


def size(size_bytes: int | None) -> str:
    """Return MB (1e6 bytes), "-" for None."""
    return number(None if size_bytes is None else size_bytes / 1e6, ".2f")


def number(value: float | None, form: str) -> str:
    """Return a number in words, "-" for None."""
    return "-" if value is None else format(value, form)


def first_line(message: object) -> str:
    """Return the first line of a message, at most 300 characters."""
    return (str(message).splitlines() or [""])[0][:300]


def described(error: Exception) -> str:
    """Return the name of an error and the first line of its message."""
    return f"{type(error).__name__}: {first_line(error)}"


def write_json(path: Path, rows: Sequence[Row], **about: object) -> None:
    """Write all rows, the installed versions, and what else is known of the run."""
    content = {
        "versions": {name: installed(name) for name in PACKAGES},
        "cuda": torch.version.cuda,
        **about,
        "rows": [dataclasses.asdict(row) for row in rows],
    }
    path.write_text(json.dumps(content, indent=1, default=str) + "\n")


def installed(name: str) -> str | None:
    """Return the version of a package, None without one."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None
