"""Decisions: what is said of each value, the JSON form and its schema, the digest."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from importlib.resources import files
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from gcpass.capture import Capture, capture
from gcpass.cost_model import Roofline
from gcpass.decisions import (
    PlannedSymbol,
    RegionPlan,
    ScopeDecision,
    ValueDecision,
    plan_digest,
)
from gcpass.describe import describe_values
from gcpass.errors import GcpassError
from gcpass.hardware import this_cpu
from gcpass.solvers.liveness import make_plan
from gcpass.solvers.problem import (
    Operation,
    OpId,
    Origin,
    Phase,
    Plan,
    Problem,
    Value,
    ValueId,
)

MIB = 2**20

VALUE = ValueDecision(
    name="mm",
    module_path="h.0.mlp",
    source="models/mlp.py:12",
    shape=(2, "s0"),
    dtype="float32",
    size_bytes=64,
    flops=128,
    cost_seconds=1e-6,
    decision="recomputed",
    reason='recomputed: "cheap"',
    recompute_positions=(7, 9),
)
REGION = RegionPlan(
    region="0/0",
    requested="60%",
    budget_bytes=3 * MIB,
    others_bytes=0,
    executions=1,
    fastest_peak_bytes=5 * MIB,
    fastest_held_bytes=4 * MIB,
    floor_bytes=MIB,
    predicted_peak_bytes=2 * MIB,
    scheduled_peak_bytes=None,
    scheduled_note="not verified",
    saved_bytes=MIB,
    held_bytes=MIB,
    overhead=0.125,
    overhead_flops=0.1,
    bound=0.1,
    gap_points=2.5,
    solver="cut",
    termination="feasible",
    limit=None,
    rounds=0,
    solve_time_s=0.25,
    verify_time_s=0.0,
    recomputations=2,
    digest="ab" * 32,
    values=(VALUE, dataclasses.replace(VALUE, name="item[1]", shape=(), dtype="")),
)


def changed(**fields: Any) -> RegionPlan:
    return dataclasses.replace(REGION, **fields)


def edited(**fields: object) -> str:
    return json.dumps({**json.loads(REGION.to_json()), **fields})


@pytest.mark.parametrize(
    "plan",
    [
        REGION,
        changed(values=()),
        changed(budget_bytes=None, scheduled_peak_bytes=7, limit="time"),
        changed(overhead=0.0, from_cache=True, requested="Größe"),
    ],
)
def test_json_round_trip(plan: RegionPlan) -> None:
    twin = RegionPlan.from_json(plan.to_json())
    assert twin == plan
    assert dataclasses.asdict(twin) == dataclasses.asdict(plan)  # times and cache too
    assert twin.to_json() == plan.to_json()
    assert pickle.loads(pickle.dumps(plan)) == plan


def test_json_keeps_the_order_of_the_fields_and_a_line_per_value() -> None:
    text = REGION.to_json()
    assert list(json.loads(text)) == [f.name for f in dataclasses.fields(RegionPlan)]
    assert text.startswith('{\n  "schema_version": 1,\n  "region": "0/0",\n')
    assert sum(line.startswith("    {") for line in text.splitlines()) == 2
    with pytest.raises(ValueError, match="not JSON compliant"):
        changed(bound=float("nan")).to_json()


def test_unknown_fields_are_ignored() -> None:
    assert RegionPlan.from_json(edited(later="x")) == REGION


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "no decisions of gcpass: Expecting"),
        ("[]", "there is no schema_version"),
        ("{}", "there is no schema_version"),
        (edited(schema_version=2), "schema version 2; this gcpass reads version 1"),
        ('{"schema_version": 1}', "region: Field required"),
        (edited(rounds="3"), "rounds: Input should be a valid integer, got '3'"),
        (edited(values=[{}]), "values.0.name: Field required"),
    ],
)
def test_other_text_is_refused(text: str, says: str) -> None:
    with pytest.raises(GcpassError) as caught:
        RegionPlan.from_json(text)
    assert says in str(caught.value)


def test_times_and_cache_do_not_tell_plans_apart() -> None:
    assert changed(solve_time_s=9.0, verify_time_s=9.0) == REGION
    assert REGION.as_cached() == REGION
    assert REGION.as_cached().from_cache
    assert REGION.as_cached().region == "0/0"
    assert REGION.as_cached("1/0").region == "1/0"
    assert changed(rounds=1) != REGION


def test_summary_is_one_line() -> None:
    assert REGION.summary() == (
        "region 0/0: requested 60% = 3.00 MiB, predicted peak 2.00 MiB, "
        "floor 1.00 MiB, overhead 12.5 % (at most 2.5 points from optimal), "
        "2 recomputations, solved in 0.2 s by cut"
    )
    verified = changed(
        budget_bytes=MIB, others_bytes=MIB, scheduled_peak_bytes=512
    ).as_cached()
    assert "= 1.00 MiB beside 1.00 MiB of others in the step, " in verified.summary()
    assert "scheduled peak 512 B" in verified.summary()
    assert verified.summary().endswith("(from the cache)")
    unlimited = changed(requested="None", budget_bytes=None)
    assert "requested None, predicted" in unlimited.summary()


# The schema file.


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    text = files("gcpass").joinpath("decisions.schema.json").read_text("utf-8")
    found: dict[str, Any] = json.loads(text)
    return found


def violations(value: object, rule: dict[str, Any], root: dict[str, Any]) -> list[str]:
    """Return how a value breaks a schema made of the few keywords that ours uses."""
    if "$ref" in rule:
        return violations(value, root["$defs"][rule["$ref"].split("/")[-1]], root)
    if "anyOf" in rule:
        found = [violations(value, option, root) for option in rule["anyOf"]]
        return [] if [] in found else found[0]
    kinds: dict[str, Any] = {
        "object": dict,
        "array": list,
        "string": str,
        "boolean": bool,
        "integer": int,
        "number": (int, float),
        "null": type(None),
    }
    right = isinstance(value, kinds[rule["type"]])
    if not right or (isinstance(value, bool) and rule["type"] != "boolean"):
        return [f"{value!r} is no {rule['type']}"]
    if value not in rule.get("enum", [value]) or value != rule.get("const", value):
        return [f"{value!r} is not allowed"]
    return list(_violations_inside(value, rule, root))


def _violations_inside(
    value: object, rule: dict[str, Any], root: dict[str, Any]
) -> Iterator[str]:
    if isinstance(value, list):
        for item in value:
            yield from violations(item, rule["items"], root)
    if isinstance(value, dict):
        yield from (f"no {n}" for n in rule["required"] if n not in value)
        for name, inner in value.items():
            yield from violations(inner, rule["properties"][name], root)


def test_json_follows_the_schema(schema: dict[str, Any]) -> None:
    assert violations(json.loads(REGION.to_json()), schema, schema) == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"schema_version": 2},
        {"rounds": 1.5},
        {"from_cache": 1},
        {"floor_bytes": True},
        {"limit": 3},
        {"values": [{}]},
        {"values": [{**dataclasses.asdict(VALUE), "decision": "kept"}]},
    ],
)
def test_the_schema_refuses(wrong: dict[str, object], schema: dict[str, Any]) -> None:
    assert violations(json.loads(edited(**wrong)), schema, schema)


@pytest.mark.parametrize(
    "kind", [RegionPlan, PlannedSymbol, ScopeDecision, ValueDecision]
)
def test_the_schema_is_that_of_the_classes(kind: type, schema: dict[str, Any]) -> None:
    rules = schema if kind is RegionPlan else schema["$defs"][kind.__name__]
    derived = TypeAdapter(kind).json_schema()["properties"]
    names = [field.name for field in dataclasses.fields(kind)]
    assert rules["required"] == list(rules["properties"]) == names
    for name, rule in rules["properties"].items():
        assert rule["description"]
        theirs = without(derived[name], "title", "default")
        assert without(rule, "description") == theirs, name


def without(rule: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in rule.items() if key not in keys}


# The digest.


def some_plan(sequence: tuple[int, ...] = (0, 1, 0), boundary: int = 2) -> Plan:
    return Plan(
        sequence=tuple(OpId(op) for op in sequence),
        boundary=boundary,
        cost_seconds=1.0,
        peak_bytes=1,
        origin="hand",
    )


def test_digest_tells_decisions_apart() -> None:
    digests = {
        plan_digest(some_plan(), ["a", "b"]),
        plan_digest(some_plan(), ["b", "a"]),
        plan_digest(some_plan(), ["ab"]),
        plan_digest(some_plan(), []),
        plan_digest(some_plan(boundary=1), ["a", "b"]),
        plan_digest(some_plan(sequence=(0, 1)), ["a", "b"]),
    }
    assert len(digests) == 6
    slower = dataclasses.replace(some_plan(), cost_seconds=2.0, origin="other")
    assert plan_digest(slower, ["a", "b"]) in digests


def test_digest_is_the_same_in_every_process() -> None:
    code = (
        "from gcpass.decisions import plan_digest; "
        "from gcpass.solvers.problem import Plan; "
        "print(plan_digest(Plan(sequence=(0, 1, 0), boundary=2, cost_seconds=1.0, "
        "peak_bytes=1, origin='hand'), ['a', 'b']))"
    )
    for seed in ("1", "2"):
        result = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        assert result.stdout.strip() == plan_digest(some_plan(), ["a", "b"])


# What is said of each value.


def hand_made() -> tuple[Capture, Plan]:
    """Return a step in which every decision occurs, and its plan.

    forward   cheap(x), draw(cheap), product(draw), hidden(product), inner(hidden),
              out(inner)
    backward  mask(x), cheap and hidden again, gradient(all, tangent)
    """
    graph = fx.Graph()
    x, tangent = graph.placeholder("x"), graph.placeholder("tangents_1")
    cheap = graph.call_function(torch.sin, (x,), name="cheap")
    draw = graph.call_function(torch.dropout, (cheap,), name="draw")
    kept = graph.call_function(tuple.__getitem__, (draw, 0), name="kept")
    product = graph.call_function(torch.mm, (kept, kept), name="product")
    hidden = graph.call_function(torch.cos, (product,), name="hidden")
    inner = graph.call_function(torch.exp, (hidden,), name="inner")
    out = graph.call_function(torch.sum, (inner,), name="out")
    mask = graph.call_function(torch.gt, (x, 0), name="mask")
    reads = (tangent, cheap, kept, product, hidden, mask)
    gradient = graph.call_function(torch.mul, reads, name="gradient")
    graph.output(([out, None], [gradient]))

    owners = [x, cheap, kept, None, product, hidden, inner, out, tangent, mask]
    owners.append(gradient)
    values = [Value(size_bytes=MIB) for _ in owners]
    values[0] = Value(size_bytes=MIB, origin=Origin.INPUT)
    values[4] = Value(size_bytes=10 * MIB)
    values[5] = Value(size_bytes=MIB, savable=False)
    values[7] = Value(size_bytes=4, held=True)
    values[8] = Value(size_bytes=4, origin=Origin.TANGENT)
    values[10] = Value(size_bytes=MIB, held=True)

    def op(reads: list[int], *writes: int, **more: Any) -> Operation:
        more.setdefault("cost_seconds", 0.003)
        return Operation(
            reads=tuple(map(ValueId, reads)), writes=tuple(map(ValueId, writes)), **more
        )

    operations = (
        op([0], 1, flops=7, cost_seconds=2e-5),
        op([1], 2, 3, recomputable=False),
        op([2], 4),
        op([4], 5),
        op([5], 6, fusible=True),
        op([6], 7, absorbing=True),
        op([0], 9, phase=Phase.EITHER),
        op([1, 2, 4, 5, 8, 9], 10, phase=Phase.BACKWARD),
    )
    problem = Problem(operations=operations, values=tuple(values))
    captured = Capture(
        graph=graph,
        problem=problem,
        op_nodes=(cheap, draw, product, hidden, inner, out, mask, gradient),
        value_nodes=tuple(owners),
        value_metas=(None,) * len(owners),
        root={n: ValueId(i) for i, n in enumerate(owners) if n is not None},
        reasons=(None, "draws random numbers", *[None] * 6),
        num_fwd_outputs=2,
    )
    sequence = tuple(OpId(i) for i in (0, 1, 2, 3, 4, 5, 6, 0, 3, 7))
    return captured, make_plan(problem, sequence, 6, "hand")


def test_every_decision_and_its_reason() -> None:
    values = describe_values(*hand_made())
    assert [(v.name, v.reason, v.recompute_positions) for v in values] == [
        ("x", "input: alive before the step and after it", ()),
        ("cheap", "recomputed: 20 us of work instead of keeping 1.00 MiB", (7,)),
        ("kept", "saved: draws random numbers", ()),
        ("draw[1]", "temporary: nothing reads it", ()),
        ("product", "saved: computing it again costs at least 300 us per MiB", ()),
        ("hidden", "recomputed: a checkpoint tag forbids to keep it", (8,)),
        ("inner", "temporary: computed inside the kernels that read it", ()),
        ("out", "output: leaves the region with the forward", ()),
        ("tangents_1", "input: arrives with the backward", ()),
        (
            "mask",
            "recomputed: only the backward reads it, so it is computed there",
            (6,),
        ),
        ("gradient", "gradient: leaves the region with the backward", ()),
    ]
    assert all(v.reason.startswith(f"{v.decision}: ") for v in values)
    assert (values[1].flops, values[1].cost_seconds) == (7, 2e-5)
    assert (values[0].flops, values[0].cost_seconds) == (0, 0.0)


def test_repeats_are_counted_and_a_plan_without_them_saves() -> None:
    captured, plan = hand_made()
    sequence = (*plan.sequence[:7], OpId(0), *plan.sequence[7:])
    twice = describe_values(captured, dataclasses.replace(plan, sequence=sequence))
    assert twice[1].reason.startswith("recomputed: 2 times 20 us of work")
    assert twice[1].recompute_positions == (7, 8)
    early = tuple(OpId(i) for i in range(8))  # the mask in the forward, nothing twice
    once = describe_values(
        captured, dataclasses.replace(plan, sequence=early, boundary=7)
    )
    assert [once[i].decision for i in (1, 5, 9)] == ["saved"] * 3
    assert [once[i].recompute_positions for i in (1, 5, 9)] == [()] * 3


@pytest.mark.parametrize(
    ("stack", "expected"),
    [
        ({"1": ("L['self']", int), "2": ("L['self'].h.0.mlp", int)}, "h.0.mlp"),
        ({"1": ("G['model'].h.0", int)}, "h.0"),
        ({"1": ("L['self']._modules['0'].lin", int)}, "0.lin"),
        ({"1": ("L['self'].layers[3]._orig_mod.lin", int)}, "layers.3.lin"),
        ({"1": ("transformer.h", int)}, "transformer.h"),
        ({"1": ("L['self']", int)}, ""),
        ({}, ""),
        (None, ""),
        ("text", ""),
    ],
)
@pytest.mark.parametrize("key", ["nn_module_stack", "fwd_nn_module_stack"])
def test_module_path(stack: object, expected: str, key: str) -> None:
    captured, plan = hand_made()
    captured.op_nodes[1].meta[key] = stack  # the item of its tuple has no meta
    values = describe_values(captured, plan)
    assert (values[2].module_path, values[3].module_path) == (expected, expected)
    assert values[1].module_path == ""


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        (["/a/train.py", "/a/models/mlp.py"], "models/mlp.py:2"),
        (["/a/train.py", torch.nn.functional.__file__], "a/train.py:1"),
        (["/a/torch_geometric/nn.py"], "torch_geometric/nn.py:1"),
        ([torch.nn.functional.__file__], "nn/functional.py:1"),
        (["C:\\work\\mlp.py"], "work/mlp.py:1"),
        (["/mlp.py"], "mlp.py:1"),
        (["<stdin>"], "<stdin>:1"),
        ([], ""),
    ],
)
def test_source_is_the_users_last_line(paths: list[str], expected: str) -> None:
    captured, plan = hand_made()
    trace = "".join(
        f'  File "{path}", line {line}, in forward\n    x = f(x)\n'
        for line, path in enumerate(paths, 1)
    )
    captured.op_nodes[0].meta["stack_trace"] = trace or None
    assert describe_values(captured, plan)[1].source == expected


def test_symbolic_sizes_are_text() -> None:
    class Symbol:
        def __str__(self) -> str:
            return "s0"

    captured, plan = hand_made()
    tensor = SimpleNamespace(shape=(Symbol(), 3), dtype=torch.bfloat16)
    captured.op_nodes[0].meta["val"] = tensor
    value = describe_values(captured, plan)[1]
    assert (value.shape, value.dtype) == (("s0", 3), "bfloat16")


def test_a_traced_graph() -> None:
    def joint(x: torch.Tensor, w: torch.Tensor, tangents_1: torch.Tensor) -> object:
        hidden = torch.mm(x, w)
        return hidden.relu(), torch.mm(x.t(), tangents_1 * (hidden > 0))

    module = make_fx(joint)(torch.ones(2, 3), torch.ones(3, 4), torch.ones(2, 4))
    captured = capture(
        module.graph,
        num_fwd_outputs=1,
        mutated=frozenset(),
        costs=Roofline(this_cpu()),
        fuses=False,
        follow_hints=False,
    )
    operations = captured.problem.operations
    order = sorted(
        (op.phase is not Phase.FORWARD, i) for i, op in enumerate(operations)
    )
    plan = make_plan(
        captured.problem,
        [OpId(i) for _, i in order],
        sum(op.phase is Phase.FORWARD for op in operations),
        "hand",
    )
    values = {v.name: v for v in describe_values(captured, plan)}
    assert {name: v.decision for name, v in values.items()} == {
        "x_1": "input",
        "w_1": "input",
        "tangents_1_1": "input",
        "mm": "saved",
        "relu": "output",
        "gt": "recomputed",
        "mul": "temporary",
        "mm_1": "gradient",
    }
    product = values["mm"]
    assert (product.shape, product.dtype, product.size_bytes) == ((2, 4), "float32", 32)
    assert product.flops == 2 * 2 * 3 * 4
