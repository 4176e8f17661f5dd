"""``gcpass solve``: what it prints, exit codes, budgets, methods, and no torch."""

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from gcpass import cli
from gcpass.solvers.check import check
from gcpass.solvers.generate import chain, transformer
from gcpass.solvers.instance import read_solution, write_problem
from gcpass.solvers.liveness import make_plan
from gcpass.solvers.problem import OpId, Problem, Solution, Termination

# In a chain of 8 layers of 100 bytes, each a second, the given order peaks in the first
# backward layer: the inputs of layers 1 to 7, the gradient that arrives and the one
# that leaves: 900 bytes.
CHAIN = chain(8, 100, 1.0)
PEAK = 900


@pytest.fixture
def instance(tmp_path: Path) -> str:
    path = tmp_path / "chain.json"
    write_problem(CHAIN, path)
    return str(path)


def solve(
    instance: str, budget: str, *more: str, capsys: pytest.CaptureFixture[str]
) -> tuple[int, Any]:
    """Return the exit code and the one JSON object that was printed."""
    arguments = ["solve", instance, "--budget", budget, "--time-limit", "1", "--json"]
    code = cli.main([*arguments, *more])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1
    return code, json.loads(lines[0])


def test_solve_within_a_fraction(
    instance: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "solution.json"
    code, found = solve(instance, "0.6", "-o", str(path), capsys=capsys)
    assert code == 0
    assert (found["budget"], found["given_peak"]) == (540, PEAK)
    solution = read_solution(path)
    assert solution.plan is not None
    check(CHAIN, solution.plan, 540)
    assert found["peak"] == solution.plan.peak_bytes <= 540
    assert found["floor"] == solution.floor_bytes <= found["peak"]
    assert found["executions"] == len(solution.plan.sequence)
    assert found["operations"] == 16
    # Every execution takes a second and each of the 16 operations is needed.
    assert found["cost"] == found["executions"] > 16
    overhead = 100 * (found["executions"] / 16 - 1)
    assert found["overhead_percent"] == pytest.approx(overhead)
    assert 0 < found["bound_percent"] <= found["overhead_percent"]
    gap = found["overhead_percent"] - found["bound_percent"]
    assert found["gap_points"] == pytest.approx(gap)
    assert found["termination"] == solution.termination.value != "infeasible"
    assert found["limit"] == solution.limit
    assert found["origin"] == solution.plan.origin
    assert found["infeasible_proven"] is False
    assert 0 < found["seconds"] < 20
    assert (found["instance"], found["method"]) == (instance, "auto")


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [("1.0", 900), ("100%", 900), ("901", 901), ("1kB", 1000), ("12 GiB", 12 * 2**30)],
)
def test_solve_with_room_for_everything(
    text: str, size_bytes: int, instance: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = solve(instance, text, capsys=capsys)
    assert code == 0
    assert found["budget"] == size_bytes
    assert found["overhead_percent"] == found["bound_percent"] == 0.0
    assert found["termination"] == "optimal"


def test_solve_at_the_floor(instance: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = solve(instance, "min", capsys=capsys)
    assert code == 0
    # The result, what a backward layer reads and writes, and no more than one value
    # besides can be alive: 300 bytes are needed.
    assert 300 <= found["peak"] <= found["budget"] == found["floor"] <= 400
    assert found["overhead_percent"] > 0


def test_solve_a_fused_step_of_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_problem(transformer(2, fused=True), tmp_path / "transformer.json")
    code, found = solve(str(tmp_path / "transformer.json"), "0.8", capsys=capsys)
    assert code == 0
    assert found["peak"] <= found["budget"] < found["given_peak"]


def test_solve_a_published_instance(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "path.txt"
    path.write_text("3 2\n2 1\n3 1\n4 1\n0 1\n1 2\n0 1 2\n")
    code, found = solve(str(path), "1.0", capsys=capsys)
    assert code == 0
    assert (found["cost"], found["executions"], found["peak"]) == (3.0, 3, 7)


def test_solve_says_that_no_plan_fits(
    instance: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "solution.json"
    arguments = ["solve", instance, "--budget", "299", "--time-limit", "1"]
    assert cli.main([*arguments, "--json", "-o", str(path)]) == 1
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert found["termination"] == "infeasible"
    assert found["infeasible_proven"] is True
    assert found["cost"] is found["overhead_percent"] is found["peak"] is None
    assert "no plan within 299 bytes (299 B)" in printed.err
    assert f"the least peak reached is {found['floor']} bytes" in printed.err
    assert "it is proven that no plan fits" in printed.err
    assert read_solution(path).plan is None
    assert cli.main(arguments) == 1
    assert capsys.readouterr().out == ""


def test_solve_prints_for_people(
    instance: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["solve", instance, "--budget", "1KiB"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:7] == [
        "operations   16, 16 executions",
        "cost         16",
        "overhead     0.000 %",
        "bound        0.000 %, gap 0.000 points",
        "peak         900 bytes (900 B)",
        "budget       1024 bytes (1.00 KiB)",
        lines[6],
    ]
    assert [line.split()[0] for line in lines[6:]] == [
        "least",
        "given",
        "termination",
        "time",
    ]
    assert "optimal, plan by " in lines[8]


Method = Callable[[Problem, int | None], Solution]


@pytest.fixture
def add_method(monkeypatch: pytest.MonkeyPatch) -> Callable[[Method], None]:
    """Return a function that makes a method the only one, by the name "mine"."""

    def add(method: Method) -> None:
        module = ModuleType("gcpass.solvers.classics")
        module.METHODS = {"mine": method}  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)

    return add


def everything_once(problem: Problem, budget_bytes: int | None) -> Solution:
    sequence = [OpId(op_id) for op_id in range(len(problem.operations))]
    plan = make_plan(problem, sequence, 8, "once")
    fits = budget_bytes is None or plan.peak_bytes <= budget_bytes
    return Solution(
        plan=plan if fits else None,
        termination=Termination.FEASIBLE if fits else Termination.INFEASIBLE,
        bound_seconds=0.0,
        floor_bytes=plan.peak_bytes,
    )


def test_solve_by_a_named_method(
    instance: str,
    add_method: Callable[[Method], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    add_method(everything_once)
    for budget in ("900", "min"):
        code, found = solve(instance, budget, "--method", "mine", capsys=capsys)
        assert code == 0
        assert (found["method"], found["origin"]) == ("mine", "once")
        assert (found["peak"], found["budget"]) == (PEAK, PEAK)
    arguments = ["solve", instance, "--budget", "0.9", "--method", "mine"]
    assert cli.main(arguments) == 1
    # 810 bytes are enough for other methods.
    assert "not proven that none exists" in capsys.readouterr().err


def test_solve_checks_what_a_method_says(
    instance: str,
    add_method: Callable[[Method], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    def boastful(problem: Problem, budget_bytes: int | None) -> Solution:
        solution = everything_once(problem, None)
        assert solution.plan is not None
        less = dataclasses.replace(solution.plan, peak_bytes=10)
        return dataclasses.replace(solution, plan=less)

    add_method(boastful)
    arguments = ["solve", instance, "--budget", "0.5", "--method", "mine", "--json"]
    assert cli.main(arguments) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "the solver failed: peak: plan says 10 bytes, it needs 900" in printed.err


def test_solve_complains(
    instance: str,
    tmp_path: Path,
    add_method: Callable[[Method], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    add_method(everything_once)
    (tmp_path / "text.txt").write_text("hello")
    missing = str(tmp_path / "missing.json")
    nowhere = str(tmp_path / "nowhere" / "solution.json")
    for arguments, says in [
        ([missing, "--budget", "0.5"], "missing.json"),
        ([str(tmp_path), "--budget", "0.5"], str(tmp_path)),
        ([str(tmp_path / "text.txt"), "--budget", "0.5"], "text.txt: no JSON"),
        ([instance, "--budget", "1.5"], "must be in (0, 1]"),
        ([instance, "--budget", "0"], "must be at least 1 byte"),
        ([instance, "--budget", "12gib"], "did you mean 'GiB'?"),
        ([instance, "--budget", "auto"], "option '--budget' takes bytes"),
        ([instance, "--budget", "none"], "option '--budget' takes bytes"),
        ([instance, "--budget", "1.0", "--method", "magic"], "are auto, mine"),
        ([instance, "--budget", "1.0", "-o", nowhere], "no folder"),
        ([instance, "--budget", "1.0", "-o", str(tmp_path)], str(tmp_path)),
    ]:
        assert cli.main(["solve", *arguments]) == 2, arguments
        assert says in capsys.readouterr().err


@pytest.mark.parametrize("seconds", ["-1", "nan", "inf", "soon"])
def test_solve_takes_finite_seconds(
    seconds: str, instance: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["solve", instance, "--budget", "0.5", f"--time-limit={seconds}"])
    assert caught.value.code == 2
    assert f"takes finite seconds >= 0, got '{seconds}'" in capsys.readouterr().err


def test_python_m_gcpass_solves_without_torch(instance: str, tmp_path: Path) -> None:
    code = (
        "import runpy, sys\n"
        "try:\n"
        "    runpy.run_module('gcpass', run_name='__main__', alter_sys=True)\n"
        "finally:\n"
        "    print('torch' in sys.modules)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, "solve", instance, "--budget", "0.6"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert (result.returncode, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert lines[0].startswith("operations   16, ")
    assert lines[-1] == "False"
