"""Checks one program at its budgets; what is wrong with it comes back as a report."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from dataclasses import dataclass

from tests.fuzz.generate import LONGEST, generate
from tests.fuzz.minimize import minimize
from tests.fuzz.oracle import (
    Budget,
    Fault,
    InvalidProgramError,
    Reference,
    compare,
    reference,
)
from tests.fuzz.program import Program

LOWEST_RATIO = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A fault and the program that shows it."""

    seed: int
    budget: Budget
    fault: Fault
    program: Program

    def __str__(self) -> str:
        return f"seed {self.seed}, budget {self.budget!r}: {self.fault}"


def budgets_of(seed: int) -> list[Budget]:
    """Return the budgets that the program of a seed is run at."""
    rng = random.Random(f"budgets {seed}")
    ratio = round(rng.uniform(LOWEST_RATIO, 1.0), 2)
    return [ratio, "min", None] if rng.random() < 0.2 else [ratio, "min"]


def plans_of(seed: int) -> list[Budget]:
    """Return a random plan for the program of a seed, see `tests.fuzz.plans`."""
    return [f"plan {seed}"]


def check(
    seed: int,
    budgets: Sequence[Budget],
    *,
    longest: int = LONGEST,
    **options: object,
) -> Finding | None:
    """Return what is wrong with the program of a seed, None if nothing is."""
    program, expected = generate(seed, longest)
    for budget in budgets:
        used: Budget = budget
        try:
            floor = compare(program, expected, budget, **options)
            if floor is not None:  # the error promises that this much is enough
                used = floor
                compare(program, expected, floor, **options)
        except Fault as fault:
            return Finding(seed=seed, budget=used, fault=fault, program=program)
    return None


def smallest(finding: Finding, **options: object) -> Finding:
    """Return the finding with a program that is as small as it gets."""
    budget = finding.budget
    last = [finding.fault]

    def fails(program: Program) -> bool:
        try:
            expected: Reference = reference(program)
        except InvalidProgramError:
            return False
        fault = _fault(program, expected, budget, **options)
        if fault is None or fault.kind != finding.fault.kind:
            return False
        last[0] = fault
        return True

    program = minimize(finding.program, fails)
    return dataclasses.replace(finding, program=program, fault=last[0])


def _fault(
    program: Program, expected: Reference, budget: Budget, **options: object
) -> Fault | None:
    try:
        compare(program, expected, budget, **options)
    except Fault as fault:
        return fault
    return None


SCRIPT = """
import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


{source}


def train(module, function):
    seen = []
    for step in range({steps}):
        torch.manual_seed(10 + step)
        given = arguments()
        torch.manual_seed(100 + step)
        outputs = function(*given)
        loss = sum((outputs[i].float() * 1.5).sum() for i in {losses})
        for i in range({backwards}):
            loss.backward(retain_graph=i < {backwards} - 1)
        seen += [*outputs, *(p.grad for p in module.parameters())]
        seen += [x.grad for x in given if x.is_leaf]
    return [*seen, *module.buffers()]


torch.manual_seed(1)
model = Program().train({training})
ours = copy.deepcopy(model)
options = {{"memory_budget": {budget!r}, "codegen": "eager"}}
compiled = torch.compile(ours, backend="gcpass", options=options)
for want, got in zip(train(model, model), train(ours, compiled)):
    print(want is None or float((want - got).abs().max()), want is None or want.shape)
"""


def script(finding: Finding) -> str:
    """Return the finding's program as a file that shows the differences."""
    program = finding.program
    return f"# {finding}"[:400].replace("\n", " ") + SCRIPT.format(
        source=program.source(),
        steps=program.steps,
        losses=program.losses,
        backwards=program.backwards,
        training=program.training,
        budget=finding.budget,
    )
