"""Every way in, and what happens around a compilation."""

from __future__ import annotations

import copy
import json
import logging
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gcpass
from gcpass import compiler, custom_partitioner, partition, store
from gcpass.decisions import RegionPlan
from tests.nets import Block, Mlp
from tests.training import (
    compiled,
    difference,
    gradients,
    plan,
    relative,
)

EAGER = {"codegen": "eager"}


@pytest.fixture
def partitions(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return a list that grows by the options of each call of the partitioner."""
    calls: list[Any] = []

    def counted(joint: Any, inputs: Any, options: Any, *rest: Any, **named: Any) -> Any:
        calls.append(options)
        return partition.partition(joint, inputs, options, *rest, **named)

    monkeypatch.setattr(custom_partitioner, "partition", counted)
    return calls


@pytest.fixture
def inputs() -> Tensor:
    return torch.randn(64, 16)


# --- ways in --------------------------------------------------------------------------


def test_by_name(inputs: Tensor) -> None:
    options = {"memory_budget": "min", "codegen": "eager"}
    function = torch.compile(Mlp(), backend="gcpass", options=options)
    function(inputs).backward()
    assert plan().requested == "min"
    assert plan().recomputations > 0
    assert options == {"memory_budget": "min", "codegen": "eager"}


def test_by_name_without_options(
    inputs: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "run_compiler", without_code_generation())
    torch.compile(Mlp(), backend="gcpass")(inputs).backward()
    assert plan().requested == "None"
    assert plan().recomputations == 0


def without_code_generation() -> Callable[..., Any]:
    """Return a `run_compiler` that generates no code whatever the options say."""
    original = compiler.run_compiler

    def run(gm: Any, inputs: Any, options: Any, **named: Any) -> Any:
        eager = options.model_copy(update={"codegen": "eager"})
        return original(gm, inputs, eager, **named)

    return run


def test_module_compile(inputs: Tensor) -> None:
    model = Mlp()
    model.compile(backend="gcpass", options=EAGER)
    model(inputs).backward()
    plan()


def test_as_an_object(inputs: Tensor) -> None:
    made = gcpass.backend(memory_budget="60%", codegen="eager", on_infeasible="min")
    torch.compile(Mlp(), backend=made)(inputs).backward()
    assert plan().requested == "60%"


def test_objects_with_equal_options_share_code(
    inputs: Tensor, partitions: list[Any]
) -> None:
    model = Mlp()
    for budget in ("min", "MIN", None):
        made = gcpass.backend(memory_budget=budget, codegen="eager")
        torch.compile(model, backend=made)(inputs).backward()
    assert [o.memory_budget for o in partitions] == ["min", None]
    assert gcpass.backend(memory_budget="1GiB") == gcpass.backend(memory_budget=2**30)
    assert gcpass.backend(memory_budget=1) != gcpass.backend(memory_budget=1.0)


def test_budgets_do_not_share_code(inputs: Tensor) -> None:
    model = Mlp()
    for budget in (None, "min"):
        compiled(model, budget)(inputs).backward()
    free, least = store.plans()
    assert least.peak_bytes < free.peak_bytes


def test_environment(
    inputs: Tensor, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("GCPASS_MEMORY_BUDGET", "min")
    monkeypatch.setenv("GCPASS_DUMP_DIR", str(tmp_path))
    torch.compile(Mlp(), backend="gcpass", options=EAGER)(inputs).backward()
    assert plan().requested == "min"
    assert len(list(tmp_path.glob("*.json"))) == 1
    torch._dynamo.reset()
    options = {"memory_budget": None, "dump": None, **EAGER}
    torch.compile(Mlp(), backend="gcpass", options=options)(inputs).backward()
    assert store.plans()[-1].requested == "None"
    assert len(list(tmp_path.glob("*.json"))) == 1


# --- Inductor's options and modes -----------------------------------------------------


@pytest.fixture
def patches(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Return a list that grows by the configuration of each compilation."""
    seen: list[dict[str, Any]] = []

    def run(gm: Any, inputs: Any, **named: Any) -> Any:
        seen.append(dict(named["config_patches"]))
        return gm

    monkeypatch.setattr(compiler, "compile_fx", run)
    return seen


@pytest.mark.parametrize(
    "mode", ["reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
)
def test_modes_are_those_of_inductor(
    mode: str, inputs: Tensor, patches: list[dict[str, Any]]
) -> None:
    torch.compile(Mlp(), backend="gcpass", mode=mode)(inputs)
    torch._dynamo.reset()
    torch.compile(Mlp(), backend="gcpass", options={"mode": mode})(inputs)
    expected = torch._inductor.list_mode_options(mode)
    assert expected
    for seen in patches:
        assert {name: seen[name] for name in expected} == expected


def test_inductor_options_pass_through_and_win(
    inputs: Tensor, patches: list[dict[str, Any]]
) -> None:
    options = {"mode": "max-autotune", "max_autotune": False, "epilogue-fusion": False}
    torch.compile(Mlp(), backend="gcpass", options=options)(inputs)
    assert patches[0]["max_autotune"] is False
    assert patches[0]["epilogue_fusion"] is False
    assert patches[0]["custom_partitioner_fn"].uuid()


# --- what is planned, and what is not -------------------------------------------------


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_inference_is_not_planned(
    guard: Callable[[], Any],
    inputs: Tensor,
    partitions: list[Any],
) -> None:
    model = Mlp()
    function = compiled(model, "min")
    with guard():
        torch.testing.assert_close(function(inputs), model(inputs))
    assert not partitions
    assert not gcpass.plans()


def test_frozen_models_are_not_planned(inputs: Tensor, partitions: list[Any]) -> None:
    model = Mlp().requires_grad_(False)
    torch.testing.assert_close(compiled(model, "min")(inputs), model(inputs))
    assert not partitions


def test_inference_after_training(inputs: Tensor) -> None:
    model = Mlp()
    function = compiled(model, "min")
    function(inputs).backward()
    with torch.no_grad():
        torch.testing.assert_close(function(inputs), model(inputs))
    function(inputs).backward()
    plan()


def test_new_shapes_are_planned_again() -> None:
    model = Mlp()
    function = torch.compile(
        model,
        backend="gcpass",
        dynamic=False,
        options={"memory_budget": "min", "codegen": "eager"},
    )
    for rows in (64, 128, 64):
        function(torch.randn(rows, 16)).backward()
    small, large = gcpass.plans()
    assert large.peak_bytes > 1.3 * small.peak_bytes
    assert (small.region, large.region) == ("0/0", "0/1")


def test_dynamic_shapes_are_planned_once() -> None:
    function = compiled(Mlp(), "min")
    for rows in (64, 128, 96):
        x = torch.randn(rows, 16)
        torch._dynamo.mark_dynamic(x, 0)
        function(x).backward()
    assert any(isinstance(s, str) for v in plan().values for s in v.shape)


def test_automatic_dynamic_shapes_are_planned_twice() -> None:
    function = compiled(Mlp(), "min")
    for rows in (64, 128, 96):
        function(torch.randn(rows, 16)).backward()
    assert len(gcpass.plans()) == 2


# --- what is told ---------------------------------------------------------------------


def test_plans_are_ordered_and_complete(inputs: Tensor) -> None:
    for budget in (None, "min"):
        torch._dynamo.reset()
        compiled(Mlp(), budget)(inputs).backward()
    free, least = gcpass.plans()
    assert (free.requested, least.requested) == ("None", "min")
    assert least.floor_bytes == least.peak_bytes < free.peak_bytes
    assert 0 <= least.bound <= least.overhead
    decisions = {v.decision for v in least.values}
    assert {"saved", "recomputed", "gradient", "input"} <= decisions
    tanh = next(v for v in least.values if v.name.startswith("tanh"))
    assert tanh.source.endswith(".py:" + tanh.source.rpartition(":")[2])
    assert "nets.py" in tanh.source
    assert tanh.shape == (64, 16)
    assert tanh.size_bytes == 64 * 16 * 4


def test_dump(inputs: Tensor, tmp_path: Path) -> None:
    folder = tmp_path / "plan"
    compiled(Mlp(), "min", dump=folder)(inputs).backward()
    (path,) = folder.iterdir()
    assert RegionPlan.from_json(path.read_text()) == plan()
    data = json.loads(path.read_text())
    assert data["schema_version"] == 1
    assert data["scheduled_peak_bytes"] == plan().peak_bytes


def test_one_line_is_logged(inputs: Tensor, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="gcpass"):
        compiled(Mlp(), "min")(inputs).backward()
    (line,) = [r.getMessage() for r in caplog.records if r.name == "gcpass"]
    assert line == plan().summary()
    assert line.startswith("region 0/0: requested min, scheduled peak")


def test_the_compile_trace_has_the_plan(
    inputs: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", records.append)
    trace = logging.getLogger("torch.__trace")
    monkeypatch.setattr(trace, "handlers", [handler])  # as TORCH_TRACE does
    compiled(Mlp(), "min")(inputs).backward()
    texts = [
        record.__dict__["payload"]
        for record in records
        if record.__dict__["metadata"].get("artifact", {}).get("name") == "gcpass_plan"
    ]
    assert tuple(map(RegionPlan.from_json, texts)) == gcpass.plans()


# --- with Inductor --------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.inductor
def test_inductor_builds_a_block_within_the_budget() -> None:
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block(64, 2) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return x.square().mean()

    model, x = Loss(), torch.randn(4, 128, 64)
    assert difference(model, x, budget=0.6, codegen="inductor") < 1e-4
    made = plan()
    assert made.scheduled_peak_bytes is not None
    limit = max(made.budget_bytes or 0, made.floor_bytes)
    assert made.scheduled_peak_bytes <= limit
    function = compiled(model, 0.6, codegen="inductor")
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    function(x).backward()
    assert gcpass.measure(lambda: function(x).backward()) <= limit * 1.02


@pytest.mark.slow
@pytest.mark.inductor
def test_enable_plans_for_inductor(partitions: list[Any]) -> None:
    model, x = Mlp(width=32, depth=6), torch.randn(1024, 32)
    before = torch._inductor.config.custom_partitioner_fn
    with gcpass.enable(memory_budget="min"):
        torch.compile(model, backend="inductor")(x).backward()
    assert torch._inductor.config.custom_partitioner_fn is before
    assert plan().recomputations > 0
    got = gradients(model)
    model.zero_grad()
    model(x).backward()
    assert relative(got, gradients(model)) < 1e-5
    assert len(partitions) == 1


def test_enable_as_a_call(inputs: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    config = torch._inductor.config
    before = config.custom_partitioner_fn, config.allow_buffer_reuse
    enabled = gcpass.enable(memory_budget="min")
    assert config.custom_partitioner_fn is not before[0]
    with enabled:
        pass
    assert (config.custom_partitioner_fn, config.allow_buffer_reuse) == before


@pytest.mark.parametrize(
    "options", [{"codegen": "eager"}, {"mode": "max-autotune"}, {"max_autotune": True}]
)
def test_enable_leaves_inductor_as_it_is_configured(options: dict[str, Any]) -> None:
    before = torch._inductor.config.custom_partitioner_fn
    with pytest.raises(gcpass.GcpassError, match="as it is configured"):
        gcpass.enable(**options)
    assert torch._inductor.config.custom_partitioner_fn is before


def test_partitioner_is_one_value(inputs: Tensor) -> None:
    one, same = (gcpass.partitioner(memory_budget="1GiB") for _ in range(2))
    other = gcpass.partitioner(memory_budget="2GiB")
    assert one.uuid() == same.uuid() != other.uuid()
    assert pickle.dumps(one) == pickle.dumps(same) != pickle.dumps(other)
    assert copy.deepcopy(one) is one
