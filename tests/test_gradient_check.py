"""`gcpass.check`: right models pass, wrong gradients are named, nothing is touched."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gcpass
from gcpass.errors import GcpassError, InfeasibleBudgetError, InvalidOptionError
from tests.nets import ConvNet, LanguageModel, Mlp

MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "mlp": lambda: (Mlp(), torch.randn(64, 16)),
    "tied weights and dropout": lambda: (
        LanguageModel(depth=1, p=0.3),
        torch.randint(0, 64, (2, 16)),
    ),
    "batch norm": lambda: (ConvNet(depth=2), torch.randn(4, 3, 8, 8)),
}


def checked(
    model: nn.Module, *inputs: Any, autocast: bool = False, **options: object
) -> gcpass.GradientReport:
    """Return the report on a model that computes its loss."""

    def loss(module: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            value: Tensor = module(*inputs)
        return value

    chosen = {"codegen": "eager", "memory_budget": "min"} | options
    return gcpass.check(model, loss, **chosen)


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kind", MODELS)
def test_right_models_pass(kind: str, autocast: bool) -> None:
    model, x = MODELS[kind]()
    report = checked(model, x, autocast=autocast)
    assert report.ok, str(report)
    assert (
        report.unit == torch.finfo(torch.bfloat16 if autocast else x.float().dtype).eps
    )
    assert gcpass.plans()[-1].recomputations > 0
    assert [d.name for d in report.gradients] == [
        n for n, _ in model.named_parameters()
    ]
    names = [n for n, _ in model.named_buffers()]
    assert [d.name for d in report.deviations if d.kind == "buffer"] == names


class Bent(nn.Module):
    """Gives one weight a gradient that is off by a share, only when compiled."""

    def __init__(self, share: float = 0.0) -> None:
        super().__init__()
        self.share = share
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        weight = self.last.weight
        if torch.compiler.is_compiling():
            weight = weight + self.share * (weight - weight.detach())
        return F.linear(hidden, weight, self.last.bias).square().mean()


@pytest.mark.parametrize(
    ("share", "autocast", "right"),
    [(0.0, False, True), (1e-3, False, False), (0.0, True, True), (0.5, True, False)],
)
def test_an_error_in_one_gradient_is_named(
    share: float, autocast: bool, right: bool
) -> None:
    report = checked(Bent(share), torch.randn(64, 16), autocast=autocast)
    assert report.ok is right
    assert [d.name for d in report.mismatches] == ["last.weight"] * (not right)
    if not right:
        assert report.mismatches[0].error == pytest.approx(share, rel=0.1)
        assert "1 of 5 tensors differ from eager by more than rounding" in str(report)
        assert "differs" in str(report).splitlines()[2]
        assert "gradient last.weight" in str(report).splitlines()[2]


def test_a_wrong_rewrite_is_found(wrong_backward: None) -> None:
    report = checked(Mlp(), torch.randn(64, 16))
    assert not report.ok
    assert report.mismatches[0].kind == "gradient"
    assert report.mismatches[0].error == pytest.approx(2)


def test_the_model_and_all_random_states_stay() -> None:
    model, x = ConvNet(), torch.randn(4, 3, 8, 8)
    model(x).backward()
    model.norms[0].eval()
    modes = [m.training for m in model.modules()]
    tensors = [*model.parameters(), *model.buffers()]
    tensors += [p.grad for p in model.parameters() if p.grad is not None]
    before = [(t, t._version, t.clone()) for t in tensors]
    attributes = dict(vars(model))
    draws = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()

    def loss(module: Any) -> Tensor:
        scale = torch.rand(()) + random.random() + np.random.rand()
        value: Tensor = module(x) * scale
        return value

    assert gcpass.check(model, loss, codegen="eager").ok
    assert torch.equal(torch.get_rng_state(), draws[0])
    assert random.getstate() == draws[1]
    assert np.random.get_state()[1].tolist() == draws[2]
    assert vars(model) == attributes
    assert [m.training for m in model.modules()] == modes
    after = [*model.parameters(), *model.buffers()]
    after += [p.grad for p in model.parameters() if p.grad is not None]
    for (tensor, version, value), now in zip(before, after, strict=True):
        assert now is tensor
        assert now._version == version
        assert torch.equal(now, value)


def test_batches_and_criteria_collect_no_gradients() -> None:
    x = torch.randn(8, 16, requires_grad=True)
    criterion = nn.Linear(16, 1)
    report = gcpass.check(
        nn.Linear(16, 16), lambda m: criterion(m(x)).square().sum(), codegen="eager"
    )
    assert report.ok
    assert x.grad is None
    assert criterion.weight.grad is None


class Partial(nn.Module):
    """One layer frozen, one that the loss does not read."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.used = nn.Linear(16, 16), nn.Linear(16, 16)
        self.unused = nn.Linear(16, 16)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.used(self.frozen(x))).square().mean()


def test_frozen_parameters_are_left_out_and_unused_ones_are_zero() -> None:
    report = checked(Partial(), torch.randn(8, 16))
    assert report.ok
    names = ["used.weight", "used.bias", "unused.weight", "unused.bias"]
    assert [d.name for d in report.gradients] == names
    assert all(d.error == d.noise == 0 for d in report.gradients[2:])


def test_what_eager_cannot_settle_is_not_judged() -> None:
    # The bias in front of a batch norm has gradient 0; what comes out is rounding.
    report = checked(ConvNet(depth=2), torch.randn(4, 3, 8, 8))
    unjudged = [d.name for d in report.deviations if not d.judged]
    assert unjudged == [f"convs.{i}.bias" for i in range(2)]
    assert "2 too noisy in eager to judge" in str(report)


def test_a_model_of_noise_is_not_ok() -> None:
    def loss(module: Any) -> Tensor:
        value: Tensor = module.weight.mul(1e9).sin().sum()
        return value + 0 * module(torch.ones(1, 16)).sum()

    report = gcpass.check(nn.Linear(16, 16, bias=False), loss, codegen="eager")
    assert not report.mismatches
    assert not report.ok


def test_infinite_buffers_are_compared() -> None:
    model = Mlp()
    model.register_buffer("mask", torch.full((4, 4), -torch.inf).triu(1))
    assert checked(model, torch.randn(8, 16)).ok


@torch._dynamo.config.patch(recompile_limit=2)
def test_many_checks_of_one_model_do_not_use_up_dynamos_limit() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(8, 4)
    for _ in range(4):
        assert gcpass.check(model, lambda m: m(x).sum(), codegen="eager").ok


def test_a_compiled_model_is_checked_against_eager() -> None:
    model = Bent(0.5)
    model.compile(backend="aot_eager")
    x = torch.randn(8, 16)
    for given in (model, torch.compile(model, backend="aot_eager")):
        report = gcpass.check(given, lambda m: m(x), codegen="eager")
        assert [d.name for d in report.mismatches] == ["last.weight"]


def test_losses_outside_and_attributes_of_the_model_work() -> None:
    model, ids = LanguageModel(), torch.randint(0, 64, (2, 16))
    report = gcpass.check(
        model,
        lambda m: m(ids) + 0.1 * m.embedding.weight.square().sum(),
        codegen="eager",
    )
    assert report.ok


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda m: m(torch.ones(2, 4)), r"scalar, got a tensor of shape \(2, 4\)"),
        (lambda m: 1.0, "must return a scalar tensor, got <class 'float'>"),
        (lambda m: m(torch.ones(2, 4)).sum().detach(), "depends on no parameter"),
        (lambda m: nn.Linear(4, 1)(torch.ones(4)), "depends on no parameter"),
        (lambda m: m(torch.ones(2, 4)).sum() * torch.inf, "not finite"),
        (lambda m: F.linear(torch.ones(4), m.weight).sum(), "no region of the model"),
    ],
    ids=["vector", "number", "detached", "another model", "infinite", "not called"],
)
def test_errors_say_what_is_wrong(loss: Callable[[Any], Any], message: str) -> None:
    with pytest.raises(GcpassError, match=message):
        gcpass.check(nn.Linear(4, 4), loss, codegen="eager")


def test_a_model_that_does_not_train_is_refused() -> None:
    model = nn.Linear(4, 4).requires_grad_(False)
    with pytest.raises(GcpassError, match="requires a gradient"):
        gcpass.check(model, lambda m: m(torch.ones(4)).sum())


def test_a_model_that_cannot_be_copied_is_refused() -> None:
    model = nn.Linear(4, 4)
    model.cached = model.weight * 2  # type: ignore[assignment]
    with pytest.raises(GcpassError, match="deepcopy fails on it"):
        gcpass.check(model, lambda m: m(torch.ones(4)).sum())


def test_errors_of_the_backend_come_through() -> None:
    with pytest.raises(InvalidOptionError, match="memory_budget"):
        checked(Mlp(), torch.randn(8, 16), memory_bugdet=1)
    with pytest.raises(InfeasibleBudgetError):
        checked(Mlp(), torch.randn(8, 16), memory_budget=1)


@pytest.mark.slow
@pytest.mark.inductor
def test_inductor_draws_eagers_masks() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5), nn.Linear(16, 16))
    x = torch.randn(64, 16)
    report = gcpass.check(model, lambda m: m(x).square().mean(), memory_budget="min")
    assert report.ok, str(report)
