"""Builds a sequence for a memory cap: saved set, just-in-time recomputation, eviction.

The forward runs in the given order. In the backward every operation that depends on
a tangent runs in the given order, and what it reads is recomputed just before, from
whatever is alive. When the next execution would exceed the cap, values that can be
rebuilt are evicted, those with the least

    seconds to rebuild / (bytes * operations until the next need)

first: the rule of dynamic tensor rematerialization (Kirisame et al. 2021, "Dynamic
Tensor Rematerialization", arXiv:2006.09616) with the future known instead of guessed
from staleness. A value may be evicted and rebuilt any number of times, so the method
goes on where one copy of each value is not enough (chains: sqrt(L) and deeper).

Values of fusible operations are not kept for absorbing readers: each of these runs
the pointwise chain again in its own kernel (`gcpass.solvers.liveness`, rule 3).
Repeats that turn out to be unnecessary are removed by `gcpass.solvers.polish`.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from gcpass.solvers.liveness import INLINE_READS_MANY, INLINE_READS_SINGLE
from gcpass.solvers.problem import OpId, Origin, Phase, Problem, ValueId

_NEVER = 1 << 60  # a position after every other


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """What every run on one problem needs: computed once.

    Attributes:
        writer: value -> operation, -1 for inputs and tangents.
        size: value -> bytes, 0 for inputs.
        forward: FORWARD operations in order.
        primary: operations that the backward runs in the given order: BACKWARD ones
            that materialize something and EITHER ones that must run.
        late: tangent-independent operations in order, as (id, reads, writes, seconds,
            recomputable, may run in the backward for the first time).
        chain: primary operation -> BACKWARD operations computed inside its kernel.
        reads: primary operation -> values read by it and its chain.
        needs: value -> positions of the primary operations that read it, ascending;
            positions count the forward first.
        late_readers: value -> tangent-independent operations that read it.
    """

    writer: tuple[int, ...]
    size: tuple[int, ...]
    forward: tuple[int, ...]
    primary: tuple[int, ...]
    late: tuple[
        tuple[int, tuple[ValueId, ...], tuple[ValueId, ...], float, bool, bool], ...
    ]
    chain: dict[int, tuple[int, ...]]
    reads: dict[int, tuple[int, ...]]
    needs: tuple[tuple[int, ...], ...]
    late_readers: tuple[tuple[int, ...], ...]


def index_problem(problem: Problem) -> Index:
    """Return the `Index` of a problem in O(operations * arity)."""
    ops, values = problem.operations, problem.values
    writer = tuple(-1 if w is None else int(w) for w in problem.writers())
    virtual = _static_virtual(problem, Phase.BACKWARD)
    forward = [i for i, op in enumerate(ops) if op.phase is Phase.FORWARD]
    primary = [
        i
        for i, op in enumerate(ops)
        if (op.phase is Phase.BACKWARD and i not in virtual)
        or (
            op.phase is Phase.EITHER
            and (not op.writes or any(values[v].held for v in op.writes))
        )
    ]
    chain, reads = {}, {}
    needs: list[list[int]] = [[] for _ in values]
    for position, op_id in enumerate(primary, start=len(forward)):
        inner, outer = _expand(problem, writer, virtual, op_id)
        chain[op_id], reads[op_id] = tuple(sorted(inner)), tuple(sorted(outer))
        for value in reads[op_id]:
            needs[value].append(position)
    return Index(
        writer=writer,
        size=tuple(v.size_bytes if v.origin is not Origin.INPUT else 0 for v in values),
        forward=tuple(forward),
        primary=tuple(primary),
        late=tuple(
            (
                i,
                op.reads,
                op.writes,
                op.cost_seconds,
                op.recomputable,
                op.phase is Phase.EITHER,
            )
            for i, op in enumerate(ops)
            if op.phase is not Phase.BACKWARD
        ),
        chain=chain,
        reads=reads,
        needs=tuple(tuple(n) for n in needs),
        late_readers=tuple(
            tuple(int(r) for r in ids if ops[r].phase is not Phase.BACKWARD)
            for ids in problem.readers()
        ),
    )


def _static_virtual(
    problem: Problem, phase: Phase, stored: frozenset[int] = frozenset()
) -> frozenset[int]:
    """Return fusible operations of a phase that need no memory in the given order."""
    ops, readers = problem.operations, problem.readers()
    origins = [v.origin for v in problem.values]
    drawn: dict[int, frozenset[int]] = {}  # virtual value -> materialized sources
    virtual = set()
    for op_id, op in enumerate(ops):
        if op.phase is not phase or not op.fusible or not op.recomputable:
            continue
        inside = [r for v in op.writes for r in readers[v] if ops[r].phase is phase]
        if phase is Phase.BACKWARD and not inside:
            continue
        if not all(ops[r].absorbing for r in inside):
            continue
        if any(problem.values[v].held or v in stored for v in op.writes):
            continue
        sources: set[int] = set()
        for value in op.reads:
            if origins[value] is not Origin.INPUT:
                sources |= drawn.get(value, frozenset((value,)))
        if len(sources) <= (
            INLINE_READS_SINGLE if len(inside) == 1 else INLINE_READS_MANY
        ):
            virtual.add(op_id)
            drawn.update((v, frozenset(sources)) for v in op.writes)
    return frozenset(virtual)


def _expand(
    problem: Problem, writer: Sequence[int], virtual: frozenset[int], op_id: int
) -> tuple[set[int], set[int]]:
    """Return (virtual operations, other values) that the operation draws on."""
    inner: set[int] = set()
    outer: set[int] = set()
    stack = list(problem.operations[op_id].reads)
    while stack:
        value = stack.pop()
        producer = writer[value]
        if producer not in virtual:
            outer.add(value)
        elif producer not in inner:
            inner.add(producer)
            stack.extend(problem.operations[producer].reads)
    return inner, outer


def build(
    problem: Problem, index: Index, saved: Iterable[int], cap_bytes: float
) -> tuple[tuple[OpId, ...], int]:
    """Return (sequence, boundary) of a plan that aims at ``cap_bytes``.

    Args:
        problem: the problem.
        index: its `index_problem`.
        saved: values that may live across the boundary; others are dropped unless
            they cannot be recomputed.
        cap_bytes: bytes alive that the plan should not exceed. It is an aim: what
            cannot be evicted stays, so the caller looks at the simulated peak.
    """
    run = _Run(problem=problem, index=index, cap=cap_bytes, saved=frozenset(saved))
    run.forward()
    boundary = len(run.sequence)
    run.backward()
    return tuple(OpId(o) for o in run.sequence), boundary


@dataclass(slots=True, kw_only=True)
class _Run:
    """The state of one `build`. `alive` is a set that remembers insertion order."""

    problem: Problem
    index: Index
    cap: float
    saved: frozenset[int]
    sequence: list[int] = field(default_factory=list)
    alive: dict[int, None] = field(default_factory=dict)
    alive_bytes: int = 0
    position: int = 0
    ran: set[int] = field(default_factory=set)
    uses: dict[int, int] = field(default_factory=dict)  # reads left in this chain
    last_use: dict[int, int] = field(default_factory=dict)  # place in the forward
    place: int = 0
    next_need: list[int] = field(default_factory=list)  # value -> primary position

    def __post_init__(self) -> None:
        self.next_need = [n[0] if n else _NEVER for n in self.index.needs]

    # --- forward ------------------------------------------------------------------

    def forward(self) -> None:
        """Run the forward and the late operations whose values it shall save."""
        ops, index = self.problem.operations, self.index
        virtual = _static_virtual(self.problem, Phase.FORWARD, self.saved)
        steps = self._forward_steps()
        reads = {
            o: _expand(self.problem, index.writer, virtual - {o}, o)[1] for o in steps
        }
        for place, op_id in enumerate(steps):
            if op_id not in virtual:
                self.last_use.update((v, place) for v in sorted(reads[op_id]))
        for self.place, op_id in enumerate(steps):
            if op_id in virtual:
                self._record(op_id)
                continue
            self.position = min(self.place, len(index.forward))
            self._execute(op_id)
            for value in (*sorted(reads[op_id]), *ops[op_id].writes):
                over = self.last_use.get(value, -1) <= self.place
                if over and not self._may_cross(value):
                    self._remove(value)
        self.last_use = {}
        self.position = len(index.forward)

    def _forward_steps(self) -> list[int]:
        """Return FORWARD operations in order, late ones behind what they read."""
        ops, writer = self.problem.operations, self.index.writer
        chosen: set[int] = set()
        stack = [writer[v] for v in sorted(self.saved) if writer[v] >= 0]
        while stack:
            op_id = stack.pop()
            if op_id not in chosen and ops[op_id].phase is Phase.EITHER:
                chosen.add(op_id)
                stack.extend(w for v in ops[op_id].reads if (w := writer[v]) >= 0)
        place = {op_id: i for i, op_id in enumerate(self.index.forward)}
        for op_id in sorted(chosen):
            sources = [w for v in ops[op_id].reads if (w := writer[v]) >= 0]
            place[op_id] = max((place[w] for w in sources), default=0)
        return sorted(place, key=lambda o: (place[o], o in chosen, o))

    def _may_cross(self, value: int) -> bool:
        """Whether a value stays alive into the backward."""
        data = self.problem.values[value]
        if data.held or value in self.saved:
            return True
        producer = self.index.writer[value]
        if producer < 0 or self.problem.operations[producer].recomputable:
            return False
        return self._wanted_late(value)

    def _wanted_late(self, value: int) -> bool:
        """Whether the backward may read a value, itself or to recompute others."""
        return bool(self.index.needs[value]) or any(
            self._can_run(o) for o in self.index.late_readers[value]
        )

    def _can_run(self, op_id: int) -> bool:
        op = self.problem.operations[op_id]
        return op.recomputable or (op.phase is Phase.EITHER and op_id not in self.ran)

    # --- backward -----------------------------------------------------------------

    def backward(self) -> None:
        """Run the backward, recomputing what it needs just in time."""
        for value, data in enumerate(self.problem.values):
            if data.origin is Origin.TANGENT:
                self._add(value)
        over = self.alive_bytes + self.problem.between_bytes - self.cap
        if over > 0:
            self._evict(over)
        for op_id in self.index.primary:
            if op_id not in self.ran:
                self._run_primary(op_id)
            self.position += 1
            for value in self.index.reads[op_id]:
                needs = self.index.needs[value]
                at = bisect_left(needs, self.position)
                self.next_need[value] = needs[at] if at < len(needs) else _NEVER

    def _run_primary(self, op_id: int) -> None:
        index = self.index
        inner = index.chain[op_id]
        missing = self._missing(index.reads[op_id])
        steps = self._steps(op_id, missing, inner)
        self.uses = {}
        for _, step_reads in steps:
            for value in step_reads or ():
                self.uses[value] = self.uses.get(value, 0) + 1
        for step, step_reads in steps:
            if step_reads is None:
                self._record(step)
                continue
            if step == op_id:
                for virtual in inner:
                    self._record(virtual)
            self._execute(step)
            for value in step_reads:
                self.uses[value] -= 1
                if not self.uses[value]:
                    del self.uses[value]
                    self._drop_if_over(value)
        for value in self.problem.operations[op_id].writes:
            self._drop_if_over(value)

    def _missing(self, values: Iterable[int]) -> list[int]:
        """Return the operations to run so that all values are there, ascending."""
        found: set[int] = set()
        stack = list(values)
        while stack:
            value = stack.pop()
            producer = self.index.writer[value]
            if producer >= 0 and value not in self.alive and producer not in found:
                found.add(producer)
                stack.extend(self.problem.operations[producer].reads)
        return sorted(found)

    def _steps(
        self, op_id: int, missing: list[int], inner: tuple[int, ...]
    ) -> list[tuple[int, tuple[int, ...] | None]]:
        """Return (operation, materialized values it draws on), None for a virtual one.

        A missing fusible operation is virtual when all that read it here absorb it.
        """
        ops = self.problem.operations
        kernel: set[int] = set()  # values that some reader needs in memory
        for reader in (*missing, *inner, op_id):
            if not ops[reader].absorbing:
                kernel.update(ops[reader].reads)
        drawn: dict[int, tuple[int, ...]] = {}
        steps: list[tuple[int, tuple[int, ...] | None]] = []
        for step in missing:
            op = ops[step]
            sources = self._sources(op.reads, drawn)
            if op.fusible and not any(v in kernel for v in op.writes):
                drawn.update((v, sources) for v in op.writes)
                steps.append((step, None))
                continue
            steps.append((step, sources))
        steps.append((op_id, self._sources(self.index.reads[op_id], drawn)))
        return steps

    def _sources(
        self, values: Iterable[int], drawn: dict[int, tuple[int, ...]]
    ) -> tuple[int, ...]:
        result: dict[int, None] = {}
        for value in values:
            result.update((v, None) for v in drawn.get(value, (value,)))
        return tuple(result)

    # --- memory -------------------------------------------------------------------

    def _record(self, op_id: int) -> None:
        self.sequence.append(op_id)
        self.ran.add(op_id)

    def _execute(self, op_id: int) -> None:
        op = self.problem.operations[op_id]
        more = op.workspace_bytes + sum(
            self.index.size[v] for v in op.writes if v not in self.alive
        )
        if self.alive_bytes + more > self.cap:
            self._evict(self.alive_bytes + more - self.cap)
        self._record(op_id)
        for value in op.writes:
            self._add(value)

    def _add(self, value: int) -> None:
        if value not in self.alive:
            self.alive[value] = None
            self.alive_bytes += self.index.size[value]

    def _remove(self, value: int) -> None:
        if value in self.alive:
            del self.alive[value]
            self.alive_bytes -= self.index.size[value]

    def _drop_if_over(self, value: int) -> None:
        """Drop a tangent or a value of the backward after its last reader."""
        producer = self.index.writer[value]
        dependent = (
            producer < 0 or self.problem.operations[producer].phase is Phase.BACKWARD
        )
        if dependent and not self.problem.values[value].held:
            needs = self.index.needs[value]
            if not needs or needs[-1] <= self.position:
                self._remove(value)

    def _evict(self, excess: float) -> None:
        """Drop alive values worth ``excess`` bytes, the cheapest to rebuild first."""
        if not any(map(self._evictable, self.alive)):
            return
        need = self._next_needs(self._staying())
        for value in list(self.alive):
            if need[value] == _NEVER and self._evictable(value):
                self._remove(value)
                excess -= self.index.size[value]
        if excess <= 0:
            return
        # Only now: what was just dropped rebuilds nothing.
        rebuild = self._rebuild_seconds(self._staying())
        ranked = []
        for value in self.alive:
            if rebuild[value] != math.inf and self._evictable(value):
                distance = need[value] - self.position + 1
                price = rebuild[value] / (self.index.size[value] * distance)
                ranked.append((price, value))
        for _, value in sorted(ranked):
            if excess <= 0:
                return
            self._remove(value)
            excess -= self.index.size[value]

    def _evictable(self, value: int) -> bool:
        """Whether dropping an alive value frees bytes and is allowed now."""
        producer = self.index.writer[value]
        return (
            self.index.size[value] > 0
            and producer >= 0
            and value not in self.uses
            and self.last_use.get(value, -1) < self.place
            and not self.problem.values[value].held
            and self.problem.operations[producer].phase is not Phase.BACKWARD
        )

    def _staying(self) -> Mapping[int, None]:
        """Return the alive values that the backward will find alive.

        In the forward some are alive only until their last reader there.
        """
        if not self.last_use:
            return self.alive
        return {v: None for v in self.alive if self._may_cross(v)}

    def _next_needs(self, alive: Mapping[int, None]) -> list[int]:
        """Return, per value, the position of the next need of it or of its heirs."""
        ran = self.ran
        need = self.next_need.copy()
        for op_id, reads, writes, _, recomputable, either in reversed(self.index.late):
            if not recomputable and (not either or op_id in ran):
                continue
            soonest = _NEVER
            for value in writes:
                if need[value] < soonest and value not in alive:
                    soonest = need[value]
            if soonest != _NEVER:
                for value in reads:
                    if need[value] > soonest:
                        need[value] = soonest
        return need

    def _rebuild_seconds(self, alive: Mapping[int, None]) -> list[float]:
        """Return, per value, the time to rebuild it from what is alive."""
        writer, ran = self.index.writer, self.ran
        seconds = [0.0] * len(self.problem.values)
        for op_id, reads, writes, cost, recomputable, either in self.index.late:
            total = cost
            if not recomputable and (not either or op_id in ran):
                total = math.inf
            else:
                for value in reads:
                    if value not in alive and writer[value] >= 0:
                        total += seconds[value]
            for value in writes:
                seconds[value] = total
        return seconds
