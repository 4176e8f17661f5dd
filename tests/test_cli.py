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
    "version": 1,
    "region": {"id": "0/0", "operations": 12, "shapes": [[2, 3]]},
    "budget": {"requested": "12MiB", "floor_bytes": 2**20},
    "plan": {"peak_bytes": 3 * 2**20, "overhead": 0.0123456789},
    "values": [
        {
            "name": f"value_{i}",
            "size_bytes": i * 1024,
            "decision": "recomputed",
            "reason": "cheap [pointwise]",
        }
        for i in range(25)
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
    assert lines[1:9] == [
        "  version: 1",
        "  region.id: 0/0",
        "  region.operations: 12",
        "  budget.requested: 12MiB",
        "  budget.floor_bytes: 1048576 (1.00 MiB)",
        "  plan.peak_bytes: 3145728 (3.00 MiB)",
        "  plan.overhead: 0.0123457",
        "  the 20 largest of 25 values:",
    ]
    assert lines[9].split() == ["name", "size", "decision", "reason"]
    assert lines[10] == "  value_24  24.00 KiB  recomputed  cheap [pointwise]"
    assert len(lines) == 30
    assert lines[-1].startswith("  value_5 ")


def test_show_a_folder_in_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("b.json", "a.json"):
        write(tmp_path, {"version": 1}, name)
    assert cli.main(["show", str(tmp_path)]) == 0
    files = [line for line in capsys.readouterr().out.splitlines() if ".json" in line]
    assert [Path(f).name for f in files] == ["a.json:", "b.json:"]


@pytest.mark.parametrize(
    "record",
    [
        {},
        {"values": []},
        {"values": None},
        {"values": [1, {"name": "x"}]},
        {"values": {"x": {"bytes": 5}, "y": 3}},
        {"plan": 3, "region": None, "values": [{"size_bytes": None}]},
    ],
)
def test_show_tolerates_other_shapes(tmp_path: Path, record: object) -> None:
    assert cli.main(["show", write(tmp_path, record)]) == 0


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
    assert "  value_24  24.00 KiB" in capsys.readouterr().out


def test_show_complains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.json").write_text("{")
    array = write(tmp_path, [1], "array.json")
    empty = tmp_path / "empty"
    empty.mkdir()
    for path, says in [
        (str(tmp_path / "missing.json"), "cannot read"),
        (str(tmp_path / "text.json"), "cannot read"),
        (array, "not a JSON object"),
        (str(empty), "holds no .json file"),
    ]:
        assert cli.main(["show", path]) == 2
        assert says in capsys.readouterr().err
