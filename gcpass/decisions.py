"""What was decided for a region, and why: plain data, JSON, one line for the log.

The JSON form is versioned and described by ``decisions.schema.json``. Bytes, seconds,
peak, floor, overhead, bound and gap mean what they mean everywhere in gcpass: the peak
counts what a step allocates beyond what was alive when its forward started.

Loads no torch: nodes are read by their attributes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, Literal

from gcpass.errors import GcpassError
from gcpass.scopes import module_paths
from gcpass.solvers.liveness import simulate
from gcpass.solvers.problem import Operation, OpId, Origin, Phase, Plan, ValueId
from gcpass.units import format_bytes

if TYPE_CHECKING:
    from gcpass.capture import Capture

__all__ = ["RegionPlan", "ScopeDecision", "ValueDecision"]
__all__ += ["describe_scopes", "describe_values", "plan_digest"]

SCHEMA_VERSION: Final = 1

Decision = Literal["saved", "recomputed", "temporary", "output", "gradient", "input"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueDecision:
    """What happens to one value (a storage) of the joint graph.

    Attributes:
        name: of the node that owns the storage.
        module_path: innermost module that computes it ("transformer.h.0.mlp"); "" for
            the outermost module and where it is unknown.
        source: the user's line that computes it ("gpt2/modeling_gpt2.py:123"), ""
            where it is unknown.
        shape: sizes; a symbolic size is text. () for what is no tensor.
        dtype: "float32"; "" for what is no tensor.
        size_bytes: bytes it takes while it is materialized.
        flops: of one execution of its operation, 0 without one.
        cost_seconds: of one execution of its operation, 0 without one.
        decision: "saved": kept from the forward for the backward; "recomputed":
            computed in the backward although the forward did or could compute it;
            "temporary": used by one of the two only; "output" and "gradient": leave
            the region; "input": comes from outside, tangents included.
        reason: why, for people.
        recompute_positions: indices in the plan's sequence of its executions after the
            first. The first is among them where the backward runs it although the
            forward could.
    """

    name: str
    module_path: str
    source: str
    shape: tuple[int | str, ...]
    dtype: str
    size_bytes: int
    flops: int
    cost_seconds: float
    decision: Decision
    reason: str
    recompute_positions: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScopeDecision:
    """What became of one ``gcpass.region`` or pattern, see `gcpass.scopes`.

    Attributes:
        name: the user's name for it, or the pattern or module path; "" without one.
        requested: the limit or the policy in words.
        limit_bytes: the limit on the bytes it saves, None for a policy.
        fastest_saved_bytes: what it saves without a budget and regions.
        saved_bytes: what it saves; outputs do not count.
    """

    name: str
    requested: str
    limit_bytes: int | None
    fastest_saved_bytes: int
    saved_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionPlan:
    """The plan of one compiled region, in numbers, and what it does to each value.

    Plans are equal when they decide the same: times and the cache do not count.

    Attributes:
        schema_version: of the JSON form.
        region: the compile id, "0/0".
        requested: the budget as the user wrote it.
        budget_bytes: this region's share of it, None for no limit.
        others_bytes: held meanwhile by other executions of regions in the same step.
        executions: how often a step runs the region.
        fastest_peak_bytes: peak of the fastest plan without a budget.
        fastest_held_bytes: what that plan holds between forward and backward.
        floor_bytes: the least peak that gcpass reaches.
        predicted_peak_bytes: peak of the plan.
        scheduled_peak_bytes: peak of the program that will run, None if unknown.
        scheduled_note: why it is unknown, "" when it is known.
        saved_bytes: of the values kept from the forward for the backward.
        held_bytes: alive between forward and backward: saved values and outputs.
        overhead: predicted step time over that of the fastest plan, minus 1.
        overhead_flops: the same for FLOPs.
        bound: no plan within the budget has less overhead (proven).
        gap_points: percentage points between `overhead` and `bound`.
        solver: name of the method that built the plan.
        termination: why the solver stopped.
        limit: the limit that stopped it, None if none did.
        rounds: how often a generated program was read.
        solve_time_s: seconds spent on planning.
        verify_time_s: seconds spent on reading generated programs.
        recomputations: executions beyond the first of each operation.
        digest: equal on all ranks and processes that decided the same.
        from_cache: a compile cache answered; the plan was made earlier.
        scopes: parts with a limit or a policy, in the order of the joint graph.
        values: in the order of the joint graph.
    """

    schema_version: Literal[1] = SCHEMA_VERSION
    region: str
    requested: str
    budget_bytes: int | None
    others_bytes: int
    executions: int
    fastest_peak_bytes: int
    fastest_held_bytes: int
    floor_bytes: int
    predicted_peak_bytes: int
    scheduled_peak_bytes: int | None
    scheduled_note: str
    saved_bytes: int
    held_bytes: int
    overhead: float
    overhead_flops: float
    bound: float
    gap_points: float
    solver: str
    termination: str
    limit: str | None
    rounds: int
    solve_time_s: float = field(compare=False)
    verify_time_s: float = field(compare=False)
    recomputations: int
    digest: str
    from_cache: bool = field(default=False, compare=False)
    scopes: tuple[ScopeDecision, ...] = ()
    values: tuple[ValueDecision, ...]

    @property
    def peak_bytes(self) -> int:
        """The peak that counts: the scheduled one where it is known."""
        if self.scheduled_peak_bytes is None:
            return self.predicted_peak_bytes
        return self.scheduled_peak_bytes

    @property
    def step_peak_bytes(self) -> int:
        """The peak of the step while the region runs."""
        return self.others_bytes + self.peak_bytes

    def as_cached(self, region: str | None = None) -> RegionPlan:
        """Return the plan marked as found in a cache.

        Args:
            region: the compile id in this process; None keeps the recorded one.
        """
        return dataclasses.replace(
            self, from_cache=True, region=self.region if region is None else region
        )

    def summary(self) -> str:
        """Return one line for the log."""
        kind = "predicted" if self.scheduled_peak_bytes is None else "scheduled"
        return ", ".join(
            [
                f"region {self.region}: requested {self.requested}{self._share()}",
                f"{kind} peak {format_bytes(self.peak_bytes)}",
                f"floor {format_bytes(self.floor_bytes)}",
                f"overhead {100 * self.overhead:.1f} % "
                f"(at most {self.gap_points:.1f} points from optimal)",
                f"{self.recomputations} recomputations",
                f"solved in {self.solve_time_s:.1f} s by {self.solver}"
                f"{' (from the cache)' * self.from_cache}",
            ]
        )

    def _share(self) -> str:
        if self.budget_bytes is None:
            return ""
        share = f" = {format_bytes(self.budget_bytes)}"
        if self.others_bytes:
            share += f" beside {format_bytes(self.others_bytes)} of others in the step"
        return share

    def to_json(self) -> str:
        """Return the JSON form, fields in the order above, one line per value.

        Raises:
            ValueError: a number is not finite.
        """
        fields = [
            f"  {_json(n)}: {_json(v)}"
            for n, v in _items(self)
            if n not in ("scopes", "values")
        ]
        scopes = [dict(_items(scope)) for scope in self.scopes]
        fields.append(f'  "scopes": {_json(scopes)}')
        values = ",\n".join(f"    {_json(dict(_items(v)))}" for v in self.values)
        fields.append(f'  "values": [\n{values}\n  ]')
        return "{\n" + ",\n".join(fields) + "\n}\n"

    @staticmethod
    def from_json(text: str) -> RegionPlan:
        """Return the plan that `to_json` wrote; unknown fields are ignored.

        Raises:
            GcpassError: the text is no plan, or one of another schema version.
        """
        try:
            data = json.loads(text)
        except ValueError as error:
            raise GcpassError(f"no decisions of gcpass: {error}") from error
        version = data.get("schema_version") if isinstance(data, dict) else None
        if version is None:
            raise GcpassError("no decisions of gcpass: there is no schema_version")
        if version != SCHEMA_VERSION:
            raise GcpassError(
                f"decisions of schema version {version!r}; this gcpass reads version "
                f"{SCHEMA_VERSION}: use the release that wrote them"
            )
        return _validated(text)


def plan_digest(plan: Plan, names: Sequence[str]) -> str:
    """Return 64 hexadecimal digits, equal in every process for equal decisions.

    Args:
        plan: its sequence and boundary count.
        names: of the saved nodes, in graph order.
    """
    content = json.dumps([plan.boundary, list(plan.sequence), list(names)])
    return hashlib.sha256(content.encode()).hexdigest()


def describe_scopes(capture: Capture, plan: Plan) -> tuple[ScopeDecision, ...]:
    """Return what the plan saves from each scope, in the order of the graph."""
    problem = capture.problem
    instances = simulate(problem, plan.sequence, plan.boundary).instances
    saved = {i.value for i in instances if i.saved}
    return tuple(
        ScopeDecision(
            name=share.scope.name,
            requested=share.scope.requested,
            limit_bytes=share.limit_bytes,
            fastest_saved_bytes=share.fastest_bytes,
            saved_bytes=sum(problem.values[v].size_bytes for v in saved & share.values),
        )
        for share in capture.shares
    )


def describe_values(capture: Capture, plan: Plan) -> tuple[ValueDecision, ...]:
    """Return what the plan does to each value of the problem, by value id."""
    problem = capture.problem
    instances = simulate(problem, plan.sequence, plan.boundary).instances
    saved = {i.value for i in instances if i.saved}
    materialized = {i.value for i in instances if not i.virtual}
    runs = _runs(plan)
    writers, readers = problem.writers(), problem.readers()
    outputs = _forward_outputs(capture)
    decisions = []
    for value_id, value in enumerate(problem.values):
        writer = writers[value_id]
        operation = None if writer is None else problem.operations[writer]
        executed = () if writer is None else runs.get(writer, ())
        fate = _Fate(
            size_bytes=value.size_bytes,
            origin=value.origin,
            is_held=value.held,
            is_output=value_id in outputs,
            must_not_save=_why_not_saved(capture, ValueId(value_id)),
            is_saved=value_id in saved,
            is_inlined=value_id not in materialized,
            is_read=bool(readers[value_id]),
            operation=operation,
            must_save="" if writer is None else capture.reasons[writer] or "",
            executed=executed,
            boundary=plan.boundary,
        )
        decisions.append(_value_decision(capture, ValueId(value_id), writer, fate))
    return tuple(decisions)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fate:
    """What the plan does to one value; `executed` are its operation's positions."""

    size_bytes: int
    origin: Origin
    is_held: bool
    is_output: bool
    must_not_save: str
    is_saved: bool
    is_inlined: bool
    is_read: bool
    operation: Operation | None
    must_save: str
    executed: tuple[int, ...]
    boundary: int

    def repeats(self) -> tuple[int, ...]:
        """Return `ValueDecision.recompute_positions`."""
        either = self.operation is not None and self.operation.phase is Phase.EITHER
        if either and self.executed and self.executed[0] >= self.boundary:
            return self.executed
        return self.executed[1:]

    def decide(self) -> tuple[Decision, str]:
        """Return the decision and what speaks for it."""
        if self.origin is Origin.INPUT:
            return "input", "alive before the step and after it"
        if self.is_held and not self.is_output:
            return "gradient", "leaves the region with the backward"
        if self.is_held and self.is_saved:
            return "output", "leaves the region with the forward; the backward reads it"
        if self.is_held:
            return "output", "leaves the region with the forward"
        if self.operation is None:
            return "input", "arrives with the backward"
        if self.is_saved:
            return "saved", self._why_saved(self.operation)
        if self.repeats():
            return "recomputed", self._why_recomputed(self.operation)
        return "temporary", self._why_temporary()

    def _why_saved(self, operation: Operation) -> str:
        if self.must_save:
            return self.must_save
        if self.size_bytes == 0:
            return "takes no memory"
        rate = operation.cost_seconds / self.size_bytes * 2**20
        return f"computing it again costs at least {_duration(rate)} per MiB"

    def _why_recomputed(self, operation: Operation) -> str:
        if self.must_not_save:
            return self.must_not_save
        if self.executed == self.repeats() and len(self.executed) == 1:
            return "only the backward reads it, so it is computed there"
        times = len(self.repeats())
        each = f"{times} times {_duration(operation.cost_seconds)}"
        work = _duration(operation.cost_seconds) if times == 1 else each
        return f"{work} of work instead of keeping {format_bytes(self.size_bytes)}"

    def _why_temporary(self) -> str:
        if not self.is_read:
            return "nothing reads it"
        if self.is_inlined:
            return "computed inside the kernels that read it"
        in_forward = bool(self.executed) and self.executed[0] < self.boundary
        return f"only the {'forward' if in_forward else 'backward'} reads it"


def _value_decision(
    capture: Capture, value: ValueId, writer: OpId | None, fate: _Fate
) -> ValueDecision:
    owner = capture.value_nodes[value]
    producer = None if writer is None else capture.op_nodes[writer]
    nodes = [node for node in (owner, producer) if node is not None]
    tensor = None if owner is None else owner.meta.get("val")
    decision, why = fate.decide()
    operation = fate.operation
    return ValueDecision(
        name=owner.name if owner is not None else _item_name(capture, value, writer),
        module_path=next(filter(None, map(_module_path, nodes)), ""),
        source=next(filter(None, map(_source, nodes)), ""),
        shape=tuple(_size(s) for s in getattr(tensor, "shape", ())),
        dtype=str(getattr(tensor, "dtype", "")).removeprefix("torch."),
        size_bytes=fate.size_bytes,
        flops=0 if operation is None else operation.flops,
        cost_seconds=0.0 if operation is None else operation.cost_seconds,
        decision=decision,
        reason=f"{decision}: {why}",
        recompute_positions=fate.repeats(),
    )


def _why_not_saved(capture: Capture, value: ValueId) -> str:
    if capture.problem.values[value].savable:
        return ""
    return capture.refusals.get(value, "a checkpoint tag forbids to keep it")


def _runs(plan: Plan) -> dict[OpId, tuple[int, ...]]:
    """Return the positions of each executed operation, ascending."""
    runs: dict[OpId, list[int]] = {}
    for position, op_id in enumerate(plan.sequence):
        runs.setdefault(op_id, []).append(position)
    return {op_id: tuple(positions) for op_id, positions in runs.items()}


def _forward_outputs(capture: Capture) -> frozenset[int]:
    """Return the values that the forward returns to the caller."""
    (output,) = capture.graph.find_nodes(op="output")
    flat = list(_leaves(output.args))[: capture.num_fwd_outputs]
    nodes = [item for item in flat if hasattr(item, "meta")]
    return frozenset(capture.root[node] for node in nodes if node in capture.root)


def _leaves(item: Any) -> Iterator[Any]:
    if isinstance(item, (list, tuple)):
        for inner in item:
            yield from _leaves(inner)
    else:
        yield item


def _item_name(capture: Capture, value: ValueId, writer: OpId | None) -> str:
    """Return a name for an item of a tuple that no node takes out."""
    if writer is None:
        return f"value_{value}"
    position = capture.problem.operations[writer].writes.index(value)
    return f"{capture.op_nodes[writer].name}[{position}]"


def _module_path(node: Any) -> str:
    """Return the innermost module around a node, "" where none is known."""
    paths = module_paths(node)
    return paths[-1] if paths else ""


def _source(node: Any) -> str:
    """Return the last line of the node's stack that is not torch's own."""
    trace = node.meta.get("stack_trace") or ""
    frames = re.findall(r'File "([^"]+)", line (\d+)', trace)
    if not frames:
        return ""
    folder = _torch_folder()
    theirs = [frame for frame in frames if not frame[0].startswith(folder)]
    path, line = (theirs or frames)[-1]
    parts = [part for part in re.split(r"[\\/]", path) if part]
    return f"{'/'.join(parts[-2:])}:{line}"


@lru_cache(maxsize=1)
def _torch_folder() -> str:
    """Return how the paths of torch's own files begin, found without loading it."""
    found = importlib.util.find_spec("torch")
    assert found is not None, "nodes come from torch"
    assert found.submodule_search_locations is not None, "torch is a package"
    return found.submodule_search_locations[0] + os.sep


def _size(size: Any) -> int | str:
    return size if isinstance(size, int) else str(size)


def _duration(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if seconds * scale >= 1.0:
            return f"{seconds * scale:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def _items(
    data: RegionPlan | ScopeDecision | ValueDecision,
) -> Iterator[tuple[str, Any]]:
    return ((f.name, getattr(data, f.name)) for f in dataclasses.fields(data))


def _json(value: object) -> str:
    return json.dumps(value, allow_nan=False)


def _validated(text: str) -> RegionPlan:
    from pydantic import TypeAdapter, ValidationError  # slow to load, rarely needed

    try:
        return TypeAdapter(RegionPlan).validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise GcpassError(
            f"no decisions of gcpass: {place}: {first['msg']}, got {first['input']!r}"
        ) from error
