"""The store: the process's plans, sidecars beside the cache, dumps that never clash."""

from __future__ import annotations

import dataclasses
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gcpass import store
from gcpass.decisions import RegionPlan

PLAN = RegionPlan(
    region="0/0",
    requested="min",
    budget_bytes=None,
    others_bytes=0,
    executions=1,
    fastest_peak_bytes=5,
    fastest_held_bytes=4,
    floor_bytes=1,
    predicted_peak_bytes=2,
    scheduled_peak_bytes=2,
    scheduled_note="",
    saved_bytes=1,
    held_bytes=1,
    overhead=0.5,
    overhead_flops=0.5,
    bound=0.25,
    gap_points=25.0,
    solver="cut",
    termination="feasible",
    limit=None,
    rounds=1,
    solve_time_s=0.1,
    verify_time_s=0.1,
    recomputations=3,
    digest="0123456789" * 6 + "abcd",
    values=(),
)


def changed(**fields: Any) -> RegionPlan:
    return dataclasses.replace(PLAN, **fields)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Give every test a cache folder and a registry of its own."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    before = store.plans()
    store.clear()
    yield tmp_path / "cache"
    store.clear()
    for plan in before:
        store.record(plan)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_plans_come_in_order_until_cleared() -> None:
    store.record(PLAN)
    earlier = store.plans()
    store.record(changed(region="0/1"))
    assert earlier == (PLAN,)
    assert [plan.region for plan in store.plans()] == ["0/0", "0/1"]
    store.clear()
    assert store.plans() == ()


def test_threads_lose_no_plan() -> None:
    def record_many() -> None:
        for _ in range(200):
            store.record(PLAN)
            store.plans()

    threads = [threading.Thread(target=record_many) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(store.plans()) == 800


# Sidecars.


def test_sidecar_round_trip(cache: Path) -> None:
    assert store.sidecar_path("k") == cache / "gcpass" / "k.json"
    assert store.load_sidecar("k") is None
    store.save_sidecar("k", PLAN)
    assert store.load_sidecar("k") == PLAN
    store.save_sidecar("k", changed(rounds=9))
    assert store.load_sidecar("k") == changed(rounds=9)
    assert names(cache / "gcpass") == ["k.json"]


def test_a_failed_write_leaves_the_old_sidecar(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError("no space left")

    store.save_sidecar("k", PLAN)
    for function in ("os.replace", "pathlib.Path.write_text"):
        caplog.clear()
        with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "gcpass"):
            patch.setattr(function, lambda *_, **__: full())
            store.save_sidecar("k", changed(rounds=9))
        assert "no space left" in caplog.text
        assert store.load_sidecar("k") == PLAN
        assert names(cache / "gcpass") == ["k.json"]


def test_readers_never_see_a_part(cache: Path) -> None:
    plans = [changed(rounds=n, requested="x" * 100_000) for n in range(2)]
    store.save_sidecar("k", plans[0])
    seen = set()

    def write() -> None:
        for n in range(40):
            store.save_sidecar("k", plans[n % 2])

    writers = [threading.Thread(target=write) for _ in range(2)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        seen.add(store.load_sidecar("k"))
    for writer in writers:
        writer.join()
    assert seen <= set(plans)
    assert names(cache / "gcpass") == ["k.json"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe\xff",
        b"[1]",
        PLAN.to_json().encode()[:-40],
        PLAN.to_json().replace('"schema_version": 1', '"schema_version": 2').encode(),
        PLAN.to_json().replace('"rounds": 1', '"rounds": "1"').encode(),
    ],
)
def test_a_sidecar_that_cannot_be_read_is_ignored(
    content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path = store.sidecar_path("k")
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    with caplog.at_level(logging.WARNING, "gcpass"):
        assert store.load_sidecar("k") is None
    assert f"ignoring the decisions in {path}" in caplog.text


# Dumps.


def test_dump_makes_the_folder_and_names_the_region(tmp_path: Path) -> None:
    path = store.dump(changed(region="[0/1]"), tmp_path / "a" / "b")
    assert path == tmp_path / "a" / "b" / "_0_1__01234567.json"
    assert RegionPlan.from_json(path.read_text()) == changed(region="[0/1]")


@pytest.mark.parametrize("links", [True, False])
def test_dump_overwrites_no_other_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("no hard links here")

    if not links:
        monkeypatch.setattr("os.link", refuse)
    folder = tmp_path / "plan"
    for same in (PLAN, changed(solve_time_s=9.0)):
        assert store.dump(same, str(folder)).name == "0_0_01234567.json"
    assert store.dump(changed(rounds=2), folder).name == "0_0_01234567_2.json"
    (folder / "0_0_01234567_3.json").write_text("mine")
    assert store.dump(changed(rounds=3), folder).name == "0_0_01234567_4.json"
    assert (folder / "0_0_01234567_3.json").read_text() == "mine"
    assert len(names(folder)) == 4
    kept = RegionPlan.from_json((folder / "0_0_01234567.json").read_text())
    assert kept.solve_time_s == PLAN.solve_time_s


def test_dump_that_cannot_be_written_raises(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError):
        store.dump(PLAN, tmp_path / "file")


# Keys.


def test_key_changes_with_everything_that_counts() -> None:
    base = torch.zeros(2, 3)
    inputs: list[list[object]] = [
        [],
        [base],
        [base, base],
        [base.double()],
        [base.t()],
        [torch.zeros(3, 2)],
        [torch.zeros(2, 3, requires_grad=True)],
        [torch.zeros(2, 3, device="meta")],
        [base.to_sparse()],
        [3],
        [3.0],
        ["3"],
    ]
    keys = {store.region_key("f", "g", given) for given in inputs}
    keys |= {store.region_key("fg", "", []), store.region_key("", "fg", [])}
    assert len(keys) == len(inputs) + 2
    assert store.region_key("f", "g", [base + 1]) == store.region_key("f", "g", [base])


def test_key_knows_no_line_numbers() -> None:
    def text(line: int, factor: int) -> str:
        return (
            f"def forward(x):\n    # File: a.py:{line} in f\n\n    y = x * {factor}\n"
        )

    keys = [store.region_key("f", text(*given), []) for given in ((1, 2), (7, 2))]
    assert keys[0] == keys[1] != store.region_key("f", text(1, 3), [])


def test_key_is_the_same_in_every_process() -> None:
    code = (
        "from types import SimpleNamespace as N; from gcpass.store import region_key; "
        "x = N(dtype='float32', shape=(2, 3), device='cpu', requires_grad=True, "
        "stride=lambda: (3, 1)); "
        "print(region_key('f', f'call {object()}', [x, 7, object()]))"
    )
    tensor = SimpleNamespace(
        dtype="float32",
        shape=(2, 3),
        device="cpu",
        requires_grad=True,
        stride=lambda: (3, 1),
    )
    here = store.region_key("f", f"call {object()}", [tensor, 7, object()])
    for seed in ("1", "2"):
        result = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        assert result.stdout.strip() == here
