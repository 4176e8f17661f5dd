"""What the user gets wrong, or the machine lacks: an error that says what to do.

Each error reaches the user as itself, from ``torch.compile`` (at the model's first
call) as well as from ``gcpass.backend`` (at once), and leaves nothing behind.
"""

from __future__ import annotations

import builtins
import logging
import sys
from collections.abc import Callable
from importlib import metadata
from typing import Any

import pytest
import torch
from torch import fx

import gcpass
from gcpass import partition, store
from gcpass.capture import output_nodes
from gcpass.solvers import cut
from tests.nets import Mlp
from tests.training import compiled, gradients, plan, relative

Way = Callable[[dict[str, Any]], object]


def by_torch_compile(options: dict[str, Any]) -> object:
    options = {"codegen": "eager", **options}
    return torch.compile(Mlp(), backend="gcpass", options=options)(torch.ones(4, 16))


def by_object(options: dict[str, Any]) -> object:
    return gcpass.backend(**options)


def by_enable(options: dict[str, Any]) -> object:
    return gcpass.enable(**options)


WAYS = [by_torch_compile, by_object, by_enable]


@pytest.fixture(params=WAYS, ids=lambda way: way.__name__)
def way(request: pytest.FixtureRequest) -> Way:
    found: Way = request.param
    return found


def trains(budget: int | str | None = None) -> None:
    """Train a step, with the gradients of eager."""
    model, x = Mlp(), torch.randn(64, 16)
    compiled(model, budget)(x).backward()
    got = gradients(model)
    model.zero_grad()
    model(x).backward()
    assert relative(got, gradients(model)) < 2e-6


# --- options --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        (-1, "must be at least 1 byte"),
        (0, "must be at least 1 byte"),
        (-0.5, r"must be in \(0, 1\]"),
        (0.0, r"must be in \(0, 1\]"),
        (1.5, "for bytes use an int"),
        ("12 potatoes", "has no unit 'potatoes'"),
        (float("nan"), r"must be in \(0, 1\]"),
        (True, "takes an int"),
        ("-1GiB", "must be at least 1 byte"),
        ([1], "takes an int"),
    ],
    ids=str,
)
def test_budgets_that_mean_nothing(way: Way, budget: object, message: str) -> None:
    partitioner = torch._inductor.config.custom_partitioner_fn
    with pytest.raises(gcpass.InvalidOptionError, match=message) as caught:
        way({"memory_budget": budget})
    assert caught.value.option == "memory_budget"
    assert "got" in str(caught.value)
    assert torch._inductor.config.custom_partitioner_fn is partitioner
    trains("min")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"solver": "simplex"}, "one of 'auto', 'min_cut', 'greedy'"),
        ({"solver": "gredy"}, "did you mean 'greedy'"),
        ({"memory_budgt": "min"}, "did you mean 'memory_budget'"),
        ({"max_autotun": True}, "did you mean Inductor's 'max_autotune'"),
        ({"max_autotune": "yes"}, "takes bool"),
        ({"time_limit_s": 0.0}, "above 0"),
        ({"on_infeasible": "max"}, "one of 'error', 'min'"),
        ({"codegen": "c++"}, "one of 'inductor', 'eager'"),
        ({"verify": 1}, "takes bool"),
    ],
    ids=str,
)
def test_options_that_do_not_exist(
    way: Way, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(gcpass.InvalidOptionError, match=message) as caught:
        way(options)
    assert caught.value.option == next(iter(options))
    trains("min")


def test_environment_variable_is_named(
    way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GCPASS_MEMORY_BUDGET", "plenty")
    with pytest.raises(gcpass.InvalidOptionError, match="GCPASS_MEMORY_BUDGET"):
        way({})


# --- budgets under the floor ----------------------------------------------------------


@pytest.mark.parametrize("by", ["name", "object"])
def test_under_the_floor(by: str) -> None:
    options: dict[str, Any] = {"memory_budget": 1000, "codegen": "eager"}
    model, x = Mlp(), torch.randn(512, 16)
    if by == "name":
        function = torch.compile(model, backend="gcpass", options=options)
    else:
        function = torch.compile(model, backend=gcpass.backend(**options))
    with pytest.raises(gcpass.InfeasibleBudgetError) as caught:
        function(x)
    error = caught.value
    assert error.budget_bytes == 1000
    assert error.floor_bytes > 1000
    assert error.held_bytes == 0
    assert any(name.startswith("tanh") for name in error.alive)
    assert f"memory_budget={error.floor_bytes}" in str(error)
    assert not gcpass.plans()
    assert all(p.grad is None for p in model.parameters())
    # The same model trains with what the error asks for.
    compiled(model, error.floor_bytes)(x).backward()
    assert plan().peak_bytes <= error.floor_bytes
    got = gradients(model)
    model.zero_grad()
    model(x).backward()
    assert relative(got, gradients(model)) < 2e-6


def test_one_byte_under_the_floor() -> None:
    x = torch.randn(512, 16)
    compiled(Mlp(), "min")(x)
    floor = plan().floor_bytes
    with pytest.raises(gcpass.InfeasibleBudgetError) as caught:
        compiled(Mlp(), floor - 1)(x)
    assert caught.value.floor_bytes == floor


def test_taking_the_floor_instead(caplog: pytest.LogCaptureFixture) -> None:
    model, x = Mlp(), torch.randn(512, 16)
    with caplog.at_level(logging.WARNING, logger="gcpass"):
        compiled(model, 1000, on_infeasible="min")(x).backward()
    (message,) = [r.getMessage() for r in caplog.records if r.name == "gcpass"]
    assert "1000 bytes" in message
    assert str(plan().floor_bytes) in message
    assert plan().peak_bytes == plan().floor_bytes
    got = gradients(model)
    model.zero_grad()
    model(x).backward()
    assert relative(got, gradients(model)) < 2e-6


# --- the machine ----------------------------------------------------------------------


@pytest.mark.parametrize("version", ["2.10.1", "2.15.0", "3.0.0"])
def test_torch_outside_of_the_range(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = metadata.version

    def pretended(name: str) -> str:
        return version if name == "torch" else original(name)

    monkeypatch.setattr(metadata, "version", pretended)
    with pytest.raises(gcpass.UnsupportedTorchError, match=f"found {version}"):
        by_torch_compile({})
    monkeypatch.undo()
    trains()


def test_a_changed_private_function_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._functorch import partitioners

    def extract(joint_module: Any, saved_values: Any) -> Any:
        raise AssertionError("not reached")

    monkeypatch.setattr(partitioners, "_extract_fwd_bwd_modules", extract)
    with pytest.raises(gcpass.UnsupportedTorchError, match="num_fwd_outputs"):
        by_torch_compile({})


def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(gcpass.MissingCompilerError, match=r"apt-get install g\+\+"):
        by_torch_compile({"codegen": "inductor"})
    trains("min")  # nothing is built here


@pytest.fixture
def no_ortools(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every import of ortools fail."""
    original = builtins.__import__

    def without(name: str, *rest: Any, **named: Any) -> Any:
        if name.partition(".")[0] == "ortools":
            raise ImportError("libortools.so: cannot open shared object file")
        return original(name, *rest, **named)

    for name in [n for n in sys.modules if n.partition(".")[0] == "ortools"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", without)


@pytest.mark.usefixtures("no_ortools")
@pytest.mark.parametrize("budget", [None, "min"])
def test_without_ortools_plans_are_made_by_eviction(
    budget: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="gcpass"):
        trains(budget)
    messages = [r.getMessage() for r in caplog.records if r.name.startswith("gcpass")]
    assert any("by eviction only: ortools is needed" in m for m in messages)
    if budget == "min":
        assert plan().recomputations > 0


@pytest.mark.usefixtures("no_ortools")
def test_without_ortools_strict_raises() -> None:
    with pytest.raises(gcpass.SolverError, match="ortools"):
        by_torch_compile({"strict": True})


@pytest.mark.usefixtures("no_ortools")
def test_the_greedy_solver_needs_no_ortools() -> None:
    compiled(Mlp(), "min", solver="greedy", strict=True)(torch.randn(512, 16))
    assert plan().recomputations > 0


def test_a_failing_solver(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise gcpass.SolverError("maximum flow ended with BAD_INPUT")

    monkeypatch.setattr(cut, "_min_cut", fails)
    with caplog.at_level(logging.WARNING, logger="gcpass"):
        trains("min")
    assert any("BAD_INPUT" in r.getMessage() for r in caplog.records)
    store.clear()
    torch._dynamo.reset()
    with pytest.raises(gcpass.SolverError, match="BAD_INPUT"):
        by_torch_compile({"memory_budget": "min", "strict": True})


# --- graphs ---------------------------------------------------------------------------


def test_a_graph_that_cannot_be_split(monkeypatch: pytest.MonkeyPatch) -> None:
    # Nothing that torch traces here is refused, so the joint graph is spoilt: the
    # loss is made to depend on its own gradient.
    prepare = partition.prepare
    added: list[fx.Node] = []

    def spoilt(joint_module: fx.GraphModule) -> fx.Graph:
        graph = prepare(joint_module)
        (tangent,) = (n for n in graph.nodes if "tangents" in str(n.target))
        (output,) = graph.find_nodes(op="output")
        loss = output_nodes(graph)[0]
        with graph.inserting_before(output):
            node = graph.call_function(torch.ops.aten.add.Tensor, (loss, tangent))
        node.meta = dict(loss.meta)
        output.replace_input_with(loss, node)
        added.append(node)
        return graph

    monkeypatch.setattr(partition, "prepare", spoilt)
    with pytest.raises(gcpass.UnsupportedGraphError) as caught:
        by_torch_compile({"memory_budget": "min"})
    assert caught.value.operations == (added[0].name,)
    assert added[0].name in str(caught.value)
    monkeypatch.undo()
    trains("min")
