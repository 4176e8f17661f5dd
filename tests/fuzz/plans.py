"""Random plans in place of the solver's: any that the checker accepts must be right.

A solver recomputes what is cheap and large. Random plans recompute anything that may
be recomputed, any number of times, in any order that the data allows, so that they try
what the graph rewrite and the rules on recomputation promise, and take no time.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from unittest import mock

from gcpass import partition
from gcpass.solvers.liveness import make_plan
from gcpass.solvers.problem import (
    OpId,
    Origin,
    Phase,
    Plan,
    Problem,
    Solution,
    Termination,
    ValueId,
)

LONGEST = 3  # executions per operation, on average


@contextmanager
def random_plans(seed: int) -> Iterator[None]:
    """Let gcpass take random plans, whatever the budget."""

    def planner(problem: Problem, **_: Any) -> RandomPlanner:
        return RandomPlanner(problem, seed)

    with mock.patch.object(partition, "Planner", planner):
        yield


class RandomPlanner:
    """Stands where gcpass's planner would."""

    def __init__(self, problem: Problem, seed: int) -> None:
        self.problem = problem
        self.seed = seed
        self.deadline = 0.0

    @cached_property
    def fastest(self) -> Plan:
        """The only plan."""
        return random_plan(self.problem, random.Random(f"plan {self.seed}"))

    @property
    def floor(self) -> Plan:
        """The only plan."""
        return self.fastest

    def solve(self, budget_bytes: int | None) -> Solution:
        """Return the only plan."""
        return Solution(
            plan=self.fastest,
            termination=Termination.FEASIBLE,
            bound_seconds=0.0,
            floor_bytes=self.fastest.peak_bytes,
        )


def random_plan(problem: Problem, rng: random.Random) -> Plan:
    """Return a plan that the checker accepts."""
    draft = _Draft(problem=problem, rng=rng, eager=rng.choice([0.1, 0.5, 0.9, 1.0]))
    operations = problem.operations
    forward = {i for i, op in enumerate(operations) if op.phase is Phase.FORWARD}
    for i, op in enumerate(operations):
        ready = all(w in forward for w in map(draft.writer, op.reads) if w is not None)
        if op.phase is Phase.EITHER and ready and rng.random() < 0.5:
            forward.add(i)
    draft.forward(forward)
    boundary = len(draft.sequence)
    draft.cross()
    wanted = {
        i
        for i, op in enumerate(operations)
        if op.phase is Phase.BACKWARD
        or (i not in forward and any(problem.values[v].held for v in op.writes))
    }
    draft.backward(wanted)
    return make_plan(problem, draft.sequence, boundary, "random")


@dataclass(slots=True, kw_only=True)
class _Draft:
    problem: Problem
    rng: random.Random
    eager: float  # probability to recompute what could be read as it is
    sequence: list[OpId] = field(default_factory=list)
    there: set[int] = field(default_factory=set)  # values that can be read
    done: set[int] = field(default_factory=set)  # operations that ran
    writers: tuple[OpId | None, ...] = ()
    sources: list[set[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.writers = self.problem.writers()
        self.sources = self._sources()

    def writer(self, value: ValueId) -> OpId | None:
        """Return the operation that writes a value."""
        return self.writers[value]

    def forward(self, chosen: set[int]) -> None:
        """Run these once, in a random order that keeps that of the draws."""
        fixed = [
            i for i in sorted(chosen) if not self.problem.operations[i].recomputable
        ]
        self._in_random_order(chosen, fixed, self._run)

    def cross(self) -> None:
        """Forget what may not live across the boundary."""
        values = self.problem.values
        self.there = {v for v in self.there if values[v].savable or values[v].held}

    def backward(self, wanted: set[int]) -> None:
        """Run these once or more, recomputing what they read at random."""
        fixed = [
            i for i in sorted(wanted) if not self.problem.operations[i].recomputable
        ]
        self._in_random_order(wanted, fixed, self._run_with_inputs)

    def _in_random_order(self, chosen: set[int], fixed: list[int], run: Any) -> None:
        left, shuffle = set(chosen), self.rng.random() < 0.5
        while left:
            ready = [i for i in sorted(left) if self._may_start(i, left, fixed)]
            op_id = self.rng.choice(ready) if shuffle else ready[0]
            run(OpId(op_id))
            left.discard(op_id)
            if op_id in fixed:
                fixed.remove(op_id)

    def _may_start(self, op_id: int, left: set[int], fixed: list[int]) -> bool:
        if op_id in fixed and op_id != fixed[0]:
            return False
        return not left & self.sources[op_id]

    def _sources(self) -> list[set[int]]:
        """Return every operation that each one needs, itself left out."""
        found: list[set[int]] = []
        for op in self.problem.operations:
            direct = {w for w in map(self.writer, op.reads) if w is not None}
            found.append(direct.union(*(found[w] for w in direct)))
        return found

    def _run(self, op_id: OpId) -> None:
        self.sequence.append(op_id)
        self.done.add(op_id)
        self.there.update(self.problem.operations[op_id].writes)

    def _run_with_inputs(self, op_id: OpId) -> None:
        for value in self.problem.operations[op_id].reads:
            self._provide(value)
        self._run(op_id)

    def _provide(self, value: ValueId) -> None:
        """Make a value readable; recompute it although it is, sometimes."""
        source = self.writers[value]
        if self.problem.values[value].origin is not Origin.COMPUTED or source is None:
            return
        op = self.problem.operations[source]
        again = op.recomputable or source not in self.done
        short = len(self.sequence) < LONGEST * len(self.problem.operations)
        if value in self.there and not (
            again and short and self.rng.random() < self.eager
        ):
            return
        self._run_with_inputs(source)
