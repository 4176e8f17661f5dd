"""Instance files: exact round trips, the schemas, and a message for what is wrong."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gcpass.solvers.errors import InvalidProblemError
from gcpass.solvers.instance import (
    problem_from_json,
    problem_to_json,
    read_problem,
    read_solution,
    solution_from_json,
    solution_to_json,
    write_problem,
    write_solution,
)
from gcpass.solvers.problem import (
    MOST_BYTES,
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
from tests.problems import random_problem, transformer
from tests.schemas import fits, load

# A forward operation with a held result, and a backward one that reads a tangent.
TEXT = """{
  "schema_version": 1, "kind": "gcpass.problem",
  "values": [
    {"size_bytes": 8, "origin": "input"}, {"size_bytes": 4, "held": true},
    {"size_bytes": 0, "origin": "tangent"}, {"size_bytes": 2, "savable": false}
  ],
  "operations": [
    {"reads": [0], "writes": [1], "cost_seconds": 1, "fusible": true},
    {"reads": [1, 2], "writes": [3], "cost_seconds": 1e-7, "phase": "backward",
     "recomputable": false, "absorbing": true, "flops": 3, "workspace_bytes": 7}
  ]
}"""
PROBLEM = Problem(
    values=(
        Value(size_bytes=8, origin=Origin.INPUT),
        Value(size_bytes=4, held=True),
        Value(size_bytes=0, origin=Origin.TANGENT),
        Value(size_bytes=2, savable=False),
    ),
    operations=(
        Operation(
            reads=(ValueId(0),), writes=(ValueId(1),), cost_seconds=1.0, fusible=True
        ),
        Operation(
            reads=(ValueId(1), ValueId(2)),
            writes=(ValueId(3),),
            cost_seconds=1e-7,
            phase=Phase.BACKWARD,
            recomputable=False,
            absorbing=True,
            flops=3,
            workspace_bytes=7,
        ),
    ),
)
PLAN = Plan(
    sequence=(OpId(0), OpId(1), OpId(0)),
    boundary=1,
    cost_seconds=0.1 + 0.2,
    peak_bytes=2**62,
    origin='cut "é"',
)
SOLUTION = Solution(
    plan=PLAN,
    termination=Termination.LIMIT,
    bound_seconds=1 / 3,
    floor_bytes=7,
    limit="time",
)


def edited(text: str, edit: Callable[[Any], object]) -> str:
    document = json.loads(text)
    edit(document)
    return json.dumps(document)


def place(document: Any, path: str) -> tuple[Any, Any]:
    """Return what holds a place like "values.0.held", and the place in it."""
    *parents, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    for parent in parents:
        document = document[parent]
    return document, last


def setting(path: str, value: object) -> Callable[[Any], object]:
    def edit(document: Any) -> None:
        parent, last = place(document, path)
        parent[last] = value

    return edit


def dropping(path: str) -> Callable[[Any], object]:
    def edit(document: Any) -> None:
        parent, last = place(document, path)
        del parent[last]

    return edit


# Reading and writing.


def test_a_document_by_hand() -> None:
    problem = problem_from_json(TEXT)
    assert problem == PROBLEM
    assert isinstance(problem.operations[0].cost_seconds, float)


@pytest.mark.parametrize(
    "problem",
    [
        PROBLEM,
        Problem(operations=(), values=()),
        transformer(2, fused=True, dropout=True),
        *(random_problem(seed, 12, fused=seed % 2 == 1) for seed in range(20)),
    ],
    ids=str,
)
def test_problems_come_back(problem: Problem, tmp_path: Path) -> None:
    path = tmp_path / "problem.json"
    write_problem(problem, path)
    assert read_problem(path) == problem
    assert path.read_text() == problem_to_json(problem)
    schema = load("gcpass.solvers", "problem.schema.json")
    assert fits(json.loads(path.read_text()), schema, schema)


@given(
    cost=st.floats(0, allow_nan=False, allow_infinity=False),
    size=st.integers(0, MOST_BYTES),
)
def test_numbers_come_back_exactly(cost: float, size: int) -> None:
    operation = Operation(reads=(), writes=(ValueId(0),), cost_seconds=cost)
    problem = Problem(operations=(operation,), values=(Value(size_bytes=size),))
    twin = problem_from_json(problem_to_json(problem))
    assert twin.operations[0].cost_seconds.hex() == cost.hex()
    assert twin.values[0].size_bytes == size


def test_defaults_are_not_written_and_each_item_has_a_line() -> None:
    lines = problem_to_json(PROBLEM).splitlines()
    assert '    {"size_bytes": 2, "savable": false}' in lines
    assert '    {"size_bytes": 8, "origin": "input"},' in lines


@pytest.mark.parametrize(
    "solution",
    [
        SOLUTION,
        dataclasses.replace(SOLUTION, termination=Termination.OPTIMAL, limit=None),
        Solution(
            plan=None,
            termination=Termination.INFEASIBLE,
            bound_seconds=math.inf,
            floor_bytes=0,
        ),
    ],
    ids=lambda s: s.termination.value,
)
def test_solutions_come_back(solution: Solution, tmp_path: Path) -> None:
    path = tmp_path / "solution.json"
    write_solution(solution, path)
    assert read_solution(path) == solution
    assert solution_to_json(read_solution(path)) == path.read_text()
    schema = load("gcpass.solvers", "solution.schema.json")
    assert fits(json.loads(path.read_text()), schema, schema)


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_numbers_without_a_json_form_are_not_written(wrong: float) -> None:
    problem = dataclasses.replace(PROBLEM, save_seconds_per_byte=wrong)
    with pytest.raises(InvalidProblemError, match="not JSON compliant"):
        problem_to_json(problem)
    plan = dataclasses.replace(PLAN, cost_seconds=wrong)
    with pytest.raises(InvalidProblemError, match="not JSON compliant"):
        solution_to_json(dataclasses.replace(SOLUTION, plan=plan))


# What is wrong: by the schema as well, or only in relation to other parts.

ILL_TYPED = [
    (setting("kind", "gcpass.solution"), "this is a gcpass.solution, expected a"),
    (setting("kind", ["problem"]), "there is no kind"),
    (dropping("kind"), "there is no kind"),
    (setting("schema_version", 2), "schema version 2; this gcpass reads version 1"),
    (setting("schema_version", True), "schema version True"),
    (dropping("schema_version"), "schema_version: missing"),
    (dropping("values"), "values: missing"),
    (setting("values", {}), "values: expected an array, got {}"),
    (setting("values.1", 4), "values[1]: expected an object, got 4"),
    (dropping("values.1.size_bytes"), "values[1].size_bytes: missing"),
    (setting("values.1.size_bytes", -1), "values[1].size_bytes: expected an integer"),
    (setting("values.1.size_bytes", 4.0), "an integer >= 0, got 4.0"),
    (setting("values.1.size_bytes", True), "an integer >= 0, got True"),
    (setting("values.1.held", 1), "values[1].held: expected true or false, got 1"),
    (setting("values.1.origin", "output"), "one of computed, input, tangent"),
    (setting("values.1.origin", []), "one of computed, input, tangent"),
    (setting("values.1.sise", 3), "values[1].sise: unknown field; there are size_"),
    (dropping("operations.0.cost_seconds"), "operations[0].cost_seconds: missing"),
    (setting("operations.0.cost_seconds", "1"), "a finite number >= 0, got '1'"),
    (setting("operations.0.cost_seconds", -0.5), "a finite number >= 0, got -0.5"),
    (setting("operations.0.phase", "loss"), "one of forward, either, backward"),
    (setting("operations.0.phase", None), "one of forward, either, backward"),
    (dropping("operations.0.reads"), "operations[0].reads: missing"),
    (setting("operations.0.reads", 0), "operations[0].reads: expected an array"),
    (setting("operations.0.reads", [0.0]), "operations[0].reads[0]: expected an id"),
    (setting("operations.0.reads", [-1]), "operations[0].reads[0]: expected an id"),
    (setting("operations.1.flops", None), "operations[1].flops: expected an integer"),
    (setting("between_bytes", 0.5), "between_bytes: expected an integer >= 0"),
    (setting("save_seconds_per_byte", False), "save_seconds_per_byte: expected a fin"),
]
INCONSISTENT = [
    (setting("operations.0.reads", [4]), "reads[0]: expected an id in [0, 4), got 4"),
    (setting("operations.1.reads", [2, 1]), "operations[1].reads: expected ascending"),
    (setting("operations.1.reads", [1, 1]), "operations[1].reads: expected ascending"),
    (setting("operations.0.cost_seconds", 10**400), "a finite number >= 0, got 1000"),
    # A cycle: 0 reads what 1 writes and the other way round.
    (setting("operations.0.reads", [0, 3]), "0 reads value 3 before it is written"),
    (setting("operations.0.reads", [1]), "reads value 1 before it is written"),
    (setting("operations.1.writes", [1, 3]), "value 1 has a second writer"),
    (setting("operations.0.writes", []), "reads value 1 before it is written"),
    (setting("operations.1.writes", []), "value 3 is computed by no operation"),
    (setting("operations.1.phase", "either"), "reads tangent 2 but is not backward"),
]


def refusal(text: str) -> str:
    with pytest.raises(InvalidProblemError) as caught:
        problem_from_json(text)
    return str(caught.value)


@pytest.mark.parametrize(("edit", "says"), ILL_TYPED, ids=[s for _, s in ILL_TYPED])
def test_reader_and_schema_refuse(edit: Callable[[Any], object], says: str) -> None:
    text = edited(TEXT, edit)
    assert says in refusal(text)
    schema = load("gcpass.solvers", "problem.schema.json")
    assert not fits(json.loads(text), schema, schema)


@pytest.mark.parametrize(
    ("edit", "says"), INCONSISTENT, ids=[s for _, s in INCONSISTENT]
)
def test_the_reader_alone_refuses(edit: Callable[[Any], object], says: str) -> None:
    assert says in refusal(edited(TEXT, edit))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "nan",
        "[" * 100_000,
        TEXT.replace("1e-7", "NaN"),
        TEXT.replace("1e-7", "-Infinity"),
        TEXT.replace("8", "9" * 5000),
    ],
    ids=["empty", "open", "word", "deep", "nan", "infinity", "long"],
)
def test_what_is_no_json(text: str) -> None:
    assert refusal(text).startswith("no JSON: ")


def test_a_number_too_large_for_a_float() -> None:
    assert "a finite number >= 0, got inf" in refusal(TEXT.replace("1e-7", "1e999"))


@pytest.mark.parametrize("text", ["null", "[]", "3", '"text"', "{}", '{"rounds": 1}'])
def test_json_that_is_no_problem(text: str) -> None:
    assert "no gcpass.problem: there is no kind" in refusal(text)


WRONG_SOLUTIONS = [
    (setting("kind", "gcpass.problem"), "this is a gcpass.problem, expected a"),
    (setting("schema_version", 0), "schema version 0"),
    (setting("termination", "done"), "one of optimal, feasible, limit, infeasible"),
    (dropping("termination"), "termination: missing"),
    (dropping("plan"), "plan: missing"),
    (dropping("limit"), "limit: missing"),
    (setting("limit", 3), "limit: expected text, got 3"),
    (setting("bound_seconds", "inf"), "bound_seconds: expected a finite number"),
    (dropping("bound_seconds"), "bound_seconds: missing"),
    (setting("floor_bytes", None), "floor_bytes: expected an integer"),
    (setting("plan", []), "plan: expected an object, got []"),
    (setting("plan.sequence", [0, -1]), "plan.sequence[1]: expected an id >= 0"),
    (dropping("plan.boundary"), "plan.boundary: missing"),
    (setting("plan.origin", None), "plan.origin: expected text, got None"),
    (setting("plan.cost", 1), "plan.cost: unknown field"),
]


@pytest.mark.parametrize(
    ("edit", "says"), WRONG_SOLUTIONS, ids=[s for _, s in WRONG_SOLUTIONS]
)
def test_wrong_solutions(edit: Callable[[Any], object], says: str) -> None:
    text = edited(solution_to_json(SOLUTION), edit)
    with pytest.raises(InvalidProblemError) as caught:
        solution_from_json(text)
    assert says in str(caught.value)
    schema = load("gcpass.solvers", "solution.schema.json")
    assert not fits(json.loads(text), schema, schema)


def test_solutions_that_contradict_themselves() -> None:
    for edit, says in [
        (setting("plan.boundary", 4), "plan.boundary: 4 of 3 executions"),
        (setting("termination", "infeasible"), "infeasible, but there is a plan"),
    ]:
        with pytest.raises(InvalidProblemError, match=says):
            solution_from_json(edited(solution_to_json(SOLUTION), edit))


# Files.


def test_errors_name_the_file(tmp_path: Path) -> None:
    path = tmp_path / "instance.json"
    path.write_bytes(b'{"kind": "\xff"}')
    for read in (read_problem, read_solution):
        with pytest.raises(InvalidProblemError, match=r"instance\.json: no UTF-8"):
            read(path)
    path.write_text("{}")
    for read in (read_problem, read_solution):
        with pytest.raises(InvalidProblemError, match=r"instance\.json: no gcpass"):
            read(path)
    with pytest.raises(FileNotFoundError):
        read_problem(tmp_path / "missing.json")


def test_a_byte_order_mark_does_not_count(tmp_path: Path) -> None:
    path = tmp_path / "instance.json"
    path.write_text(TEXT, encoding="utf-8-sig")
    assert read_problem(str(path)) == PROBLEM


# The schema files.


@pytest.mark.parametrize(
    ("kind", "name", "place"),
    [
        (Problem, "problem", None),
        (Value, "problem", "value"),
        (Operation, "problem", "operation"),
        (Solution, "solution", None),
        (Plan, "solution", "plan"),
    ],
)
def test_the_schema_is_that_of_the_classes(
    kind: Any, name: str, place: str | None
) -> None:
    schema = load("gcpass.solvers", f"{name}.schema.json")
    rules = schema["$defs"][place] if place else schema
    properties = dict(rules["properties"])
    for head in ("kind", "schema_version") if place is None else ():
        assert head in rules["required"]
        del properties[head]
    fields = dataclasses.fields(kind)
    assert properties.keys() == {field.name for field in fields}
    assert all(rule["description"] for rule in properties.values())
    for field in fields:
        default = field.default
        if default is dataclasses.MISSING or kind is Solution:
            assert field.name in rules["required"]
            continue
        plain = default.value if isinstance(default, Enum) else default
        plain = list(plain) if isinstance(plain, tuple) else plain
        assert field.name not in rules["required"]
        assert properties[field.name]["default"] == plain
        if isinstance(default, Enum):
            choices = [member.value for member in type(default)]
            assert properties[field.name]["enum"] == choices
