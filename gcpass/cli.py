"""The ``gcpass`` command: what is installed, what a dump says, plans for instances.

Torch is never imported. Exit codes: 0 all well, 1 a check failed or no plan was found,
2 the command line or a file it names is wrong.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import gcpass
from gcpass import toolchain
from gcpass.decisions import PlannedSymbol, RegionPlan, ValueDecision
from gcpass.errors import GcpassError
from gcpass.units import format_bytes

_VALUES_SHOWN = 20
_COLUMNS = ("name", "size", "decision", "where", "reason")

_CHECKS: tuple[tuple[str, Callable[[], str]], ...] = (
    ("torch", toolchain.require_torch),
    ("C++ compiler", toolchain.require_cpp_compiler),
    ("Python headers", toolchain.require_python_headers),
    ("ortools", toolchain.require_ortools),
    ("entry point", toolchain.require_entry_point),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    parsed = _parser().parse_args(arguments)
    try:
        if parsed.command == "doctor":
            return _doctor()
        if parsed.command == "solve":
            from gcpass import solve_command  # numpy and all solvers: only here

            return solve_command.run(parsed)
        return _show(parsed.path)
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        sys.stderr.close()
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gcpass", description="Train a model within a byte budget for peak memory."
    )
    version = f"gcpass {gcpass.__version__}"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("doctor", help="check what gcpass needs from this machine")
    show = commands.add_parser("show", help="print the decisions of a dump")
    show.add_argument("path", type=Path, help="a decisions file, or a folder of them")
    _add_solve(commands.add_parser("solve", help="plan an instance within a budget"))
    return parser


def _add_solve(solve: argparse.ArgumentParser) -> None:
    solve.add_argument(
        "path", type=Path, help="a problem in JSON, a node-link graph or flat text"
    )
    solve.add_argument(
        "--budget",
        required=True,
        help="of the peak: bytes (12GiB, 4096), a fraction of the given order's peak "
        "(0.8, 80%%) or min, the floor",
    )
    solve.add_argument(
        "--time-limit",
        type=_seconds,
        default=10.0,
        metavar="SECONDS",
        help="for solving, 0: construct only (default: 10); classics have no limit",
    )
    solve.add_argument(
        "--method", default="auto", help="auto (default) or the name of a classic"
    )
    solve.add_argument("--json", action="store_true", help="print one JSON object")
    solve.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="write the solution as JSON"
    )


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0.0 <= seconds < math.inf:
        raise argparse.ArgumentTypeError(f"takes finite seconds >= 0, got {text!r}")
    return seconds


def _doctor() -> int:
    failed = 0
    for name, check in _CHECKS:
        try:
            print(f"ok      {name}: {check()}")
        except GcpassError as error:
            failed += 1
            print(f"FAILED  {name}: {error}")
    return 1 if failed else 0


def _show(path: Path) -> int:
    files = sorted(path.glob("*.json")) if path.is_dir() else [path]
    if not files:
        return _complain(f"{path} holds no .json file")
    for file in files:
        try:
            plan = RegionPlan.from_json(file.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, GcpassError) as error:
            return _complain(f"cannot read {file}: {error}")
        print(f"{file}:")
        _print_plan(plan)
    return 0


def _complain(problem: str) -> int:
    print(f"gcpass: {problem}", file=sys.stderr)
    return 2


def _print_plan(plan: RegionPlan) -> None:
    for field in dataclasses.fields(plan):
        if field.name not in ("symbols", "scopes", "values"):
            print(f"  {field.name}: {_text(field.name, getattr(plan, field.name))}")
    for symbol in plan.symbols:
        print(f"  symbol {_symbol_text(symbol)}")
    for scope in plan.scopes:
        limit = "" if scope.limit_bytes is None else f" of {scope.limit_bytes}"
        print(
            f"  scope {scope.name!r} ({scope.requested}): saves {scope.saved_bytes}"
            f"{limit} bytes, {scope.fastest_saved_bytes} without regions"
        )
    decided = [value for value in plan.values if value.decision != "input"]
    if not decided:
        return
    largest = sorted(decided, key=lambda value: -value.size_bytes)[:_VALUES_SHOWN]
    print(f"  the {len(largest)} largest of {len(decided)} values:")
    _print_table([_row(value) for value in largest])


def _symbol_text(symbol: PlannedSymbol) -> str:
    parts = [f"{symbol.name}: planned for {symbol.planned}"]
    if symbol.source:
        parts.append(f"from {symbol.source}")
    if symbol.least is not None:
        parts.append(f"at least {symbol.least}")
    if symbol.most is not None:
        parts.append(f"at most {symbol.most}")
    if symbol.largest is not None:
        parts.append(f"within the budget up to {symbol.largest}")
    return ", ".join(parts)


def _row(value: ValueDecision) -> tuple[str, ...]:
    where = value.module_path or value.source
    size = format_bytes(value.size_bytes)
    return value.name, size, value.decision, where, value.reason


def _text(name: str, value: object) -> str:
    if name.endswith("bytes") and isinstance(value, int):
        return f"{value} ({format_bytes(value)})"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _print_table(rows: Sequence[tuple[str, ...]]) -> None:
    """Print with rich on a terminal that has it, in plain columns elsewhere."""
    if sys.stdout.isatty():
        try:
            return _print_rich_table(rows)
        except ImportError:  # the extra "report" is not installed
            pass
    table = [_COLUMNS, *rows]
    widths = [max(len(row[i]) for row in table) for i in range(len(_COLUMNS))]
    for row in table:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print("  " + "  ".join(cells).rstrip())


def _print_rich_table(rows: Sequence[tuple[str, ...]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(*_COLUMNS)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))  # Text: names may hold [brackets]
    Console().print(table)
