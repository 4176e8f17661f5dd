"""``gcpass.region`` and the option ``regions``: limits and policies for parts.

C14 (pytorch#185979): several region budgets in one graph, partial cover.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

import gcpass
from gcpass import cli, store
from gcpass.decisions import RegionPlan, ScopeDecision
from gcpass.options import Options
from gcpass.partitioner import Partitioner
from gcpass.regions import scopes_fingerprint
from gcpass.scopes import ANNOTATION, make_scope
from tests.test_cases_intent import held_bytes, selective
from tests.training import (
    Budget,
    CallCounter,
    compiled,
    difference,
    plan,
    relative,
    start_over,
)

EXACT = 2e-6  # float32, the same kernels in another order
PRODUCT = torch.ops.aten.mm.default
ROWS, NARROW, WIDE = 64, 8, 32
SMALL, LARGE = ROWS * NARROW * 4, ROWS * WIDE * 4  # bytes of a layer's two results
LAYER = SMALL + LARGE  # what the backward of a layer reads besides its input

Wrap = Callable[[int, nn.Module, Tensor], Tensor]

pytestmark = pytest.mark.filterwarnings("ignore:.*context_fn")


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDE, NARROW, bias=False)
        self.down = nn.Linear(NARROW, WIDE, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.down(torch.tanh(self.up(x))))


def plainly(index: int, layer: nn.Module, x: Tensor) -> Tensor:
    result: Tensor = layer(x)
    return result


class Net(nn.Module):
    """Eight layers, each called through `wrap`, and a head."""

    def __init__(self, wrap: Wrap = plainly) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(8))
        self.head = nn.Linear(WIDE, 4, bias=False)
        self.wrap = wrap

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = self.wrap(index, layer, x)
        return self.head(x).square().mean()


def data() -> Tensor:
    return torch.randn(ROWS, WIDE)


def train(wrap: Wrap = plainly, budget: Budget = None, **options: Any) -> int:
    """Check the gradients and return how many products the backward runs."""
    start_over()
    net, x = Net(wrap), data()
    loss = compiled(net, budget, **options)(x)
    with CallCounter(PRODUCT) as counter:
        loss.backward()
    got = [p.grad for p in net.parameters()]
    net.zero_grad()
    net(x).backward()
    for mine, parameter in zip(got, net.parameters(), strict=True):
        assert mine is not None
        assert parameter.grad is not None
        assert relative(mine, parameter.grad) < EXACT
    return counter.calls


# 17 products, each with two gradients; the first of all needs none for its input.
LEAST = 2 * 17 - 1


def scopes() -> dict[str, ScopeDecision]:
    return {scope.name: scope for scope in plan().scopes}


def saved_by_layer() -> list[int]:
    """Return the bytes saved of each layer, read from the decisions on values."""
    found = [0] * 8
    for value in plan().values:
        if value.decision == "saved" and value.module_path.startswith("layers."):
            found[int(value.module_path.split(".")[1])] += value.size_bytes
    return found


def tenth_then_nine_tenths(index: int, layer: nn.Module, x: Tensor) -> Tensor:
    with gcpass.region(memory_budget=0.1 if index < 4 else 0.9):
        result: Tensor = layer(x)
    return result


PATTERNS = {
    "layers.[0-3]": {"memory_budget": 0.1},
    "layers.[4-7]": {"memory_budget": "90%"},
}


@pytest.mark.parametrize(
    ("wrap", "regions", "budget"),
    [
        (tenth_then_nine_tenths, None, None),
        (tenth_then_nine_tenths, None, 0.7),
        (tenth_then_nine_tenths, None, "min"),
        (plainly, PATTERNS, None),
    ],
    ids=["context", "context-0.7", "context-min", "patterns"],
)
def test_c14_two_region_budgets_in_one_graph(
    wrap: Wrap, regions: dict[str, Any] | None, budget: Budget
) -> None:
    train(wrap, budget, regions=regions)
    first, second = plan().scopes
    for scope, share in ((first, 0.1), (second, 0.9)):
        assert scope.fastest_saved_bytes == 4 * LAYER
        assert scope.limit_bytes == int(share * 4 * LAYER)
    layers = saved_by_layer()
    assert first.saved_bytes == sum(layers[:4]) <= 0.1 * 4 * LAYER
    assert second.saved_bytes == sum(layers[4:]) <= 0.9 * 4 * LAYER
    if budget is None:  # as much as the limits leave: 2 small results, one large less
        assert first.saved_bytes == 2 * SMALL
        assert second.saved_bytes == 4 * LAYER - LARGE
    # The head is under no limit: without a budget what its backward reads is saved.
    outside = plan().saved_bytes - first.saved_bytes - second.saved_bytes
    assert outside == ROWS * 4 * 4 or budget is not None


def test_c14_the_allocator_holds_what_the_limits_leave() -> None:
    net, x = Net(tenth_then_nine_tenths), data()
    function = compiled(net)
    function(x).backward()
    held = held_bytes(lambda: function(x))
    limits = sum(scope.limit_bytes or 0 for scope in plan().scopes)
    head_and_loss = ROWS * 4 * 4 + 64
    assert held <= limits + head_and_loss
    assert held_bytes(lambda: net(x)) > limits + head_and_loss


def test_limits_are_used_and_a_larger_one_costs_no_more() -> None:
    before = float("inf")
    for share in (0.25, 0.6, 1.0):
        train(regions={"layers.*": {"memory_budget": share}})
        (scope,) = plan().scopes
        assert scope.limit_bytes is not None
        assert 0 <= scope.limit_bytes - scope.saved_bytes < LARGE
        assert plan().recomputations <= before
        before = plan().recomputations
    assert before == 0  # the whole of what the fastest plan saves is no limit


def test_limits_in_bytes() -> None:
    train(regions={"layers.2": {"memory_budget": SMALL}})
    assert scopes()["layers.2"].limit_bytes == SMALL
    assert saved_by_layer()[2] == SMALL
    assert sum(saved_by_layer()) == 8 * LAYER - LARGE


def test_an_output_of_the_step_does_not_count() -> None:
    def function(x: Tensor, weight: Tensor) -> Tensor:
        with gcpass.region(memory_budget=1):
            return torch.tanh(x @ weight)

    weight = torch.randn(WIDE, WIDE, requires_grad=True)
    compiled(function)(data(), weight).sum().backward()
    assert scopes()[""].saved_bytes == 0
    assert plan().recomputations == 0


# Policies.


def test_saved_regions_are_never_rebuilt() -> None:
    assert train(budget=0.6) > LEAST
    assert train(budget=0.6, regions={"*": "save"}) == LEAST
    assert plan().recomputations == 0


def test_a_saved_region_beside_a_tight_budget() -> None:
    train(budget=0.6, regions={"layers.[2-5]": "save"})
    assert saved_by_layer()[2:6] == [LAYER] * 4
    assert plan().recomputations > 0
    assert all(scopes()[f"layers.{i}"].saved_bytes == LAYER for i in (2, 3, 4, 5))
    reasons = [v.reason for v in plan().values if v.module_path.startswith("layers.3")]
    assert 'saved: region of policy "save"' in reasons


def by_name(index: int, layer: nn.Module, x: Tensor) -> Tensor:
    with gcpass.region(policy="recompute", name=f"layer {index}"):
        result: Tensor = layer(x)
    return result


def as_one(index: int, layer: nn.Module, x: Tensor) -> Tensor:
    with gcpass.region(policy="recompute"):
        result: Tensor = layer(x)
    return result


@pytest.mark.parametrize("budget", [None, 1.0], ids=str)
def test_recomputed_regions_save_what_leaves_them(budget: Budget) -> None:
    # The result of a layer leaves it: the first product of each is rebuilt.
    assert train(by_name, budget) == LEAST + 8
    assert saved_by_layer() == [LARGE] * 8
    assert len(plan().scopes) == 8


def test_a_policys_pattern_makes_a_region_of_each_module() -> None:
    assert train(regions={"layers.*": "recompute"}) == LEAST + 8
    assert saved_by_layer() == [LARGE] * 8
    assert list(scopes()) == [f"layers.{i}" for i in range(8)]


def test_regions_with_equal_arguments_are_one() -> None:
    # Only the last result leaves it.
    assert train(as_one) == LEAST + 15
    assert saved_by_layer() == [0] * 7 + [LARGE]
    reasons = {v.reason for v in plan().values if v.decision == "recomputed"}
    assert 'recomputed: a region of policy "recompute" forbids to keep it' in reasons


class Dropped(nn.Module):
    """Draws inside of a region."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDE, WIDE) for _ in range(3))
        self.arguments = arguments

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            with gcpass.region(**self.arguments):
                x = nn.functional.dropout(torch.tanh(layer(x)), 0.3)
        return x.square().mean()


DRAWN = 3 * ROWS * WIDE * (1 + 4)  # a draw writes its mask and its result at once


def test_draws_in_a_recomputed_region_are_kept() -> None:
    assert difference(Dropped(policy="recompute"), data(), steps=2) < EXACT
    assert plan().recomputations > 0
    assert scopes()[""].saved_bytes == DRAWN


def test_a_limit_below_what_must_be_saved() -> None:
    with pytest.raises(gcpass.InfeasibleRegionError) as caught:
        compiled(Dropped(memory_budget=4096, name="body"))(data())
    error = caught.value
    assert (error.region, error.budget_bytes) == ("body", 4096)
    assert error.floor_bytes == DRAWN
    assert len(error.alive) == 6
    assert isinstance(error, gcpass.InfeasibleBudgetError)
    for says in ("region 'body' may save 4096 bytes", f"={error.floor_bytes} or more"):
        assert says in str(error)
    start_over()
    net = Dropped(memory_budget=error.floor_bytes, name="body")
    assert difference(net, data()) < EXACT
    assert scopes()["body"].saved_bytes == error.floor_bytes


def test_the_least_instead_of_an_error(caplog: pytest.LogCaptureFixture) -> None:
    net = Dropped(memory_budget=4096, name="body")
    assert difference(net, data(), on_infeasible="min") < EXACT
    assert "region 'body' may save 4096 bytes" in caplog.text
    assert scopes()["body"].saved_bytes == DRAWN


# Which scope an operation is in.


def test_the_innermost_region_counts() -> None:
    def nested(index: int, layer: nn.Module, x: Tensor) -> Tensor:
        with gcpass.region(policy="recompute", name="outer"):
            if index % 2:
                return plainly(index, layer, x)
            with gcpass.region(policy="save", name="inner"):
                return plainly(index, layer, x)

    train(nested)
    assert saved_by_layer() == [LAYER, LARGE] * 4
    assert list(scopes()) == ["inner", "outer"]


def test_a_context_wins_over_patterns_and_the_first_pattern_over_later_ones() -> None:
    def third(index: int, layer: nn.Module, x: Tensor) -> Tensor:
        if index != 3:
            return plainly(index, layer, x)
        with gcpass.region(policy="save"):
            return plainly(index, layer, x)

    patterns = {"layers.[0-1]": "save", "layers.*": "recompute"}
    train(third, regions=patterns)
    assert saved_by_layer() == [LAYER, LAYER, LARGE, LAYER, *[LARGE] * 4]
    assert {"", *(f"layers.{i}" for i in range(8) if i != 3)} == set(scopes())


def test_one_operation_is_saved_inside_of_a_recomputed_module() -> None:
    train(regions={"layers.3.up": "save", "layers.3": "recompute"})
    # The small result cannot be saved after its product, which is saved instead.
    assert saved_by_layer()[3] == SMALL + LARGE
    assert plan().recomputations == 1


def test_a_pattern_that_matches_nothing_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, logger="gcpass"):
        train(regions={"layer.0": "save", "layers.0": "save"})
    assert [r.getMessage() for r in caplog.records] == [
        "regions: nothing in this graph is in a module 'layer.0'"
    ]


def with_tags(policy: str | None, tag: CheckpointPolicy) -> Wrap:
    """Return a wrap that gives all products a checkpoint tag, inside of a region."""
    context = selective(frozenset({PRODUCT}), saved=tag, other=tag)

    def wrap(index: int, layer: nn.Module, x: Tensor) -> Tensor:
        if policy is None:
            return checkpoint(layer, x, use_reentrant=False, context_fn=context)
        with gcpass.region(policy=policy):
            return checkpoint(layer, x, use_reentrant=False, context_fn=context)

    return wrap


def test_checkpoint_tags_win_over_regions() -> None:
    must_save, must_recompute = (
        with_tags("recompute", CheckpointPolicy.MUST_SAVE),
        with_tags("save", CheckpointPolicy.MUST_RECOMPUTE),
    )
    assert train(must_save, 0.6) == LEAST
    assert train(must_recompute) == LEAST + 8


def test_checkpoint_hints_give_way_to_regions() -> None:
    hint = CheckpointPolicy.PREFER_RECOMPUTE
    assert train(with_tags(None, hint)) == LEAST + 8
    assert train(with_tags("save", hint)) == LEAST


# Eager mode, errors, identity.


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


@pytest.mark.slow
@pytest.mark.inductor
def test_compile_caches_tell_regions_apart() -> None:
    """The cache keys of torch leave annotations and module paths out."""

    def run(wrap: Wrap) -> tuple[int, int]:
        start_over()
        counters.clear()
        net, x = Net(wrap), data()
        net.layers = net.layers[:1]
        torch.compile(net, backend="gcpass")(x).backward()
        got = net.layers[0].up.weight.grad
        net.zero_grad()
        net(x).backward()
        assert relative(got, net.layers[0].up.weight.grad) < 1e-4
        saved = sum(scope.saved_bytes for scope in plan().scopes)
        return counters["aot_autograd"]["autograd_cache_hit"], saved

    assert run(plainly) == (0, 0)
    hits, saved = run(by_name)
    assert hits == 0
    assert saved <= LARGE
    assert run(by_name) == (1, saved)
    assert plan().from_cache


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
