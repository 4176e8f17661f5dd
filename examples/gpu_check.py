"""Checks on a GPU what gcpass promises: gradients, peak within the budget, step time.

    python examples/gpu_check.py --json gpu.json      # one H200 or the like
    python examples/gpu_check.py --tiny               # small; 7 minutes on 2 CPU cores

Trains a Llama of 1.1 billion parameters (bfloat16 weights) and a ViT-L (float32 weights
under bfloat16 autocast), see gpu_models.py, one step at a time without updates. Rows:

    eager         no compiler
    inductor      torch.compile
    torch@F       torch.compile with activation_memory_budget=F
    block         a checkpoint around every block, then torch.compile
    gcpass@B      gcpass with memory_budget=B; "none", and "block" for the bytes that
                  the row "block" was measured to need

Gradients are compared with those of a float32 copy in eager mode (no TF32), which sees
the batch in pieces. The peak is that of torch's allocator in one step, beyond what was
alive before it; parameters have gradients before it. Times are CUDA events, or the CPU
time of the process, the rows of a model taking turns after a round that is not counted.

The exit status is 1 if gcpass broke a promise, see gpu_report.py. Rows are done in the
order of --rows for all models, the most valuable first; what would not end within the
time limit is skipped, and the table says so. The JSON file is written after every row.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import logging
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from gpu_models import TINY_LLAMA, TINY_VIT, LlamaShape, ViTShape, make_llama, make_vit
from gpu_report import (
    Row,
    described,
    first_line,
    judge,
    print_table,
    set_ratios,
    write_json,
)
from gpu_rows import KINDS, Settings, Subject, measure, on_trial, peak_of, take_turns

import gcpass

MODELS = ("llama", "vit")
ROWS = (
    "eager,inductor,gcpass@0.5,block,gcpass@block,gcpass@none,torch@0.5,gcpass@min,"
    "gcpass@0.3,torch@0.2"
)
MARGIN = 1.25  # times what earlier rows took


class Listener(logging.Handler):
    """Notes what gcpass logs as a warning while it is entered."""

    def __init__(self, notes: list[str]) -> None:
        super().__init__(logging.WARNING)
        self.notes = notes

    def emit(self, record: logging.LogRecord) -> None:
        """Note a message."""
        self.notes.append(first_line(record.getMessage()))

    def __enter__(self) -> None:
        logging.getLogger("gcpass").addHandler(self)

    def __exit__(self, *_: object) -> None:
        logging.getLogger("gcpass").removeHandler(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What is done in this run, and since when (`time.perf_counter`)."""

    given: argparse.Namespace
    subjects: list[Subject] = field(default_factory=list)
    started: float = field(default_factory=time.perf_counter)

    @property
    def rows(self) -> list[Row]:
        """Every row so far."""
        return [row for subject in self.subjects for row in subject.rows]

    def left_s(self) -> float:
        """Return the seconds that are left for rows before the timed rounds."""
        once = sum(row.step_s or 0.0 for row in self.rows)
        rounds = MARGIN * once * (self.given.rounds + 1)
        return float(self.given.time_limit - self.passed_s() - rounds)

    def passed_s(self) -> float:
        """Return the seconds since the start."""
        return time.perf_counter() - self.started

    def estimate_s(self, row: Row) -> float:
        """Return how long a row may take.

        As long as the last like it, if there is one: the first one of all also loads
        libraries and compiles the solver. Else as long as the longest of any.
        """
        done = [r for r in self.rows if r.status != "skipped"]
        like = [r for r in done if r.work == row.work]
        own = [r.row_s for r in like if r.model == row.model]
        longest = max((r.row_s for r in done), default=0.0)
        first = longest + self.given.planning * row.is_ours
        of_others = [r.row_s for r in like]
        return MARGIN * (own or of_others or [first])[-1]


def main(argv: Sequence[str] | None = None) -> int:
    """Run every row that there is time for, print the tables, return the status."""
    run = Run(given=parse_arguments(argv))
    torch.backends.cudnn.allow_tf32 = False  # on by default for convolutions
    if not torch.cuda.is_available():
        torch.set_num_threads(1)  # waiting threads would count as CPU time
    print(f"{device_name()}, torch {torch.__version__}", flush=True)
    run.subjects.extend(prepare(name, run.given) for name in run.given.models)
    for name in run.given.rows:
        for subject in run.subjects:
            subject.rows.append(attempt(run, subject, name))
            save(run, complete=False)
    for number, subject in enumerate(run.subjects):
        left = run.given.time_limit - run.passed_s()
        share = left / (len(run.subjects) - number)
        done = take_turns(subject, run.given.rounds, share)
        print(f"{subject.work.name}: timed {done} of {run.given.rounds} rounds")
        set_ratios(subject.rows)
    status = max(judge(subject.rows) for subject in run.subjects)
    save(run, complete=True)
    for subject in run.subjects:
        print(f"\n{subject.work.name}: {subject.work.about}; MB are 1e6 bytes")
        print_table(subject.rows)
    print(f"\n{verdict(run.rows)} ({run.passed_s():.0f} s)")
    return status


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the command line's arguments, lists split."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tiny", action="store_true", help="small models")
    parser.add_argument("--models", default=",".join(MODELS), help="%(default)s")
    parser.add_argument("--rows", default=ROWS, help="%(default)s")
    parser.add_argument("--layers", type=int, help="other than the models have")
    parser.add_argument("--rounds", type=int, default=7, help="of timed steps")
    parser.add_argument("--time-limit", type=float, default=420.0, metavar="SECONDS")
    parser.add_argument(
        "--planning",
        type=float,
        metavar="SECONDS",
        help="gcpass's time_limit_s; 20, with --tiny 5",
    )
    parser.add_argument(
        "--codegen",
        default="inductor",
        choices=["inductor", "eager"],
        help="eager: gcpass's and torch's partitioner without code generation",
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args(argv)
    given.models, given.rows = given.models.split(","), given.rows.split(",")
    if given.planning is None:
        given.planning = 5.0 if given.tiny else 20.0
    if unknown := set(given.models) - set(MODELS):
        parser.error(f"no such model: {', '.join(sorted(unknown))}")
    if unknown := {r for r in given.rows if r.partition("@")[0] not in KINDS}:
        parser.error(f"no such row: {', '.join(sorted(unknown))}")
    if not given.tiny and not torch.cuda.is_available():
        parser.error("no CUDA device, and the models are large: try --tiny")
    return given


def device_name() -> str:
    """Return the name of what the models run on."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


def prepare(name: str, given: argparse.Namespace) -> Subject:
    """Return a model on trial."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "llama":
        llama = TINY_LLAMA if given.tiny else LlamaShape()
        llama = dataclasses.replace(llama, layers=given.layers or llama.layers)
        return on_trial(make_llama(llama, device))
    vit = TINY_VIT if given.tiny else ViTShape()
    vit = dataclasses.replace(vit, layers=given.layers or vit.layers)
    return on_trial(make_vit(vit, device))


def attempt(run: Run, subject: Subject, name: str) -> Row:
    """Return a row: measured if there is time, or what went wrong."""
    row = Row(model=subject.work.name, name=name)
    row.message = reason_to_skip(run, subject, row)
    if row.message:
        print(f"{row.model} {name}: skipped, {row.message}", flush=True)
        return row
    print(f"{row.model} {name} ...", flush=True)
    settings = Settings(planning_s=run.given.planning, codegen=run.given.codegen)
    started = time.perf_counter()
    with warnings.catch_warnings(record=True) as caught, Listener(row.notes):
        warnings.simplefilter("default")
        try:
            measure(subject, row, settings)
            row.status = "measured"
        except gcpass.InfeasibleBudgetError as error:
            row.status, row.message = "infeasible", first_line(error)
        except Exception as error:  # of any backend; the others go on
            row.status, row.message = "failed", described(error)
    row.warnings = sorted({first_line(w.message) for w in caught})
    row.row_s = time.perf_counter() - started
    gc.collect()  # frames of tracebacks hold tensors
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return row


def reason_to_skip(run: Run, subject: Subject, row: Row) -> str:
    """Return why a row cannot be measured, "" if it can."""
    if row.name == "gcpass@block" and peak_of(subject, "block") is None:
        return 'the row "block" was not measured'
    needed, left = run.estimate_s(row), run.left_s()
    if left <= 0:
        return "no time is left"
    if needed <= left:
        return ""
    return f"needs about {needed:.0f} s, and {left:.0f} s are left"


def verdict(rows: Sequence[Row]) -> str:
    """Return in words how many rows of gcpass were judged, and what came of it."""
    ours = [row for row in rows if row.is_ours]
    judged = [row for row in ours if row.status != "skipped"]
    broken = sum(bool(row.broken) for row in judged)
    kept = f"gcpass kept its promises in {len(judged) - broken} rows"
    lost = f", BROKE one in {broken}" if broken else ""
    return f"{kept}{lost}; {len(ours) - len(judged)} were skipped"


def save(run: Run, *, complete: bool) -> None:
    """Write the JSON file, if one is asked for."""
    if run.given.json is not None:
        about = {subject.work.name: subject.work.about for subject in run.subjects}
        write_json(
            run.given.json,
            run.rows,
            device=device_name(),
            options=vars(run.given),
            models=about,
            seconds=run.passed_s(),
            complete=complete,
        )


if __name__ == "__main__":
    sys.exit(main())
