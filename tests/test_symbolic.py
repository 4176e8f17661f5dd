"""Sizes, FLOPs and peaks as functions of symbols: right at all sizes, no guards."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import pytest
import sympy
import torch
import torch.nn.functional as F
from torch import nn

import gcpass
from gcpass import store, symbolic
from gcpass.cost import unregister_cost
from gcpass.decisions import PlannedSymbol, RegionPlan
from gcpass.errors import GcpassError, InfeasibleBudgetError, InvalidOptionError
from gcpass.size_function import MOST_SIZE, size_function
from gcpass.solvers.liveness import make_plan, simulate
from gcpass.solvers.problem import Operation, OpId, Origin, Problem, Value
from gcpass.solvers.solve import Planner
from gcpass.symbolic import _text, peak_function, plan_functions, sizes_and_flops
from gcpass.symbols import shape_env_of
from tests.nets import LanguageModel, Mlp
from tests.symbolic import (
    ATTENTION,
    BLOCK,
    CHAIN,
    CONVOLUTIONS,
    Net,
    functions_of,
    joint,
    once,
)
from tests.test_cases_dynamic import Counted
from tests.training import Budget, compiled, plan, start_over

PLANNED = (6, 12)
OTHERS = ((6, 12), (2, 12), (9, 30), (16, 8), (5, 7), (64, 20))


def symbols_of(text_symbols: tuple[PlannedSymbol, ...], sizes: Any) -> dict[str, int]:
    """Return sizes by symbol: those planned for `PLANNED`, in this order."""
    names = {symbol.planned: symbol.name for symbol in text_symbols}
    pairs = zip(PLANNED, sizes, strict=True)
    return {names[planned]: size for planned, size in pairs if planned in names}


def some_plans(problem: Problem) -> list[Any]:
    """Return plans of a problem: the fastest, the leanest, one in between."""
    planner = Planner(problem=problem, method="greedy")
    fastest, floor = planner.fastest, planner.floor
    between = (fastest.peak_bytes + floor.peak_bytes) // 2
    return [fastest, planner.solve(between).plan or floor, floor]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("fuses", [True, False], ids=["fused", "alone"])
def test_the_peak_is_that_of_the_same_plan_at_the_other_size(
    device: str, fuses: bool
) -> None:
    captured = joint(CHAIN, PLANNED, symbolic=True, device=device, fuses=fuses)
    in_place = False
    for chosen in some_plans(captured.problem):
        functions = functions_of(captured, chosen)
        peak = size_function(functions.peak_bytes)
        profile = simulate(captured.problem, chosen.sequence, chosen.boundary)
        in_place |= any(over is not None for over in profile.overwritten)
        for sizes in OTHERS:
            other = joint(CHAIN, sizes, symbolic=False, device=device, fuses=fuses)
            want = make_plan(other.problem, chosen.sequence, chosen.boundary, "")
            assert peak.at(symbols_of(functions.symbols, sizes)) == want.peak_bytes
        assert functions.peak_bytes.count("Max") == 1
        assert len(functions.peak_bytes) < 500
    assert in_place is fuses


@pytest.mark.parametrize(
    "net",
    [CHAIN, CONVOLUTIONS, ATTENTION],
    ids=["chain", "convolutions", "attention"],
)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_sizes_and_flops_are_those_of_the_other_size(net: Net, device: str) -> None:
    captured = joint(net, PLANNED, symbolic=True, device=device)
    env = shape_env_of(symbolic_tensors(captured))
    guards = len(env.guards)
    sizes, flops, planned = sizes_and_flops(captured, env)
    assert len(env.guards) == guards
    assert sum(isinstance(e, sympy.Expr) for e in sizes) > len(sizes) // 2
    for given in OTHERS:
        other = joint(net, given, symbolic=False, device=device).problem
        at = {s: dict(zip(PLANNED, given, strict=True))[n] for s, n in planned.items()}
        values = [int(sympy.sympify(size).subs(at)) for size in sizes]
        assert values == [value.size_bytes for value in other.values]
        counts = [int(sympy.sympify(count).subs(at)) for count in flops]
        assert counts == [operation.flops for operation in other.operations]


def symbolic_tensors(captured: Any) -> list[torch.Tensor]:
    return [m for m in captured.value_metas if isinstance(m, torch.Tensor)]


def test_a_transformer_layer_stores_what_korthikanti_et_al_counted() -> None:
    # sbh (34 + 5as/h) bytes, "Reducing Activation Recomputation in Large Transformer
    # Models", 2022, arXiv:2205.05198, eq. 1: what autograd keeps, the layer's input
    # included. It leaves out mean and deviation of the two layer norms, in float16
    # here: 2 * 2 * 2 * sb bytes.
    captured = joint(BLOCK, (7, 2, 3, 5), symbolic=True, fuses=False)
    env = shape_env_of(symbolic_tensors(captured))
    sizes, _, planned = sizes_and_flops(captured, env)
    _, profile = once(captured)
    stored = [i.value for i in profile.instances if i.saved]
    (x,) = (captured.root[n] for n in captured.graph.nodes if n.name == "primals_1_1")
    names = {number: symbol for symbol, number in planned.items()}
    s, b, a, d = (names[number] for number in (7, 2, 3, 5))
    h = a * d
    statistics = [v for v in stored if sizes[v] == 2 * s * b]
    assert len(statistics) == 4
    counted = sum(sizes[v] for v in (x, *stored) if v not in statistics)
    assert sympy.expand(counted - s * b * h * (34 + 5 * a * s / h)) == 0


def test_that_is_what_eager_mode_stores() -> None:
    sizes = (7, 2, 3, 5)
    captured = joint(BLOCK, sizes, symbolic=False, fuses=False)
    _, profile = once(captured)
    parameters, function = BLOCK
    given = parameters(*sizes, lambda *s, **k: torch.rand(s, requires_grad=True, **k))
    own = {x.untyped_storage().data_ptr() for x in given}
    found: dict[int, int] = {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        out = function(torch.empty(sizes), *given)
    assert sum(found.values()) == profile.saved_bytes
    del out


@pytest.mark.parametrize("budget", [None, 0.6, "min"], ids=str)
def test_one_plan_says_the_peak_of_all_sizes(budget: Budget) -> None:
    function = compiled(LanguageModel(depth=1), budget)
    for shape in ((4, 16), (6, 24), (3, 9)):
        function(_ids(*shape)).backward()
    made = plan()  # nothing is compiled for the other sizes
    assert made.peak_at() == made.predicted_peak_bytes
    assert {s.source: s.planned for s in made.symbols} == {
        "L['ids'].size()[0]": 4,
        "L['ids'].size()[1]": 16,
    }


def test_a_compiled_model_is_that_of_the_other_size() -> None:
    net = LanguageModel(depth=1)
    compiled(net)(_ids(4, 16)).backward()
    made = plan()
    start_over()
    compiled(net)(torch.randint(0, 64, (6, 24))).backward()
    static = plan()
    at = {s.name: {4: 6, 16: 24}[s.planned] for s in made.symbols}
    for mine, theirs in zip(made.values, static.values, strict=True):
        size = _at(mine.symbolic_size_bytes, mine.size_bytes, at)
        assert size == theirs.size_bytes
        assert _at(mine.symbolic_flops, mine.flops, at) == theirs.flops
    assert made.peak_at(**at) == static.predicted_peak_bytes
    assert made.flops_at(**at) == static.flops_at()


def _ids(*shape: int) -> torch.Tensor:
    ids = torch.randint(0, 64, shape)
    for dimension in range(2):
        torch._dynamo.mark_dynamic(ids, dimension)
    return ids


def _at(text: str, constant: int, sizes: dict[str, int]) -> int:
    return size_function(text).at(sizes) if text else constant


def test_the_largest_is_the_largest() -> None:
    net = Mlp()
    x = torch.randn(8, 16)
    torch._dynamo.mark_dynamic(x, 0)
    compiled(net, "20kB")(x).backward()
    made = plan()
    (symbol,) = made.symbols
    for budget in (5000, "20kB", "3MiB", 12_345_678):
        rows = made.largest(symbol.name, budget)
        limit = {"20kB": 20_000, "3MiB": 3 * 2**20}.get(budget, budget)
        assert made.peak_at(**{symbol.name: rows}) <= limit
        assert made.peak_at(**{symbol.name: rows + 1}) > limit
    assert symbol.largest == made.largest(symbol.name, "20kB")
    assert f"for {symbol.name} = 8 (at most {symbol.largest})" in made.summary()
    with pytest.raises(InfeasibleBudgetError) as caught:
        made.largest(symbol.name, 100)
    assert caught.value.floor_bytes == made.peak_at(**{symbol.name: 2})


def test_the_record_keeps_the_functions() -> None:
    x = torch.randn(8, 16)
    torch._dynamo.mark_dynamic(x, 0)
    compiled(Mlp(), 0.5)(x).backward()
    made = plan()
    twin = RegionPlan.from_json(made.to_json())
    assert twin == made
    (symbol,) = twin.symbols
    assert twin.peak_at(**{symbol.name: 99}) == made.peak_at(**{symbol.name: 99})
    theirs = sympy.sympify(made.symbolic_peak_bytes).subs(symbol.name, 99)
    assert theirs == made.peak_at(**{symbol.name: 99})


def test_static_sizes_are_constants() -> None:
    compiled(Mlp())(torch.randn(8, 16)).backward()
    made = plan()
    assert made.symbols == ()
    assert made.symbolic_peak_bytes == str(made.predicted_peak_bytes)
    assert made.peak_at() == made.predicted_peak_bytes
    assert made.flops_at() == int(made.symbolic_flops) > 0
    assert {v.symbolic_size_bytes for v in made.values} == {""}
    with pytest.raises(
        InvalidOptionError, match="no symbol 's0': the plan is for stat"
    ):
        made.peak_at(s0=3)


def made_up(**fields: Any) -> RegionPlan:
    """Return a plan of a batch that is planned for 8 and a length of 1 to 100."""
    compiled(Mlp())(torch.randn(8, 16)).backward()
    symbols = (
        PlannedSymbol(name="s0", planned=8, source="L['x']", least=2, most=None),
        PlannedSymbol(name="s1", planned=4, source="L['y']", least=1, most=100),
    )
    text = {"symbolic_peak_bytes": "10*s0*s1 + 7", "symbols": symbols}
    return dataclasses.replace(plan(), **{**text, **fields})


def test_what_cannot_be_asked() -> None:
    made = made_up()
    assert made.peak_at(s1=5) == 407
    assert made.largest("s1", 10**9) == 100  # its range ends there
    for sizes, says in (
        ({"s2": 1}, r"no symbol 's2': the plan has s0 \(L\['x'\]\), s1"),
        ({"s0": 1}, "s0 is at least 2 where this plan is used, got 1"),
        ({"s1": 101}, "s1 is at most 100 .* got 101; other sizes are"),
    ):
        with pytest.raises(InvalidOptionError, match=says):
            made.peak_at(**sizes)
    with pytest.raises(InvalidOptionError, match="'60%' is not bytes"):
        made.largest("s0", "60%")
    with pytest.raises(InvalidOptionError, match="no symbol 'batch'"):
        made.largest("batch", 1000)
    flat = dataclasses.replace(made, symbolic_peak_bytes="7")
    with pytest.raises(InvalidOptionError, match="no largest s0: at 461168"):
        flat.largest("s0", 1000)
    unknown = dataclasses.replace(made, symbolic_peak_bytes="", symbolic_note="odd")
    with pytest.raises(GcpassError, match="unknown as a function of sizes: odd"):
        unknown.peak_at(s0=9)
    old = dataclasses.replace(unknown, symbolic_note="")
    with pytest.raises(GcpassError, match="an earlier release wrote this plan"):
        old.peak_at()


def test_a_search_without_an_end_costs_the_compile_little() -> None:
    made = dataclasses.replace(
        made_up(), symbolic_peak_bytes="64*s0 - 512*floor(s0/8) + 1028", budget_bytes=99
    )
    started = time.monotonic()
    assert [s.largest for s in made.with_largest().symbols] == [None, None]
    assert time.monotonic() - started < 1.0
    with pytest.raises(GcpassError, match="was given up"):
        made.largest("s0", 99)
    odd = dataclasses.replace(made, symbolic_peak_bytes="s0/(s0 - 8) + s2")
    assert odd.with_largest() == odd


def test_many_symbols_are_not_searched_and_few_are_named() -> None:
    many = tuple(
        PlannedSymbol(name=f"u{i}", planned=4, source="", least=0, most=None)
        for i in range(9)
    )
    text = " + ".join(f"8*{s.name}" for s in many)
    made = made_up(symbols=many, symbolic_peak_bytes=text, budget_bytes=1000)
    assert made.with_largest() == made
    assert made.largest("u8", 1000) == (1000 - 8 * 8 * 4) // 8
    assert "for u2 = 4, and 6 more sizes, solved" in made.summary()


@pytest.mark.parametrize("kind", ["mask", "nonzero", "item", "repeat"])
def test_sizes_that_only_the_data_tells(kind: str) -> None:
    captures = {
        "capture_dynamic_output_shape_ops": True,
        "capture_scalar_outputs": True,
    }
    with torch._dynamo.config.patch(**captures):
        compiled(Counted(kind))(torch.randn(32, 16)).backward()
    made = plan()
    (symbol,) = made.symbols
    assert symbol.source == ""
    assert symbol.most is None or symbol.most < MOST_SIZE
    assert made.peak_at() == made.predicted_peak_bytes
    rows = {symbol.name: 10}
    sizes = {_at(v.symbolic_size_bytes, v.size_bytes, rows) for v in made.values}
    assert 10 * 16 * 4 in sizes
    assert made.peak_at(**rows) < made.peak_at()


def test_sizes_that_torch_guesses_otherwise_are_said_to_be_unknown() -> None:
    captured = joint(CHAIN, PLANNED, symbolic=True)
    values = list(captured.problem.values)
    last = len(values) - 1
    values[-1] = dataclasses.replace(values[-1], size_bytes=1)
    problem = dataclasses.replace(captured.problem, values=tuple(values))
    guessed = dataclasses.replace(captured, problem=problem)
    functions = functions_of(guessed, once(guessed)[0])
    owners = [node.name for node, root in captured.root.items() if root == last]
    assert f"the size of {owners[0]}, which" in functions.note
    assert functions.symbols == ()
    assert functions.peak_bytes == functions.flops == ""
    assert set(functions.value_bytes) == set(functions.operation_flops) == {""}


@pytest.mark.parametrize(
    ("error", "note"),
    [
        (GcpassError("odd"), "odd"),
        (RecursionError("deep"), "RecursionError('deep')"),
        (ZeroDivisionError(), "ZeroDivisionError()"),
    ],
)
def test_no_function_is_a_note(
    error: Exception, note: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise error

    captured = joint(CHAIN, PLANNED, symbolic=True)
    monkeypatch.setattr(symbolic, "largest_sums", fail)
    functions = functions_of(captured, once(captured)[0])
    assert functions.note == note
    assert functions.peak_bytes == functions.flops == ""


def test_a_function_that_is_wrong_at_the_planned_sizes_is_a_note() -> None:
    captured = joint(CHAIN, PLANNED, symbolic=True)
    chosen, profile = once(captured)
    functions = plan_functions(captured, chosen, profile, profile.peak_bytes + 1)
    assert functions.note == (
        f"the function says {profile.peak_bytes} at the planned sizes"
    )
    assert functions.symbols == ()


def scaled(factor: float) -> RegionPlan:
    x = torch.randn(11, 16, requires_grad=True)
    torch._dynamo.mark_dynamic(x, 0)

    def function(x: torch.Tensor) -> torch.Tensor:
        image = x.tanh()[None, None]
        return F.interpolate(image, scale_factor=(factor, 1.0)).exp().sum()

    compiled(function)(x).backward()
    return plan()


def test_sizes_that_floating_point_rounds_are_unknown() -> None:
    made = scaled(1.7)  # 1.7 * 10 is 17.0, and the fraction next to 1.7 times 10 less
    assert made.symbolic_note.startswith("sizes scaled by a fraction that binary")
    assert made.symbolic_peak_bytes == ""
    start_over()
    made = scaled(1.5)
    (symbol,) = made.symbols
    (exp,) = (v for v in made.values if v.name == "exp")
    assert size_function(exp.symbolic_size_bytes).at({symbol.name: 11}) == 16 * 16 * 4


def test_constants_are_no_text() -> None:
    assert [_text(sympy.Integer(4)), _text(4)] == ["", ""]
    assert [_text(6), _text(sympy.Integer(6))] == ["", ""]


def test_a_workspace_grows_along_what_was_measured() -> None:
    captured = joint(CONVOLUTIONS, (6, 12), symbolic=True, fuses=False)
    assert any(op.workspace_bytes for op in captured.problem.operations)
    chosen, profile = once(captured)
    functions = functions_of(captured, chosen)
    peak = size_function(functions.peak_bytes)
    assert peak.at(symbols_of(functions.symbols, (6, 12))) == profile.peak_bytes
    other = joint(CONVOLUTIONS, (12, 24), symbolic=False, fuses=False)  # where measured
    want = simulate(other.problem, chosen.sequence, chosen.boundary).peak_bytes
    assert peak.at(symbols_of(functions.symbols, (12, 24))) == want


def test_room_for_a_loss_outside_grows_with_the_output() -> None:
    net = nn.Sequential(*(nn.Linear(16, 16) for _ in range(8)))
    x = torch.randn(8, 16)
    torch._dynamo.mark_dynamic(x, 0)
    compiled(net)(x).sum().backward()
    made = plan()
    (symbol,) = made.symbols
    assert made.peak_at() == made.predicted_peak_bytes
    double = made.peak_at(**{symbol.name: 16})
    assert made.peak_at() < double <= 2 * made.peak_at()


def _branching(x: torch.Tensor, out: torch.Tensor) -> int:
    return 2 * out.numel() if out.shape[0] % 3 == 0 else out.numel() + 8


def test_a_formula_for_numbers_only_is_taken_in_proportion() -> None:
    x = torch.randn(8, 16)
    torch._dynamo.mark_dynamic(x, 0)

    def run() -> tuple[RegionPlan, str]:
        start_over()
        compiled(Mlp(depth=1))(x).backward()
        made = plan()
        (value,) = (v for v in made.values if v.name == "tanh")
        return made, value.symbolic_flops

    made, text = run()
    (symbol,) = made.symbols
    assert text == f"256*{symbol.name}"
    try:
        gcpass.register_cost("aten::tanh", lambda x, out: 3 * out.shape[0])
        assert run()[1] == f"3*{symbol.name}"
        gcpass.register_cost("aten::tanh", lambda x, out: 3 * int(out.shape[0]) + 1)
        assert run()[1] == f"ceiling(25*{symbol.name}/8)"
        gcpass.register_cost("aten::tanh", _branching)
        assert run()[1] == f"17*{symbol.name}"
    finally:
        unregister_cost("aten::tanh")
    assert len(store.plans()) == 1


def test_what_is_in_place_at_the_planned_sizes_only() -> None:
    # Two values of unlike expressions that are of one size as planned.
    problem = Problem(
        operations=(
            Operation(reads=(0,), writes=(1,), cost_seconds=1.0),
            Operation(
                reads=(1,),
                writes=(2,),
                cost_seconds=1.0,
                fusible=True,
                absorbing=True,
                aligned=(1,),
            ),
        ),
        values=(
            Value(size_bytes=512, origin=Origin.INPUT),
            Value(size_bytes=512),
            Value(size_bytes=512, held=True),
        ),
    )
    chosen = make_plan(problem, (OpId(0), OpId(1)), 2, "test")
    profile = simulate(problem, chosen.sequence, chosen.boundary)
    assert profile.overwritten == (None, 1)
    rows = sympy.Symbol("s0", integer=True, positive=True)
    sizes = [512, 512 * sympy.ceiling(rows / 256), 512 * sympy.ceiling(rows / 128)]
    text = peak_function(problem, chosen, profile, sizes, (0, 0), {"s0": (2, 100)})
    assert size_function(text).at({"s0": 100}) == profile.peak_bytes == 512
    assert size_function(text).at({"s0": 200}) == 512 + 1024
