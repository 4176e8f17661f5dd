"""The command line: exit codes, and what it prints of a machine and of a dump."""

import io
import json
import sys
from importlib import metadata
from pathlib import Path

import pytest

from gcpass import cli
from gcpass.errors import GcpassError

RECORD = {
    "schema_version": 1,
    "region": "0/0",
    "requested": "12MiB",
    "budget_bytes": 12 * 2**20,
    "others_bytes": 0,
    "executions": 1,
    "fastest_peak_bytes": 20 * 2**20,
    "fastest_held_bytes": 10 * 2**20,
    "floor_bytes": 2**20,
    "predicted_peak_bytes": 3 * 2**20,
    "scheduled_peak_bytes": None,
    "scheduled_note": "not verified",
    "saved_bytes": 2**20,
    "held_bytes": 2**20,
    "overhead": 0.0123456789,
    "overhead_flops": 0.5,
    "bound": 0.0,
    "gap_points": 1.25,
    "solver": "cut",
    "termination": "feasible",
    "limit": None,
    "rounds": 0,
    "solve_time_s": 0.5,
    "verify_time_s": 0.0,
    "recomputations": 25,
    "digest": "0" * 64,
    "from_cache": False,
    "symbolic_peak_bytes": "393216*s77",
    "symbolic_flops": "0",
    "symbolic_note": "",
    "symbols": [
        {
            "name": "s77",
            "planned": 8,
            "source": "L['x'].size()[0]",
            "least": 2,
            "most": None,
            "largest": 32,
        }
    ],
    "values": [
        {
            "name": f"value_{i}",
            "module_path": "h.0" if i % 2 else "",
            "source": "mlp.py:3",
            "shape": [i, 256],
            "dtype": "float32",
            "size_bytes": i * 1024,
            "flops": 0,
            "cost_seconds": 0.0,
            "decision": "recomputed" if i else "input",
            "reason": "cheap [pointwise]",
            "recompute_positions": [],
        }
        for i in range(26)
    ],
}


def write(folder: Path, record: object, name: str = "region.json") -> str:
    path = folder / name
    path.write_text(json.dumps(record))
    return str(path)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"gcpass {metadata.version('gcpass')}\n"


def test_no_command_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main([])
    assert caught.value.code == 2
    assert "COMMAND" in capsys.readouterr().err


def test_doctor_prints_a_line_per_check(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> str:
        raise GcpassError("install it")

    monkeypatch.setattr(cli, "_CHECKS", (("one", lambda: "1.0"),))
    assert cli.main(["doctor"]) == 0
    assert capsys.readouterr().out == "ok      one: 1.0\n"
    monkeypatch.setattr(cli, "_CHECKS", (("two", broken), ("one", lambda: "1.0")))
    assert cli.main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert out == "FAILED  two: install it\nok      one: 1.0\n"


def test_doctor_of_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    # The tests need what the doctor looks for, so it has to be content here.
    assert cli.main(["doctor"]) == 0
    assert capsys.readouterr().out.count("ok ") == len(cli._CHECKS)


def test_show(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["show", write(tmp_path, RECORD)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:5] == [
        "  schema_version: 1",
        "  region: 0/0",
        "  requested: 12MiB",
        "  budget_bytes: 12582912 (12.00 MiB)",
    ]
    assert "  scheduled_peak_bytes: None" in lines
    assert "  overhead: 0.0123457" in lines
    table = lines[len(RECORD) :]
    assert table[0] == "  the 20 largest of 25 values:"
    assert table[1].split() == ["name", "size", "decision", "where", "reason"]
    assert table[2] == "  value_25  25.00 KiB  recomputed  h.0       cheap [pointwise]"
    assert table[3] == "  value_24  24.00 KiB  recomputed  mlp.py:3  cheap [pointwise]"
    assert len(table) == 22
    assert table[-1].startswith("  value_6 ")


def test_show_without_values(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["show", write(tmp_path, {**RECORD, "values": []})]) == 0
    assert "largest" not in capsys.readouterr().out


def test_show_a_folder_in_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("b.json", "a.json"):
        write(tmp_path, RECORD, name)
    assert cli.main(["show", str(tmp_path)]) == 0
    files = [line for line in capsys.readouterr().out.splitlines() if ".json" in line]
    assert [Path(f).name for f in files] == ["a.json:", "b.json:"]


def test_show_on_a_terminal_draws_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr("sys.stdout", terminal)
    assert cli.main(["show", write(tmp_path, RECORD)]) == 0
    assert "│" in terminal.getvalue()
    assert "cheap [pointwise]" in terminal.getvalue()  # not read as markup


def test_show_on_a_terminal_without_rich(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setitem(sys.modules, "rich.table", None)
    assert cli.main(["show", write(tmp_path, RECORD)]) == 0
    assert "  value_25  25.00 KiB" in capsys.readouterr().out


def test_show_complains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.json").write_text("{")
    (tmp_path / "bytes.json").write_bytes(b"\xff")
    array = write(tmp_path, [1], "array.json")
    newer = write(tmp_path, {**RECORD, "schema_version": 2}, "newer.json")
    partial = write(tmp_path, {**RECORD, "values": [{}]}, "partial.json")
    empty = tmp_path / "empty"
    empty.mkdir()
    for path, says in [
        (str(tmp_path / "missing.json"), "cannot read"),
        (str(tmp_path / "text.json"), "cannot read"),
        (str(tmp_path / "bytes.json"), "cannot read"),
        (array, "no decisions of gcpass"),
        (newer, "this gcpass reads version 1"),
        (partial, "values.0.name"),
        (str(empty), "holds no .json file"),
    ]:
        assert cli.main(["show", path]) == 2
        assert says in capsys.readouterr().err
