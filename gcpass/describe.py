"""What a plan does to each value and scope of a capture, and why, in words.

Loads no torch: nodes are read by their attributes.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from gcpass.decisions import Decision, ScopeDecision, ValueDecision
from gcpass.scopes import module_paths
from gcpass.solvers.liveness import simulate
from gcpass.solvers.problem import Operation, OpId, Origin, Phase, Plan, ValueId
from gcpass.units import format_bytes

if TYPE_CHECKING:
    from gcpass.capture import Capture
    from gcpass.symbolic import PlanFunctions

__all__ = ["describe_scopes", "describe_values"]


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


def describe_values(
    capture: Capture, plan: Plan, functions: PlanFunctions | None = None
) -> tuple[ValueDecision, ...]:
    """Return what the plan does to each value of the problem, by value id.

    Args:
        capture: the problem.
        plan: of it.
        functions: sizes and FLOPs as functions of symbols, None to leave them out.
    """
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
        decision = _value_decision(capture, ValueId(value_id), writer, fate)
        if functions is not None:
            decision = dataclasses.replace(
                decision,
                symbolic_size_bytes=functions.value_bytes[value_id],
                symbolic_flops=(
                    "" if writer is None else functions.operation_flops[writer]
                ),
            )
        decisions.append(decision)
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
