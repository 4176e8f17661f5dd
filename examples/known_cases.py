"""Runs publicly reported faults of activation planning on torch's planner and gcpass.

    python examples/known_cases.py [C01 C02 ...]

Prints a Markdown table. A cell says whether gradients, losses, buffers and written
inputs are those of eager mode (else the largest relative error), and the measured peak
of a step in % of that of torch.compile without a budget; "over" where more than what
was asked for was used. Asked is, at torch's ratio 0.5, half of that peak, and at
gcpass's 50 % half of the peak of its own fastest plan; where no plan has that little,
gcpass says so ("floor": the result of "min"). Ratio 0 and "min" ask for no number.
(torch's ratio is of the bytes it saves; what runs out on a device is the peak.)

The peak is that of torch's CPU allocator in one forward and backward, beyond what was
alive before; gradients exist before. Everything is compiled with Inductor. Cases run
in processes of their own, torch and gcpass apart; all start from the same seed.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from case_list import CASES, NOT_RUN
from case_models import Case, total
from torch._functorch import config
from torch.autograd.profiler import profile

import gcpass

COLUMNS = {"torch": (1.0, 0.5, 0.0), "gcpass": (0.5, "min")}
HEADS = ("torch, no budget", "torch 0.5", "torch 0", "gcpass 50 %", 'gcpass "min"')
PLANNING_S = 5.0
Result = dict[str, Any]


def main() -> None:
    """Run one case in this process, or all in others and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help="cases; all if none is named")
    parser.add_argument("--here", choices=COLUMNS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    chosen = [c for c in CASES if not given.names or c.name in given.names]
    if given.here:
        for budget in COLUMNS[given.here]:
            print(json.dumps(run(chosen[0], given.here, budget)), flush=True)
        return
    print("| | what goes wrong | " + " | ".join(HEADS) + " |")
    print("|" + "---|" * (len(HEADS) + 2))
    results = [print_row(case) for case in chosen]
    print()
    for number, head in enumerate(HEADS):
        right = sum(bool(row[number].get("right")) for row in results)
        print(f"{head}: {right} of {len(results)} right")
    for name, reason in NOT_RUN.items() if not given.names else ():
        print(f"{name} was not run: {reason}")


def print_row(case: Case) -> list[Result]:
    """Run a case in every way and print its row."""
    results = [result for way in COLUMNS for result in in_process(case, way)]
    base = results[0].get("peak")
    cells = " | ".join(cell(result, base) for result in results)
    print(f"| {case.name} | {case.fault} ({case.report}) | {cells} |", flush=True)
    return results


def in_process(case: Case, way: str) -> list[Result]:
    """Return the results of a case in a new process, one per budget."""
    command = [sys.executable, __file__, case.name, "--here", way]
    done = subprocess.run(command, capture_output=True, text=True)
    found = [json.loads(s) for s in done.stdout.splitlines() if s.startswith("{")]
    missing = len(COLUMNS[way]) - len(found)
    found += [{"failed": f"exit code {done.returncode}"}] * missing
    return [{**found[-1], "floor": True} if "floor" in r else r for r in found]


def cell(result: Result, base: int | None) -> str:
    """Return the text of a cell."""
    if "failed" in result:
        return f"**error: {result['failed']}**"
    words = "right" if result["right"] else f"**wrong ({result['error']:.1g})**"
    if result["again"]:
        words += f", **{result['again']} calls too many**"
    if base:
        words += f", {100 * result['peak'] / base:.0f} %"
    asked = base // 2 if result["asked"] == "half" and base else result["asked"]
    if "floor" in result:
        return f"{words}, floor"
    over = isinstance(asked, int) and result["peak"] > asked
    return f"{words}, **over**" if over else words


def run(case: Case, way: str, budget: float | str) -> Result:
    """Run a case in this process within a budget."""
    warnings.simplefilter("ignore")
    torch._dynamo.reset()
    try:
        return measure(case, way, budget)
    except gcpass.InfeasibleBudgetError:
        return {"floor": True}  # what "min" gives is shown
    except Exception as error:
        return {"failed": type(error).__name__}


def measure(case: Case, way: str, budget: float | str) -> Result:
    """Return a case's error, its peak in bytes, and how much it was to be."""
    torch.manual_seed(0)
    model, inputs = case.make()
    torch.manual_seed(0)
    eager, _ = case.make()
    function = compiled(model, way, budget)
    before = len(gcpass.plans())
    torch.manual_seed(1)
    error = case.error(eager, model, function, inputs)
    expected = observe(eager, inputs)[1] if case.counted else Counter()
    peak, calls = observe(function, inputs)
    asked: int | str | None = "half" if budget == 0.5 and way == "torch" else None
    if way == "gcpass" and budget != "min":
        planned = [p for p in gcpass.plans()[before:] if p.budget_bytes is not None]
        asked = max(p.budget_bytes + p.others_bytes for p in planned)
    return {
        "right": error <= case.tolerance,  # not so where it is NaN
        "error": error,
        "peak": peak,
        "asked": asked,
        "again": max(0, calls[case.counted] - expected[case.counted]),
    }


def compiled(
    model: torch.nn.Module, way: str, budget: float | str
) -> Callable[..., Any]:
    """Return the model, compiled within the budget."""
    if way == "torch":
        config.activation_memory_budget = budget
        return torch.compile(model)
    options = {"memory_budget": budget, "time_limit_s": PLANNING_S}
    return torch.compile(model, backend="gcpass", options=options)


def observe(
    function: Callable[..., Any], inputs: tuple[Any, ...]
) -> tuple[int, Counter[str]]:
    """Return a step's most allocated bytes, and how often each operator was called."""
    total(function(*inputs)).backward()  # gradients exist from now on
    gc.collect()
    with profile(use_cpu=True, profile_memory=True, use_kineto=True) as profiler:
        total(function(*inputs)).backward()
    events = profiler.kineto_results.events()
    names = Counter(e.name() for e in events)
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.nbytes())
    return max(itertools.accumulate(b for _, b in changes)), names


if __name__ == "__main__":
    main()
