"""The ``gcpass`` command: what is installed, and what a dump says.

Torch is never imported. Exit codes: 0 all well, 1 a check failed, 2 the command line
or a file it names is wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import gcpass
from gcpass import toolchain
from gcpass.errors import GcpassError
from gcpass.units import format_bytes

_VALUES_SHOWN = 20
_SECTIONS = ("region", "budget", "plan")
_COLUMNS = ("name", "size", "decision", "reason")

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
    return parser


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
            record = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            return _complain(f"cannot read {file}: {error}")
        if not isinstance(record, dict):
            return _complain(f"{file} holds no decisions: not a JSON object")
        print(f"{file}:")
        _print_record(record)
    return 0


def _complain(problem: str) -> int:
    print(f"gcpass: {problem}", file=sys.stderr)
    return 2


def _print_record(record: Mapping[str, object]) -> None:
    for name, value in _summary(record):
        print(f"  {name}: {value}")
    values = _values(record.get("values"))
    if not values:
        return
    largest = sorted(values, key=_size_of, reverse=True)[:_VALUES_SHOWN]
    print(f"  the {len(largest)} largest of {len(values)} values:")
    _print_table([_row(value) for value in largest])


def _summary(record: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """Yield the scalar fields of a record, those of its sections as section.field."""
    for key, value in record.items():
        if key in _SECTIONS and isinstance(value, dict):
            for field, inner in value.items():
                if _is_scalar(inner):
                    yield f"{key}.{field}", _text(field, inner)
        elif _is_scalar(value):
            yield key, _text(key, value)


def _values(field: object) -> list[Mapping[str, object]]:
    """Return the values of a record, whether they are a list or an object by name."""
    if isinstance(field, dict):
        field = [{"name": k, **v} for k, v in field.items() if isinstance(v, dict)]
    if not isinstance(field, list):
        return []
    return [value for value in field if isinstance(value, dict)]


def _row(value: Mapping[str, object]) -> tuple[str, ...]:
    cells = {**value, "size": format_bytes(_size_of(value))}
    return tuple(str(cells.get(column, "")) for column in _COLUMNS)


def _size_of(value: Mapping[str, object]) -> int:
    size = value.get("size_bytes", value.get("bytes"))
    return size if isinstance(size, int) else 0


def _is_scalar(value: object) -> bool:
    return value is None or isinstance(value, bool | int | float | str)


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
