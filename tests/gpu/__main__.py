"""``python -m tests.gpu``: a table of all cases at all budgets."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.gpu.models import CASES
from tests.gpu.run import results_of


def main() -> None:
    """Print the table, of the cases named on the command line or of all."""
    print(
        f"{'':8} {'budget':>6} {'recomputed':>10} {'kernels':>9} {'sm_80':>6}"
        f" {'sm_90':>6} {'error':>8} {'of':>9} {'predicted':>9}"
        f" {'scheduled':>9} {'counted':>9}"
    )
    for case in sys.argv[1:] or CASES:
        with tempfile.TemporaryDirectory() as folder:
            for result in results_of(case, Path(folder)):
                print(_row(case, result), flush=True)


def _row(case: str, result: dict[str, Any]) -> str:
    forward, backward = result["kernels"]
    code = result["machine_code"]
    return (
        f"{case:8} {result['budget']!s:>6} {result['recomputations']:10}"
        f" {f'{forward} + {backward}':>9} {code['80']:6} {code['90']:6}"
        f" {result['error']:8.1e} {result['budget_bytes'] or '-':>9}"
        f" {result['predicted_bytes']:9} {result['scheduled_bytes'] or '-':>9}"
        f" {result['counted_bytes']:9}"
    )


if __name__ == "__main__":
    main()
