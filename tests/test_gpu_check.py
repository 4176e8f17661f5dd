"""examples/gpu_check.py with its tiny models: that its figures mean something.

Without code generation, so that a step takes seconds: what is tested is the script.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
QUICK = "--tiny --layers 1 --codegen eager --planning 1 --rounds 2".split()


@pytest.fixture
def gpu_check(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("gpu_check")


@pytest.fixture
def gpu_report(gpu_check: ModuleType) -> ModuleType:
    return importlib.import_module("gpu_report")


def run(script: ModuleType, folder: Path, *arguments: str) -> tuple[int, Any]:
    """Return the exit status and what the JSON file says."""
    file = folder / "result.json"
    status = script.main([*QUICK, *arguments, "--json", str(file)])
    return status, json.loads(file.read_text())


@pytest.mark.slow
def test_figures(gpu_check: ModuleType, tmp_path: Path) -> None:
    names = "eager,inductor,block,gcpass@0.8,gcpass@block,torch@0.2"
    status, result = run(gpu_check, tmp_path, "--models", "vit", "--rows", names)
    assert status == 0
    assert result["complete"]
    assert result["versions"]["torch"]
    rows = {row["name"]: row for row in result["rows"]}
    assert list(rows) == names.split(",")
    for row in rows.values():
        assert row["status"] == "measured", row["message"]
        # Rounding to 8 bits of mantissa is seen, and nothing worse than that.
        assert 1e-4 < row["error"] < 0.03
        assert row["error"] < row["worst_error"] < 0.1
        assert row["loss"] == pytest.approx(rows["eager"]["loss"], rel=0.01)
        assert len(row["seconds"]) == 2
        assert row["ratio"] > 0
    peaks = {name: row["peak_bytes"] for name, row in rows.items()}
    assert peaks["torch@0.2"] < peaks["inductor"]
    assert rows["gcpass@block"]["budget_bytes"] == peaks["block"]
    for name in ("gcpass@0.8", "gcpass@block"):
        row = rows[name]
        assert row["peak_bytes"] <= row["budget_bytes"]
        assert row["peak_bytes"] == pytest.approx(row["scheduled_bytes"], rel=0.01)
    assert rows["gcpass@0.8"]["budget_bytes"] > peaks["block"] / 2


def test_infeasible_is_no_broken_promise(
    gpu_check: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = "inductor,gcpass@0.01,gcpass@misspelt"
    status, result = run(gpu_check, tmp_path, "--models", "llama", "--rows", rows)
    _, infeasible, misspelt = result["rows"]
    assert infeasible["status"] == "infeasible"
    assert infeasible["broken"] == []
    assert misspelt["status"] == "failed"
    assert "InvalidOptionError" in misspelt["message"]
    assert misspelt["broken"]
    assert status == 1
    assert "BROKE one in 1" in capsys.readouterr().out


@pytest.mark.usefixtures("wrong_backward")
def test_wrong_gradients_are_seen(gpu_check: ModuleType, tmp_path: Path) -> None:
    rows = "inductor,gcpass@none"
    status, result = run(gpu_check, tmp_path, "--models", "llama", "--rows", rows)
    assert status == 1
    assert "off by" in result["rows"][1]["broken"][0]


def test_what_there_is_no_time_for_is_named(
    gpu_check: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = ["--rows", "inductor,gcpass@block", "--time-limit", "0"]
    status, result = run(gpu_check, tmp_path, *rows)
    assert status == 0
    assert [row["status"] for row in result["rows"]] == 4 * ["skipped"]
    assert result["rows"][0]["message"] == "no time is left"
    assert '"block" was not measured' in result["rows"][1]["message"]
    out = capsys.readouterr().out
    assert "in 0 rows; 2 were skipped" in out
    assert "gcpass@block  skipped" in out


def test_a_row_that_fails_while_it_is_timed(
    gpu_check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed = gpu_check.take_turns

    def break_one(subject: Any, *arguments: Any) -> Any:
        subject.steps["inductor"] = lambda: 1 / 0
        return timed(subject, *arguments)

    monkeypatch.setattr(gpu_check, "take_turns", break_one)
    rows = ["--rows", "eager,inductor", "--models", "vit"]
    status, result = run(gpu_check, tmp_path, *rows)
    eager, inductor = result["rows"]
    assert status == 0  # it is none of gcpass's
    assert inductor["message"] == "ZeroDivisionError: division by zero"
    assert eager["status"] == "measured"
    assert len(eager["seconds"]) == 2
    assert eager["ratio"] is None


def measured(report: ModuleType, name: str, **changed: Any) -> Any:
    """Return a row that keeps its promises, but for what is changed."""
    figures = {
        "status": "measured",
        "budget_bytes": 1000,
        "peak_bytes": 1000,
        "requested_bytes": 1000,
        "error": 0.01,
        "worst_error": 0.02,
        "worst_name": "weight",
    }
    return report.Row(model="llama", name=name, **{**figures, **changed})


@pytest.mark.parametrize(
    ("changed", "broken"),
    [
        ({}, ""),
        ({"peak_bytes": 1010}, ""),  # the allocator rounds up
        ({"peak_bytes": 1011}, "peak is 101.1 %"),
        ({"peak_bytes": 1001, "requested_bytes": 1001}, "peak is 100.1 %"),
        ({"peak_bytes": 2000, "requested_bytes": 2000, "budget_bytes": None}, ""),
        ({"error": 0.021}, "gradients off by 2.1e-02, allowed 2.0e-02"),
        ({"error": float("nan")}, "gradients off by nan"),
        ({"worst_error": 0.041}, "weight off by"),
        ({"status": "failed"}, "failed"),
        ({"status": "infeasible"}, ""),
        ({"status": "skipped"}, ""),
    ],
)
def test_judge(gpu_report: ModuleType, changed: dict[str, Any], broken: str) -> None:
    # Inductor may be as wrong as it likes, and is never judged itself.
    yardstick = measured(gpu_report, "inductor", peak_bytes=5000)
    row = measured(gpu_report, "gcpass@0.5", **changed)
    assert gpu_report.judge([yardstick, row]) == bool(broken)
    assert yardstick.broken == []
    assert len(row.broken) == bool(broken)
    assert broken in "".join(row.broken)


def test_without_a_yardstick_nothing_is_right(gpu_report: ModuleType) -> None:
    row = measured(gpu_report, "gcpass@0.5")
    assert gpu_report.judge([row]) == 1
    assert "no yardstick" in row.broken[0]
