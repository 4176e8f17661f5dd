"""Inductor's caches with a budget: hits where nothing changed, never a stale plan.

Processes have different hash seeds and share one cache folder. pytorch#171601: with
partitioners whose ``uuid()`` is None the cache is not skipped, and serves another
budget's code.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = """
import json, sys
import torch
from torch._dynamo.utils import counters
import gcpass

def loss(x, *weights):
    for weight in weights:
        x = torch.tanh(x @ weight)
    return x.square().mean()

torch.manual_seed(0)
x = torch.randn(256, 32)
weights = [torch.randn(32, 32, requires_grad=True) for _ in range(6)]
for options in json.loads(sys.argv[1]):
    torch._dynamo.reset()
    counters.clear()
    for weight in weights:
        weight.grad = None
    torch.compile(loss, backend="gcpass", options=options)(x, *weights).backward()
    got = [w.grad for w in weights]
    for weight in weights:
        weight.grad = None
    loss(x, *weights).backward()
    for mine, weight in zip(got, weights):
        torch.testing.assert_close(mine, weight.grad, rtol=1e-3, atol=1e-6)
    plan = gcpass.plans()[-1]
    print(json.dumps({
        "hits": counters["aot_autograd"]["autograd_cache_hit"],
        "misses": counters["aot_autograd"]["autograd_cache_miss"],
        "bypasses": counters["aot_autograd"]["autograd_cache_bypass"],
        "from_cache": plan.from_cache,
        "digest": plan.digest,
        "recomputations": plan.recomputations,
        "plans": len(gcpass.plans()),
    }))
"""

MIN = {"memory_budget": "min"}


def compile_in_new_process(
    folder: Path, hash_seed: int, *options: dict[str, Any], script: str = SCRIPT
) -> list[dict[str, Any]]:
    """Return what each compilation of one process did, one after the other."""
    environ = {
        **os.environ,
        "PYTHONHASHSEED": str(hash_seed),
        "TORCHINDUCTOR_CACHE_DIR": str(folder),
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
        "TORCHINDUCTOR_AUTOGRAD_CACHE": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", script, json.dumps(options)],
        env=environ,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
@pytest.mark.inductor
def test_c23_hits_and_misses(tmp_path: Path) -> None:
    first, again = compile_in_new_process(tmp_path, 1, MIN, MIN)
    assert (first["hits"], first["misses"], first["bypasses"]) == (0, 1, 0)
    assert not first["from_cache"]
    assert first["recomputations"] > 0
    assert (again["hits"], again["misses"]) == (1, 0)

    # Names of variables do not count, in torch's cache as in that of decisions.
    renamed = SCRIPT.replace("weights", "layers")
    (other,) = compile_in_new_process(tmp_path, 2, MIN, script=renamed)
    assert (other["hits"], other["misses"]) == (1, 0)
    assert other["plans"] == 1
    for hit in (again, other):
        assert hit["from_cache"]
        assert hit["digest"] == first["digest"]

    changed = [
        {"memory_budget": None},
        {**MIN, "solver": "greedy"},
        {**MIN, "time_limit_s": 61.0},
    ]
    for made in compile_in_new_process(tmp_path, 3, *changed):
        assert (made["hits"], made["misses"]) == (0, 1)
        assert not made["from_cache"]
