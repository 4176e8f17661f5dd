"""Problems and solutions as files: versioned JSON, exact in both directions.

`problem_to_json` and `solution_to_json` write what ``problem.schema.json`` and
``solution.schema.json`` describe: a kind, a version, and the fields of
`gcpass.solvers.problem` by their names. Ids are positions in the arrays. Fields at
their default are left out; floats are written so that the same float comes back; an
infinite bound (no plan exists) is null. Unknown fields are refused, because a misspelt
one would otherwise change the problem without a word.

`read_problem` reads this form and those of `gcpass.solvers.published`.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Iterable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, Final

from gcpass.solvers.errors import InvalidProblemError
from gcpass.solvers.fields import Record, is_integer, parse, shown
from gcpass.solvers.problem import (
    Operation,
    OpId,
    Origin,
    Phase,
    Plan,
    Problem,
    Solution,
    Termination,
    Value,
    ValueId,
)
from gcpass.solvers.published import (
    is_node_link,
    problem_from_flat_text,
    problem_from_node_link,
)

SCHEMA_VERSION: Final = 1
PROBLEM_KIND: Final = "gcpass.problem"
SOLUTION_KIND: Final = "gcpass.solution"

_HEAD = ("kind", "schema_version")


def read_problem(path: Path | str) -> Problem:
    """Return the problem of a file: ours, node-link JSON or flat text, by content.

    Raises:
        InvalidProblemError: the content is no problem; names file and place.
        OSError: the file cannot be read.
    """
    text = _read_text(path)
    try:
        if text.lstrip()[:1].isdigit():
            return problem_from_flat_text(text)
        data = parse(text)
        if is_node_link(data):
            return problem_from_node_link(data)
        return _problem(data)
    except InvalidProblemError as error:
        raise InvalidProblemError(f"{path}: {error}") from error


def write_problem(problem: Problem, path: Path | str) -> None:
    """Write the JSON form of a problem.

    Raises:
        InvalidProblemError: see `problem_to_json`.
        OSError: the file cannot be written.
    """
    Path(path).write_text(problem_to_json(problem), encoding="utf-8")


def read_solution(path: Path | str) -> Solution:
    """Return the solution that `write_solution` wrote.

    Raises:
        InvalidProblemError: the content is no solution; names file and place.
        OSError: the file cannot be read.
    """
    text = _read_text(path)
    try:
        return solution_from_json(text)
    except InvalidProblemError as error:
        raise InvalidProblemError(f"{path}: {error}") from error


def write_solution(solution: Solution, path: Path | str) -> None:
    """Write the JSON form of a solution.

    Raises:
        InvalidProblemError: see `solution_to_json`.
        OSError: the file cannot be written.
    """
    Path(path).write_text(solution_to_json(solution), encoding="utf-8")


def problem_to_json(problem: Problem) -> str:
    """Return the JSON form, one value and one operation a line.

    Raises:
        InvalidProblemError: a number is not finite.
    """
    return _document(
        PROBLEM_KIND,
        {
            "save_seconds_per_byte": _text(problem.save_seconds_per_byte),
            "between_bytes": _text(problem.between_bytes),
            "values": _rows(problem.values),
            "operations": _rows(problem.operations),
        },
    )


def problem_from_json(text: str) -> Problem:
    """Return the problem that `problem_to_json` wrote.

    Raises:
        InvalidProblemError: the text is no problem of this version; says where.
    """
    return _problem(parse(text))


def solution_to_json(solution: Solution) -> str:
    """Return the JSON form.

    Raises:
        InvalidProblemError: a number is not finite, other than an infinite bound.
    """
    infinite = solution.bound_seconds == math.inf
    plan = None if solution.plan is None else _fields(solution.plan)
    return _document(
        SOLUTION_KIND,
        {
            "termination": _text(solution.termination.value),
            "limit": _text(solution.limit),
            "bound_seconds": _text(None if infinite else solution.bound_seconds),
            "floor_bytes": _text(solution.floor_bytes),
            "plan": _text(plan),
        },
    )


def solution_from_json(text: str) -> Solution:
    """Return the solution that `solution_to_json` wrote.

    Whether its plan is one of a certain problem is for `gcpass.solvers.check` to say.

    Raises:
        InvalidProblemError: the text is no solution of this version; says where.
    """
    record = _record(parse(text), SOLUTION_KIND, _names(Solution))
    termination = Termination(record.choice("termination", _choices(Termination)))
    plan = None if record.get("plan") is None else _plan(record.get("plan"))
    if plan is not None and termination is Termination.INFEASIBLE:
        raise InvalidProblemError("termination: infeasible, but there is a plan")
    unbounded = record.get("bound_seconds") is None
    return Solution(
        plan=plan,
        termination=termination,
        bound_seconds=math.inf if unbounded else record.number("bound_seconds"),
        floor_bytes=record.integer("floor_bytes"),
        limit=None if record.get("limit") is None else record.text("limit"),
    )


def _problem(data: object) -> Problem:
    record = _record(data, PROBLEM_KIND, _names(Problem))
    values = tuple(
        _value(Record(item, f"values[{i}]", _names(Value)))
        for i, item in enumerate(record.array("values"))
    )
    operations = tuple(
        _operation(Record(item, f"operations[{i}]", _names(Operation)), len(values))
        for i, item in enumerate(record.array("operations"))
    )
    return Problem(
        operations=operations,
        values=values,
        save_seconds_per_byte=record.number("save_seconds_per_byte", 0.0),
        between_bytes=record.integer("between_bytes", 0),
    )


def _value(record: Record) -> Value:
    origin = record.choice("origin", _choices(Origin), Origin.COMPUTED.value)
    return Value(
        size_bytes=record.integer("size_bytes"),
        origin=Origin(origin),
        held=record.flag("held", False),
        savable=record.flag("savable", True),
    )


def _operation(record: Record, values: int) -> Operation:
    phase = record.choice("phase", _choices(Phase), Phase.FORWARD.value)
    return Operation(
        reads=_ascending(record, "reads", values),
        writes=_ascending(record, "writes", values),
        cost_seconds=record.number("cost_seconds"),
        flops=record.integer("flops", 0),
        phase=Phase(phase),
        recomputable=record.flag("recomputable", True),
        fusible=record.flag("fusible", False),
        absorbing=record.flag("absorbing", False),
        aligned=_ascending(record, "aligned", values, required=False),
        workspace_bytes=record.integer("workspace_bytes", 0),
    )


def _plan(data: object) -> Plan:
    record = Record(data, "plan", _names(Plan))
    sequence = tuple(map(OpId, record.ids("sequence", None)))
    boundary = record.integer("boundary")
    if boundary > len(sequence):
        raise InvalidProblemError(
            f"plan.boundary: {boundary} of {len(sequence)} executions"
        )
    return Plan(
        sequence=sequence,
        boundary=boundary,
        cost_seconds=record.number("cost_seconds"),
        peak_bytes=record.integer("peak_bytes"),
        origin=record.text("origin"),
    )


def _ascending(
    record: Record, name: str, count: int, *, required: bool = True
) -> tuple[ValueId, ...]:
    if not required and name not in record.data:
        return ()
    ids = record.ids(name, count)
    if any(a >= b for a, b in itertools.pairwise(ids)):
        raise InvalidProblemError(
            f"{record.place}.{name}: expected ascending ids, got {shown(ids)}"
        )
    return tuple(map(ValueId, ids))


def _record(data: object, kind: str, names: tuple[str, ...]) -> Record:
    """Return the top of a document after checking what it says that it is."""
    if not isinstance(data, dict) or data.get("kind") != kind:
        found = data.get("kind") if isinstance(data, dict) else None
        is_kind = found in (PROBLEM_KIND, SOLUTION_KIND)
        raise InvalidProblemError(
            f"this is a {found}, expected a {kind}"
            if is_kind
            else f"no {kind}: there is no kind that says so"
        )
    version = Record(data, "").get("schema_version")
    if not is_integer(version) or version != SCHEMA_VERSION:
        raise InvalidProblemError(
            f"{kind} of schema version {shown(version)}; this gcpass reads version "
            f"{SCHEMA_VERSION}: use the release that wrote it"
        )
    return Record(data, "", (*_HEAD, *names))


def _names(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))


def _choices(kind: type[Enum]) -> tuple[str, ...]:
    return tuple(str(member.value) for member in kind)


def _fields(item: Value | Operation | Plan) -> dict[str, object]:
    """Return the fields that are not at their default."""
    found: dict[str, object] = {}
    for field in dataclasses.fields(item):
        value = getattr(item, field.name)
        if field.default is dataclasses.MISSING or value != field.default:
            found[field.name] = value.value if isinstance(value, Enum) else value
    return found


def _rows(items: Iterable[Value | Operation]) -> str:
    rows = ",\n".join(f"    {_text(_fields(item))}" for item in items)
    return f"[\n{rows}\n  ]" if rows else "[]"


def _document(kind: str, texts: Mapping[str, str]) -> str:
    fields = {"kind": _text(kind), "schema_version": _text(SCHEMA_VERSION), **texts}
    lines = ",\n".join(f"  {_text(name)}: {text}" for name, text in fields.items())
    return "{\n" + lines + "\n}\n"


def _text(value: Any) -> str:
    try:
        return json.dumps(value, allow_nan=False)
    except ValueError as error:
        raise InvalidProblemError(f"no JSON form: {error}") from error


def _read_text(path: Path | str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidProblemError(f"{path}: no UTF-8 text: {error}") from error
