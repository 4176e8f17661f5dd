"""Runs a case in the two processes that it takes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def results_of(case: str, folder: Path) -> list[dict[str, Any]]:
    """Return what `tests.gpu.interpret` says of a case, one entry for each budget.

    One process lowers the model for a GPU that is not there, the next one runs the
    kernels; Triton decides while it is loaded whether it compiles or interprets.

    Args:
        case: a name in `tests.gpu.models.CASES`.
        folder: for what goes from one process to the other.
    """
    for module in ("lower", "interpret"):
        done = subprocess.run(
            [sys.executable, "-m", f"tests.gpu.{module}", case, str(folder)],
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise RuntimeError(f"{module} {case}:\n{done.stderr[-4000:]}")
    return [json.loads(line) for line in done.stdout.splitlines()]
