"""``python -m tests.fuzz --programs 2000 --seed 0``: fuzz without an end in sight.

Each fault is printed as a small self-contained program, after minimization. The exit
status is the number of faults that torch's own capture does not have, at most 100.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings

import torch

from tests.fuzz.check import Finding, budgets_of, check, plans_of, script, smallest
from tests.fuzz.oracle import Fault, InvalidProgramError, compare, reference


def main() -> int:
    """Run the programs of some seeds and print what is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    parser.add_argument("--codegen", default="eager", choices=["eager", "inductor"])
    parser.add_argument("--plans", action="store_true", help="random plans, no solver")
    parser.add_argument("--as-found", action="store_true", help="do not minimize")
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    options: dict[str, object] = {"codegen": given.codegen}
    if given.codegen == "inductor":
        options["fallback_random"] = True  # the same draws as in eager
    faults, started = 0, time.monotonic()
    for seed in range(given.seed, given.seed + given.programs):
        budgets = plans_of(seed) if given.plans else budgets_of(seed)
        finding = check(seed, budgets, **options)
        if finding is not None:
            judged = _judged_by_torch(finding)
            faults += judged.endswith("right")
            print(f"=== {finding}"[:700], flush=True)
            print(judged)
            if not given.as_found and judged.endswith("right"):
                finding = smallest(finding, **options)
                print(script(finding), _judged_by_torch(finding))
        if seed % 20 == 19:
            minutes = (time.monotonic() - started) / 60
            print(f"# seed {seed}, {faults} faults, {minutes:.1f} min", flush=True)
    return min(faults, 100)


def _judged_by_torch(finding: Finding) -> str:
    """Say whether torch's own capture, without gcpass, fails as well.

    Decomposed, too: random numbers go into a tensor that is not contiguous in another
    order than in eager.
    """
    try:
        expected = reference(finding.program)
    except InvalidProgramError as error:
        return f"# eager itself is not reproducible: {error}"[:300]
    for backend in ("aot_eager", "aot_eager_decomp_partition"):
        try:
            compare(finding.program, expected, None, backend=backend)
        except Fault as fault:
            return f"# {backend} fails as well: {fault}"[:300]
    return "# aot_eager is right"


if __name__ == "__main__":
    sys.exit(main())
