"""Joint forward-backward graph to `Problem`, with the way back.

Values are storages. A view, an alias or an item of a tuple has no value of its own:
it belongs to the value it reads (`Capture.root`). Symbolic sizes take no bytes and
are not part of the problem; the rewrite emits them where they are first needed.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import fx

from gcpass.budget import Fraction
from gcpass.constraints import must_not_be_saved, why_not_recomputable
from gcpass.cost_model import CostModel
from gcpass.errors import UnsupportedGraphError
from gcpass.op_facts import Kind, absorbs, draws_random, is_cast, op_kind, selects
from gcpass.places import changes_only_dtype, reads_aligned
from gcpass.scopes import Scope
from gcpass.sizes import storage_bytes
from gcpass.solvers.problem import (
    Operation,
    Origin,
    Phase,
    Problem,
    Value,
    ValueId,
)
from gcpass.torch_private import (
    is_backward_effect,
    is_forward_effect,
    is_sym_node,
    is_tangent,
    tree_leaves,
)
from gcpass.traffic import Step, bytes_moved
from gcpass.workspace import node_workspace

_Path: TypeAlias = "tuple[Any, ...]"

_SIZE_QUERIES = ("sym_size", "sym_stride", "sym_numel", "sym_storage_offset")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScopeShare:
    """A scope (see `gcpass.scopes`) with what belongs to it.

    Attributes:
        scope: what was asked for.
        values: written in it before the boundary, without those that are held.
        fastest_bytes: of them, what the fastest plan saves that knows no scopes.
    """

    scope: Scope
    values: frozenset[ValueId]
    fastest_bytes: int

    @property
    def limit_bytes(self) -> int | None:
        """The limit on the saved bytes of `values`, None for no limit."""
        limit = self.scope.limit
        if isinstance(limit, Fraction):
            return int(limit.of_peak * self.fastest_bytes)
        return None if limit is None else limit.size_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """A joint graph and the problem that stands for it.

    Attributes:
        graph: the joint graph.
        problem: see `gcpass.solvers.problem`.
        op_nodes: the node of each operation.
        value_nodes: the node that owns each value's storage; None for an item of a
            tuple that nothing reads.
        value_metas: what each value's size is that of, None for 0.
        root: node -> value whose storage it reads, for owners and views.
        reasons: why an operation is not recomputable, None where it is.
        num_fwd_outputs: how many of the graph's outputs are the forward's.
        shares: the scopes in it, see `gcpass.regions`.
        refusals: value -> why it must not be saved, where no tag forbids it.
    """

    graph: fx.Graph
    problem: Problem
    op_nodes: tuple[fx.Node, ...]
    value_nodes: tuple[fx.Node | None, ...]
    value_metas: tuple[Any, ...]
    root: dict[fx.Node, ValueId]
    reasons: tuple[str | None, ...]
    num_fwd_outputs: int
    shares: tuple[ScopeShare, ...] = ()
    refusals: Mapping[ValueId, str] = field(default_factory=dict)

    def with_between(self, between_bytes: int) -> Capture:
        """Return the capture with so many bytes set aside at the boundary."""
        problem = dataclasses.replace(self.problem, between_bytes=between_bytes)
        return dataclasses.replace(self, problem=problem)


def capture(
    graph: fx.Graph,
    *,
    num_fwd_outputs: int,
    mutated: frozenset[fx.Node],
    costs: CostModel,
    fuses: bool,
    follow_hints: bool,
) -> Capture:
    """Return the `Capture` of a joint graph without dead code.

    Args:
        graph: joint graph; `snapshot_mutated_inputs` has run on it.
        num_fwd_outputs: how many of its outputs are the forward's.
        mutated: placeholders whose storage the region writes.
        costs: prices the operations.
        fuses: whether a fusing compiler runs the result.
        follow_hints: whether PREFER_RECOMPUTE tags forbid saving.
    """
    draft = _Draft(graph=graph)
    for node in graph.nodes:
        draft.add(node)
    outputs = output_nodes(graph)
    held = {draft.root[n] for n in outputs if n in draft.root}
    phases = draft.phases(outputs[:num_fwd_outputs])
    kinds = [op_kind(n) if fuses else Kind.EXTERN for n in draft.op_nodes]
    reasons = [why_not_recomputable(n, mutated=mutated) for n in draft.op_nodes]
    mutated_roots = {draft.root[n] for n in mutated}
    for op_id, reads in enumerate(draft.reads):
        if reasons[op_id] is None and mutated_roots.intersection(reads):
            reasons[op_id] = "reads an input that the region writes"
    absorbing = [fuses and absorbs(n) for n in draft.op_nodes]
    moved = bytes_moved(
        [
            Step(
                reads=draft.reads[op_id],
                writes=draft.writes[op_id],
                phase=phases[op_id],
                fusible=kinds[op_id] is Kind.POINTWISE,
                absorbing=absorbing[op_id],
            )
            for op_id in range(len(draft.op_nodes))
        ],
        draft.sizes,
        held,
    )
    operations = []
    for op_id, node in enumerate(draft.op_nodes):
        cost = costs.price(node, moved[op_id])
        operations.append(
            Operation(
                reads=tuple(ValueId(v) for v in draft.reads[op_id]),
                writes=tuple(ValueId(v) for v in draft.writes[op_id]),
                cost_seconds=cost.seconds,
                flops=cost.flops,
                phase=phases[op_id],
                recomputable=reasons[op_id] is None,
                fusible=kinds[op_id] is Kind.POINTWISE,
                absorbing=absorbing[op_id],
                aligned=_aligned(draft, op_id)
                if kinds[op_id] is Kind.POINTWISE
                else (),
                workspace_bytes=(
                    node_workspace(node) if kinds[op_id] is Kind.EXTERN else 0
                ),
            )
        )
    costs.save()
    saving = 2.0 / costs.device.bandwidth_bytes_per_s  # written and read
    hidden = _hidden_values(draft, phases, reasons, follow_hints=follow_hints)
    casts = _casts_of_inputs(draft, reasons) - hidden
    values = tuple(
        Value(
            size_bytes=size,
            origin=origin,
            held=value_id in held and origin is not Origin.INPUT,
            savable=value_id not in hidden and value_id not in casts,
        )
        for value_id, (size, origin) in enumerate(
            zip(draft.sizes, draft.origins, strict=True)
        )
    )
    return Capture(
        graph=graph,
        problem=Problem(
            operations=tuple(operations),
            values=values,
            save_seconds_per_byte=saving if fuses else 0.0,
        ),
        op_nodes=tuple(draft.op_nodes),
        value_nodes=tuple(draft.value_nodes),
        value_metas=tuple(draft.metas),
        root={n: ValueId(v) for n, v in draft.root.items()},
        reasons=tuple(reasons),
        num_fwd_outputs=num_fwd_outputs,
        refusals=dict.fromkeys(casts, "a cast of an input is made again"),
    )


def _aligned(draft: _Draft, op_id: int) -> tuple[ValueId, ...]:
    """Return the values that an operation reads at the places that it writes."""
    node = draft.op_nodes[op_id]
    if len(draft.writes[op_id]) != 1:
        return ()
    sources = [n for n in node.all_input_nodes if n in draft.root]
    elsewhere = {draft.root[n] for n in sources if not reads_aligned(node, n)}
    return tuple(ValueId(v) for v in draft.reads[op_id] if v not in elsewhere)


def output_nodes(graph: fx.Graph) -> list[Any]:
    """Return the flat outputs of a graph; None and numbers stay what they are."""
    (output,) = graph.find_nodes(op="output")
    return list(tree_leaves(output.args, is_leaf=lambda x: x is None))


def snapshot_mutated_inputs(
    graph: fx.Graph, mutated: frozenset[fx.Node], forward_outputs: Sequence[Any]
) -> None:
    """Give readers of the backward a copy of the inputs that the forward writes.

    Such a read means the value before the write. When every reader runs in the
    forward nothing is inserted: the readers are only kept from running again.
    """
    needed = _ancestors([n for n in forward_outputs if isinstance(n, fx.Node)])
    needed |= _ancestors([n for n in graph.nodes if is_forward_effect(n)])
    last_placeholder = graph.find_nodes(op="placeholder")[-1]
    for node in [n for n in graph.nodes if n in mutated]:
        if all(_runs_in(reader, needed) for reader in _readers_behind_views(node)):
            continue
        with graph.inserting_after(last_placeholder):
            copy = graph.call_function(torch.ops.aten.clone.default, (node,))
        copy.meta = {k: v for k, v in node.meta.items() if k in ("val", "tensor_meta")}
        for user in list(node.users):
            if user is not copy and not is_forward_effect(user) and user.op != "output":
                user.replace_input_with(node, copy)


def _runs_in(node: fx.Node, needed: set[fx.Node]) -> bool:
    return node in needed or is_forward_effect(node)


def _readers_behind_views(node: fx.Node) -> Iterable[fx.Node]:
    for user in node.users:
        if user.op == "output":
            continue
        if op_kind(user) is Kind.VIEW:
            yield from _readers_behind_views(user)
        else:
            yield user


def _ancestors(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack.extend(node.all_input_nodes)
    return found


@dataclass(slots=True, kw_only=True)
class _Draft:
    """The problem while the graph is read once, in order."""

    graph: fx.Graph
    op_nodes: list[fx.Node] = field(default_factory=list)
    reads: list[list[int]] = field(default_factory=list)
    writes: list[list[int]] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    metas: list[Any] = field(default_factory=list)
    origins: list[Origin] = field(default_factory=list)
    writer: list[int | None] = field(default_factory=list)
    value_nodes: list[fx.Node | None] = field(default_factory=list)
    root: dict[fx.Node, int] = field(default_factory=dict)
    op_of: dict[fx.Node, int] = field(default_factory=dict)
    # An item is known by its operation and its positions in nested tuples and lists.
    items: dict[tuple[fx.Node, _Path], int] = field(default_factory=dict)
    path: dict[fx.Node, tuple[fx.Node, _Path]] = field(default_factory=dict)

    def add(self, node: fx.Node) -> None:
        """Take one node in."""
        if node.op == "placeholder":
            if not is_sym_node(node):
                origin = Origin.TANGENT if is_tangent(node) else Origin.INPUT
                self._new_value(node, node.meta.get("val"), origin, None)
        elif node.op == "get_attr":
            if isinstance(node.meta.get("val"), torch.Tensor):
                self._new_value(node, None, Origin.INPUT, None)
        elif node.op == "call_function" and not self._is_item(node):
            if is_sym_node(node) and not self._reads_data(node):
                return
            source = self._viewed(node)
            if source is not None:
                self.root[node] = self.root[source]
            else:
                self._new_operation(node)

    def _is_item(self, node: fx.Node) -> bool:
        """Give an item of a tuple its value; False for anything else."""
        if node.target is not operator.getitem:
            return False
        parent = node.args[0]
        if not isinstance(parent, fx.Node):
            return False
        if parent in self.root:  # an item of a list of views
            self.root[node] = self.root[parent]
            return True
        operation, outer = self.path.get(parent, (parent, ()))
        if operation not in self.op_of:
            return False
        self.path[node] = operation, (*outer, node.args[1])
        value = self.items.get(self.path[node])
        if value is None:
            return True  # a token, a number, a list: nothing to plan
        self.root[node] = value
        if self.value_nodes[value] is None:
            self.value_nodes[value] = node
        return True

    def _reads_data(self, node: fx.Node) -> bool:
        """Whether a symbolic value comes out of a tensor's contents."""
        name = str(node.target)
        if any(query in name for query in _SIZE_QUERIES):
            return False
        return any(n in self.root for n in node.all_input_nodes)

    def _viewed(self, node: fx.Node) -> fx.Node | None:
        """Return the node whose storage a view shares, None if it has its own."""
        if op_kind(node) is not Kind.VIEW:
            return None
        return next((n for n in node.all_input_nodes if n in self.root), None)

    def _new_operation(self, node: fx.Node) -> None:
        op_id = len(self.op_nodes)
        self.op_nodes.append(node)
        self.op_of[node] = op_id
        reads = {self.root[n] for n in node.all_input_nodes if n in self.root}
        self.reads.append(sorted(reads))
        self.writes.append([])
        val = node.meta.get("val")
        if isinstance(val, (tuple, list)):
            for path, tensor in _items_of(val):
                value = self._new_value(None, tensor, Origin.COMPUTED, op_id)
                self.items[node, path] = value
        elif isinstance(val, torch.Tensor) and not is_effect_only(node):
            self._new_value(node, val, Origin.COMPUTED, op_id)
        elif val is not None and not is_sym_node(node) and not is_effect_only(node):
            self._new_value(node, None, Origin.COMPUTED, op_id)  # opaque object

    def _new_value(
        self, node: fx.Node | None, meta: Any, origin: Origin, op_id: int | None
    ) -> int:
        value = len(self.sizes)
        self.sizes.append(storage_bytes(meta))
        self.metas.append(meta)
        self.origins.append(origin)
        self.writer.append(op_id)
        self.value_nodes.append(node)
        if node is not None:
            self.root[node] = value
        if op_id is not None:
            self.writes[op_id].append(value)
        return value

    def phases(self, forward_outputs: Sequence[Any]) -> list[Phase]:
        """Return the phase of each operation."""
        backward = [False] * len(self.op_nodes)
        for op_id, node in enumerate(self.op_nodes):
            backward[op_id] = is_backward_effect(node) or any(
                self.origins[v] is Origin.TANGENT
                or ((w := self.writer[v]) is not None and backward[w])
                for v in self.reads[op_id]
            )
        targets = [n for n in forward_outputs if isinstance(n, fx.Node)]
        forward = {self.op_of[n] for n in _ancestors(targets) if n in self.op_of}
        for op_id, node in enumerate(self.op_nodes):
            if not backward[op_id] and self._belongs_to_forward(node):
                forward.update(
                    self.op_of[n] for n in _ancestors([node]) if n in self.op_of
                )
        tangled = sorted(op_id for op_id in forward if backward[op_id])
        if tangled:
            raise UnsupportedGraphError(
                "the forward's outputs depend on gradients",
                operations=tuple(self.op_nodes[op_id].name for op_id in tangled),
            )
        return [
            Phase.FORWARD
            if op_id in forward
            else (Phase.BACKWARD if backward[op_id] else Phase.EITHER)
            for op_id in range(len(self.op_nodes))
        ]

    def _belongs_to_forward(self, node: fx.Node) -> bool:
        """Whether a node without tangents must run in the forward all the same."""
        if is_forward_effect(node) or selects(node):
            return True
        if node.meta.get("partitioner_tag") == "is_backward":
            return False
        return node.is_impure() or draws_random(node)


def _items_of(value: Any, path: _Path = ()) -> Iterator[tuple[_Path, torch.Tensor]]:
    """Return the tensors of nested tuples and lists, each with its positions."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, (tuple, list)):
        for position, item in enumerate(value):
            yield from _items_of(item, (*path, position))


def is_effect_only(node: fx.Node) -> bool:
    """Return whether a node is executed for what it writes into its arguments."""
    return is_forward_effect(node) or is_backward_effect(node)


def _hidden_values(
    draft: _Draft,
    phases: Sequence[Phase],
    reasons: Sequence[str | None],
    *,
    follow_hints: bool,
) -> set[int]:
    """Return the values that the user's tags forbid to save, and what they lead to.

    What the backward computes from such a value carries no tag of its own; saving
    that instead would defeat the tag.
    """
    hidden: set[int] = set()
    for op_id, node in enumerate(draft.op_nodes):
        tagged = reasons[op_id] is None and must_not_be_saved(
            node, follow_hints=follow_hints
        )
        heir = phases[op_id] is Phase.EITHER and hidden.intersection(draft.reads[op_id])
        if tagged or heir:
            hidden.update(draft.writes[op_id])
    return hidden


def _casts_of_inputs(draft: _Draft, reasons: Sequence[str | None]) -> set[ValueId]:
    """Return values that are inputs in another type.

    Mixed precision makes one of every weight. All of them would be alive between
    forward and backward, for the little time that a cast takes.
    """
    found: set[ValueId] = set()
    for op_id, node in enumerate(draft.op_nodes):
        sources = [n for n in node.all_input_nodes if n in draft.root]
        if not is_cast(node) or reasons[op_id] is not None or len(sources) != 1:
            continue
        is_input = draft.origins[draft.root[sources[0]]] is Origin.INPUT
        if is_input and changes_only_dtype(node, sources[0]):
            found.update(ValueId(v) for v in draft.writes[op_id])
    return found
