"""Regions around the plan: eager mode, wrong arguments, cache identity, decisions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import gcpass
from gcpass import cli, store
from gcpass.custom_partitioner import Partitioner
from gcpass.decisions import RegionPlan
from gcpass.options import Options
from gcpass.regions import scopes_fingerprint
from gcpass.scopes import ANNOTATION, make_scope
from tests.layers import (
    LARGE,
    LAYER,
    SMALL,
    WIDE,
    Net,
    data,
    tenth_then_nine_tenths,
    train,
)
from tests.training import (
    Budget,
    compiled,
    plan,
)


def test_eager_mode_knows_no_regions() -> None:
    x = data()
    torch.manual_seed(1)
    net = Net(tenth_then_nine_tenths)
    torch.manual_seed(1)
    assert net(x).equal(Net()(x))
    with gcpass.region(policy="save"):
        assert "custom" not in torch.fx.traceback.current_meta


WRONG = [
    ({}, "either memory_budget or policy, got memory_budget=None, policy=None"),
    ({"memory_budget": 0.5, "policy": "save"}, "either memory_budget or policy"),
    ({"policy": "keep"}, "policy is 'save' or 'recompute', got 'keep'"),
    ({"policy": 1}, "policy is 'save' or 'recompute', got 1"),
    ({"memory_budget": 1.5}, "in \\(0, 1\\]"),
    ({"memory_budget": 0}, "at least 1 byte"),
    ({"memory_budget": True}, "got True"),
    ({"memory_budget": "lots"}, "got 'lots'"),
    ({"memory_budget": "min"}, "a fraction in \\(0, 1\\]"),
]


@pytest.mark.parametrize(("arguments", "says"), WRONG, ids=str)
def test_wrong_regions(arguments: dict[str, Any], says: str) -> None:
    def function(x: Tensor) -> Tensor:
        with gcpass.region(**arguments):
            return x.sin().sum()

    x = torch.randn(4, requires_grad=True)
    for call in (function, compiled(function)):
        with pytest.raises(gcpass.InvalidOptionError, match=says):
            call(x)
    with pytest.raises(gcpass.InvalidOptionError, match=says):
        gcpass.backend(regions={"layers.*": arguments})


def test_a_name_is_a_text() -> None:
    with pytest.raises(gcpass.InvalidOptionError, match="a text as name, got 3"):
        with gcpass.region(policy="save", name=3):  # type: ignore[arg-type]
            pass


@pytest.mark.parametrize(
    ("regions", "says"),
    [
        ("save", "regions: takes a dict of patterns, got 'save'"),
        ({"h.0": {"budget": 1}}, "region 'h.0': takes 'save', 'recompute', {"),
        ({"h.0": 0.5}, "region 'h.0': takes 'save', 'recompute', {"),
        ({3: "save"}, "a text as name, got 3"),
    ],
)
def test_wrong_patterns(regions: object, says: str) -> None:
    with pytest.raises(gcpass.InvalidOptionError) as caught:
        gcpass.backend(regions=regions)
    assert says in str(caught.value)


def test_a_misspelt_option_says_what_regions_takes() -> None:
    with pytest.raises(gcpass.InvalidOptionError, match="did you mean 'regions'"):
        gcpass.backend(region={"layers.*": "save"})


@pytest.mark.parametrize(
    "budgets",
    [(0.3, 0.6, 0.9), (2 * LARGE, 3 * LARGE, 4 * LARGE), ("30%", "0.6", "2KiB")],
    ids=str,
)
@pytest.mark.parametrize("where", ["argument", "attribute"])
def test_a_changed_budget_is_planned_anew(budgets: Any, where: str) -> None:
    class Chain(nn.Module):
        budget: Budget = None

        def forward(self, x: Tensor, weight: Tensor, given: Budget) -> Tensor:
            budget = self.budget if where == "attribute" else given
            with gcpass.region(memory_budget=budget):
                for _ in range(4):
                    x = torch.tanh(x @ weight)
            return x.square().mean()

    chain, weight = Chain(), torch.randn(WIDE, WIDE, requires_grad=True)
    function = compiled(chain)
    for budget in (*budgets, *budgets):
        chain.budget = budget
        function(data(), weight, budget if where == "argument" else None).backward()
    limits = [scope.limit_bytes for p in store.plans() for scope in p.scopes]
    expected = {0.3: 0.3, "30%": 0.3, 0.6: 0.6, "0.6": 0.6, 0.9: 0.9, "2KiB": 2048}
    meant = [expected.get(b, b) for b in budgets]
    whole = 4 * LARGE
    assert limits == [int(m * whole) if m < 1 else m for m in meant]


def test_the_fingerprint_knows_annotations_and_module_paths() -> None:
    def graph(path: str, text: str | None) -> fx.GraphModule:
        found = fx.Graph()
        node = found.call_function(torch.ops.aten.ones.default, ([2],))
        node.meta["nn_module_stack"] = {"1": (f"L['self'].{path}", nn.Linear)}
        node.meta["custom"] = {} if text is None else {ANNOTATION: text}
        found.output(node)
        return fx.GraphModule(nn.Module(), found)

    patterns = (make_scope("head*", None, "save"),)
    tenth, ninth = (f'["", {share}, null]' for share in (0.1, 0.9))
    prints = [
        scopes_fingerprint(graph("head", None), ()),
        scopes_fingerprint(graph("head", None), patterns),
        scopes_fingerprint(graph("head.0", None), patterns),
        scopes_fingerprint(graph("head", tenth), patterns),
        scopes_fingerprint(graph("head", ninth), patterns),
    ]
    assert prints[0] == scopes_fingerprint(graph("tail", None), patterns) == ""
    assert len(set(prints)) == len(prints)
    keys = [Partitioner(Options(), None, p).uuid() for p in prints]
    assert len(set(keys)) == len(keys)


def test_regions_need_our_backend() -> None:
    for use in (gcpass.enable, gcpass.partitioner):
        with pytest.raises(gcpass.GcpassError, match='backend="gcpass"'):
            use(regions={"layers.0": "save"})
    net = Net(tenth_then_nine_tenths)
    with gcpass.enable(), pytest.raises(Exception, match='backend="gcpass"'):
        torch.compile(net, backend="inductor")(data())


def test_decisions_say_what_became_of_regions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tenth_then_nine_tenths, dump=str(tmp_path))
    (file,) = tmp_path.iterdir()
    text = file.read_text(encoding="utf-8")
    assert RegionPlan.from_json(text) == plan()
    assert json.loads(text)["scopes"][0] == {
        "name": "",
        "requested": "10 % of the saved bytes",
        "limit_bytes": int(0.1 * 4 * LAYER),
        "fastest_saved_bytes": 4 * LAYER,
        "saved_bytes": 2 * SMALL,
    }
    assert cli.main(["show", str(file)]) == 0
    line = "scope '' (10 % of the saved bytes): saves 4096 of 4096 bytes, 40960 without"
    assert line in capsys.readouterr().out
