"""Prices other than the roofline's: measured ones, and the user's."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from gcpass import profiled, store
from gcpass.cost_model import Roofline, cost_model_of
from gcpass.errors import InvalidOptionError
from gcpass.function_text import function_text
from gcpass.hardware import this_cpu
from gcpass.options import parse_options
from gcpass.profiled import Profile, least_seconds
from tests.training import compiled, difference, plan, start_over

CPU = torch.device("cpu")
WORK = 4096


def _nodes(function: Callable[..., Tensor], *inputs: Tensor) -> dict[str, fx.Node]:
    """Return the nodes of a function's operations by operator."""
    graph: fx.Graph = make_fx(function, tracing_mode="fake")(*inputs).graph
    return {str(n.target): n for n in graph.nodes if n.op == "call_function"}


class Clock:
    """Stands in for `least_seconds`: fixed times, and a count of what was timed."""

    def __init__(self, *seconds: float) -> None:
        self.seconds = list(seconds)
        self.calls = 0

    def __call__(self, run: Callable[[], object], device: torch.device) -> float:
        run()  # what is timed must be possible
        self.calls += 1
        return self.seconds.pop(0)


@pytest.fixture
def clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(profiled, "least_seconds", clock)
    monkeypatch.setattr(profiled, "cache_dir", lambda: str(tmp_path))
    return clock


def _profile() -> Profile:
    return Profile(nominal=this_cpu(), torch_device=CPU)


def test_library_calls_have_their_measured_time(clock: Clock) -> None:
    nodes = _nodes(lambda a: (a @ a) @ a, torch.zeros(64, 64))
    clock.seconds = [0.01, 0.5]  # the copy, the product
    profile = _profile()
    cost = profile.price(nodes["aten.mm.default"], 3 * WORK * 4)
    assert (cost.seconds, cost.flops) == (0.5, 2 * 64**3)
    assert clock.calls == 2
    profile.price(nodes["aten.mm.default"], 3 * WORK * 4)
    profile.save()
    # Neither the same call nor another process measures again.
    again = _profile().price(nodes["aten.mm.default"], 3 * WORK * 4)
    assert (again.seconds, clock.calls) == (0.5, 2)


def test_kernels_take_what_traffic_or_arithmetic_takes(clock: Clock) -> None:
    nodes = _nodes(lambda a: a.tanh(), torch.zeros(WORK))
    bandwidth = 1e9
    copied = 2 * profiled.STREAMED_BYTES / bandwidth
    each = 1e-8 * torch.get_num_threads()
    clock.seconds = [copied, 2e-6, 2e-6 + each * profiled.CACHED_ELEMENTS]
    profile = _profile()
    inside = profile.price(nodes["aten.tanh.default"], 0)
    assert inside.seconds == pytest.approx(1e-8 * WORK, rel=0.05)  # two digits kept
    streaming = profile.price(nodes["aten.tanh.default"], 1000 * WORK)
    launch = this_cpu().launch_seconds
    assert streaming.seconds - launch == pytest.approx(
        1000 * WORK / bandwidth, rel=0.05
    )


@pytest.mark.parametrize(
    ("function", "operator"),
    [
        (lambda a: torch.bernoulli(a), "aten.bernoulli.default"),
        (
            lambda a: torch.ops.aten.index_put_(a, [a.long()], a),
            "aten.index_put_.default",
        ),
    ],
)
def test_draws_and_writes_are_not_run(
    function: Callable[[Tensor], Tensor], operator: str, clock: Clock
) -> None:
    node = _nodes(function, torch.zeros(WORK))[operator]
    clock.seconds = [0.01]
    profile = _profile()
    expected = Roofline(profile.device).price(node, WORK).seconds
    assert profile.price(node, WORK).seconds == expected
    assert clock.calls == 1


def test_measuring_adds_no_guard(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(profiled, "cache_dir", lambda: str(tmp_path))
    start_over()

    def clamped(x: Tensor) -> Tensor:
        return (x.sin().clamp_min(x.shape[0]) * x).sum()

    run = torch.compile(
        clamped,
        backend="gcpass",
        dynamic=True,
        options={"codegen": "eager", "cost_model": "profile"},
    )
    for batch in (8, 9, 10):
        run(torch.randn(batch, 4, requires_grad=True)).backward()
    assert len(store.plans()) == 1


def test_what_cannot_be_run_has_the_rooflines_time(clock: Clock) -> None:
    nodes = _nodes(lambda a: a @ a, torch.zeros(64, 64))
    clock.seconds = [0.01]
    profile = _profile()
    expected = Roofline(profile.device).price(nodes["aten.mm.default"], WORK).seconds
    with mock.patch.object(profiled, "least_seconds", side_effect=RuntimeError("no")):
        cost = profile.price(nodes["aten.mm.default"], WORK)
    assert cost.seconds == expected
    profile.save()
    assert set(_profile().seconds) == {"copy"}  # another process tries again


def test_least_seconds_of_a_call() -> None:
    long, short = torch.zeros(2**22), torch.zeros(8)
    times = [least_seconds(lambda x=x: x.sin(), CPU) for x in (long, short)]
    assert times[0] > 10 * times[1] > 0.0


class TwoWays(nn.Module):
    """Layers whose pointwise part and whose product are both worth saving."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """Return a loss."""
        for layer in self.layers:
            x = torch.exp(torch.sin(layer(x)))
        return x.mean()


def _dear(name: str) -> Callable[[fx.Node], float | None]:
    def seconds(node: fx.Node) -> float | None:
        return 1.0 if name in str(node.target) else 1e-6

    return seconds


def _repeats(dear: str) -> dict[str, int]:
    """Return how often products and sines are run again where one of them is dear."""
    start_over()
    x = torch.randn(64, 16)
    assert difference(TwoWays(), x, budget=0.6, cost_model=_dear(dear)) < 1e-5
    repeats = {"addmm": 0, "sin": 0}
    for value in plan().values:
        kind = value.name.partition("_")[0]
        if kind in repeats:
            repeats[kind] += len(value.recompute_positions)
    return repeats


def test_what_the_user_calls_dear_is_repeated_less() -> None:
    dear_product, dear_sine = _repeats("addmm"), _repeats("sin")
    assert dear_product["addmm"] < dear_sine["addmm"]
    assert dear_sine["sin"] < dear_product["sin"]


@pytest.mark.parametrize("wrong", [-1.0, float("nan"), "long", True])
def test_a_time_that_is_none_is_an_error(wrong: Any) -> None:
    start_over()
    run = compiled(TwoWays(), 0.5, cost_model=lambda node: wrong)
    with pytest.raises(InvalidOptionError, match="cost_model returned"):
        run(torch.randn(64, 16))


def _table(node: fx.Node, times: dict[str, float]) -> float | None:
    return times.get(str(node.target))


class Priced:
    """A callable object with a state."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __call__(self, node: fx.Node) -> float:
        return self.seconds

    def method(self, node: fx.Node) -> float:
        return self.seconds


def _closed(times: dict[str, float]) -> Callable[[fx.Node], float | None]:
    return lambda node: times.get(str(node.target))


def _defaulted(seconds: float) -> Callable[[fx.Node], float]:
    def price(node: fx.Node, seconds: float = seconds) -> float:
        return seconds

    return price


@pytest.mark.parametrize(
    "make",
    [
        lambda x: functools.partial(_table, times={"mm": x}),
        lambda x: _closed({"mm": x}),
        lambda x: _defaulted(x),
        lambda x: Priced(x),
        lambda x: Priced(x).method,
    ],
    ids=["partial", "closure", "default", "object", "method"],
)
def test_functions_with_other_numbers_are_told_apart(
    make: Callable[[float], Callable[[fx.Node], float | None]],
) -> None:
    assert function_text(make(1.0)) == function_text(make(1.0))
    assert function_text(make(1.0)) != function_text(make(2.0))


def test_functions_are_told_apart_by_their_source() -> None:
    def options(model: object) -> str:
        given = {"cost_model": model}
        return parse_options(given, inductor_keys=dict, environ={}).fingerprint()

    assert options(_dear("sin")) == options(_dear("sin"))
    assert options(_dear("sin")) != options(_dear("cos"))
    assert options("profile") != options("roofline")
    with pytest.raises(InvalidOptionError, match="'roofline', 'profile' or"):
        options("profil")


def test_other_names_and_functions() -> None:
    assert isinstance(cost_model_of("roofline", this_cpu(), CPU), Roofline)
    assert isinstance(cost_model_of("profile", this_cpu(), CPU), Profile)
