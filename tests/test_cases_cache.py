"""The identity of a plan: what decides it is part of every cache key.

pytorch#171601, pytorch#170739: a changed solver or estimator gets a stale result. Hits
and misses of the caches themselves are in test_cache.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import gcpass
from gcpass import cost, custom_partitioner
from gcpass.options import Options
from gcpass.solvers.shares import Share


@pytest.fixture
def formula() -> Iterator[None]:
    gcpass.register_cost("gcpass_tests::priced", lambda x, out: x.numel())
    yield
    cost.unregister_cost("gcpass_tests::priced")


def identity() -> str:
    """Return what a partitioner's plans are filed under."""
    made = gcpass.partitioner(memory_budget="min").uuid()
    assert isinstance(made, str)
    return made


def test_c23_a_cost_formula_changes_the_identity(
    request: pytest.FixtureRequest,
) -> None:
    before = identity()
    request.getfixturevalue("formula")
    priced = identity()
    gcpass.register_cost("gcpass_tests::priced", lambda x, out: 2 * x.numel())
    assert len({before, priced, identity()}) == 3
    cost.unregister_cost("gcpass_tests::priced")
    assert identity() == before


def test_c23_code_of_gcpass_and_torch_change_the_identity(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = identity()
    monkeypatch.setattr(custom_partitioner, "_sources", "another version")
    other = identity()
    monkeypatch.undo()
    assert identity() == before != other
    monkeypatch.setattr(torch, "__version__", "2.12.0")
    assert identity() != before


def test_c23_the_share_of_a_step_changes_the_identity() -> None:
    options = Options(memory_budget="1GiB")
    numbers: dict[str, Any] = {
        **{"peak_bytes": 3, "held_bytes": 1, "others_bytes": 0, "executions": 2},
        **{"cost_seconds": 1.0, "plan": None},
    }
    keys = [
        custom_partitioner.Partitioner(options, share).uuid()
        for share in (None, Share(**numbers), Share(**{**numbers, "held_bytes": 2}))
    ]
    assert len(set(keys)) == 3
    assert keys[0] == custom_partitioner.Partitioner(options).uuid()
