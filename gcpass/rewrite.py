"""Turns a plan into the forward and the backward graph.

A new joint graph is emitted in the plan's order: first the forward's executions, then
the backward's, where every execution is a copy of its node that reads the latest copy
of what it needs. Views and symbolic sizes are emitted where they are first read. The
split into two modules is torch's own extraction, which owns the contract with
AOTAutograd; it keeps the order, so no pass may reorder the graphs afterwards.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from gcpass.capture import Capture, output_nodes
from gcpass.kernel_memory import WORKSPACE
from gcpass.plan_order import HELD, MATERIALIZED, SPARE_BYTES
from gcpass.solvers.liveness import simulate
from gcpass.solvers.problem import OpId, Origin, Plan
from gcpass.torch_private import (
    extract_forward_and_backward,
    is_opaque_node,
    is_sym_node,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """The two graphs of a plan.

    Attributes:
        forward: forward module: user outputs, then what is saved.
        backward: backward module.
        saved_names: names of the saved nodes, as in the joint graph.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule
    saved_names: tuple[str, ...]


def rewrite(
    joint_module: fx.GraphModule,
    capture: Capture,
    plan: Plan,
    *,
    keep_apart: bool,
    limit_bytes: int | None,
    static_lifetime_input_nodes: Any,
) -> Split:
    """Return the forward and backward modules of a plan that `check` accepted.

    Args:
        joint_module: owns the submodules that the graph refers to.
        capture: the capture that the plan is for.
        plan: the plan.
        keep_apart: keep Inductor from merging a product into a sum that comes much
            later, which would keep the product's operands alive until then.
        limit_bytes: what fusion may raise the step's peak to where the plan's is
            lower; None for no more than the plan's.
        static_lifetime_input_nodes: inputs that live as long as the module.
    """
    profile = simulate(capture.problem, plan.sequence, plan.boundary)
    values = capture.problem.values
    materialized = frozenset(
        instance.start
        for instance in profile.instances
        if values[instance.value].origin is Origin.COMPUTED and not instance.virtual
    )
    emitter = _Emitter(
        capture=capture, keep_apart=keep_apart, materialized=materialized
    )
    emitter.emit(plan)
    module = fx.GraphModule(joint_module, emitter.graph)
    saved, syms, opaque = emitter.crossing()
    names = tuple(node.name for node in saved)
    static_names = {node.name for node in static_lifetime_input_nodes}
    forward, backward = extract_forward_and_backward(
        module,
        saved_values=saved,
        saved_syms=syms,
        saved_opaque=opaque,
        num_fwd_outputs=capture.num_fwd_outputs,
        static_lifetime_input_nodes=type(static_lifetime_input_nodes)(
            n for n in emitter.graph.nodes if n.name in static_names
        ),
    )
    early = {node.name for node in emitter.forward_nodes}
    late = {node.name for node in emitter.graph.nodes} - early
    _drop_dead(forward, late)
    _drop_dead(backward, early)
    memory, boundary = profile.memory_bytes, plan.boundary
    for side, used in ((forward, memory[:boundary]), (backward, memory[boundary:])):
        (output,) = side.graph.find_nodes(op="output")
        peak = max(used, default=0)
        output.meta[SPARE_BYTES] = max(limit_bytes or 0, profile.peak_bytes) - peak
    returned = {node.name for node in emitter.returned}
    for node in backward.graph.find_nodes(op="placeholder"):
        node.meta[HELD] = node.name in returned
    return Split(forward=forward, backward=backward, saved_names=names)


def _drop_dead(module: fx.GraphModule, strangers: set[str]) -> None:
    """Remove operations of the other side that nothing reads.

    The extraction starts from everything a side can compute and removes dead code, but
    not operators that may draw random numbers, such as attention without dropout: the
    backward's copies of these, and all that they draw on, would run in the forward too.
    """
    graph = module.graph
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and node.name in strangers and not node.users:
            graph.erase_node(node)
    module.recompile()


def _items_of(node: fx.Node) -> Iterator[fx.Node]:
    """Return the items that the graph takes out of a node, at any depth."""
    for user in node.users:
        if user.target is operator.getitem:
            yield user
            yield from _items_of(user)


def _takes_same_item(node: fx.Node, other: fx.Node) -> bool:
    """Return whether two nodes take the same item out of the same tuple.

    A second one is no view: emitted where it is read, it would make the tuple cross.
    """
    return node.target is operator.getitem and node.args == other.args


@dataclass(slots=True, kw_only=True)
class _Emitter:
    """Builds the new joint graph; `current` holds the latest copy of each value."""

    capture: Capture
    keep_apart: bool
    materialized: frozenset[int]  # executions that write something into memory
    graph: fx.Graph = field(default_factory=fx.Graph)
    kernels: int = 0  # operations emitted so far that are no part of another's kernel
    emitted_at: dict[fx.Node, int] = field(default_factory=dict)  # copy -> kernels
    current: dict[int, fx.Node] = field(default_factory=dict)
    fixed: dict[fx.Node, fx.Node] = field(default_factory=dict)  # inputs, sizes
    views: dict[tuple[fx.Node, fx.Node], fx.Node] = field(default_factory=dict)
    in_backward: bool = False
    forward_nodes: set[fx.Node] = field(default_factory=set)
    returned: set[fx.Node] = field(default_factory=set)  # share an output's storage

    def emit(self, plan: Plan) -> None:
        """Emit the whole joint graph."""
        source = self.capture.graph
        for node in source.nodes:
            if node.op in ("placeholder", "get_attr"):
                copy = self.graph.node_copy(node)
                self.fixed[node] = copy
                if node in self.capture.root:
                    self.current[self.capture.root[node]] = copy
        for t, op_id in enumerate(plan.sequence[: plan.boundary]):
            self._execute(op_id, t)
        self._emit_reachable_sizes()
        outputs = output_nodes(source)
        split = self.capture.num_fwd_outputs
        forward_outputs = [self._output(x) for x in outputs[:split]]
        self.forward_nodes = set(self.graph.nodes)
        self.returned = self._sharing(outputs[:split])
        self.views.clear()
        self.in_backward = True
        for t, op_id in enumerate(plan.sequence[plan.boundary :], plan.boundary):
            self._execute(op_id, t)
        gradients = [self._output(x) for x in outputs[split:]]
        (old_output,) = source.find_nodes(op="output")
        output = self.graph.output((*forward_outputs, *gradients))
        output.meta = dict(old_output.meta)
        self.graph.lint()

    def _sharing(self, outputs: Sequence[Any]) -> set[fx.Node]:
        """Return the copies that have the storage of an output."""
        root = self.capture.root
        owners = {self.current[root[x]] for x in outputs if x in root}
        views = {copy for (_, owner), copy in self.views.items() if owner in owners}
        return owners | views

    def crossing(self) -> tuple[list[fx.Node], list[fx.Node], list[fx.Node]]:
        """Return (tensors, sizes, opaque objects) of the forward that cross over."""
        used: set[fx.Node] = set()
        for node in self.graph.nodes:
            if node not in self.forward_nodes:
                used.update(self._backward_inputs(node))
        saved, syms, opaque = [], [], []
        for node in self.graph.nodes:
            if node not in used or node not in self.forward_nodes:
                continue
            if node.op == "get_attr" or "tangents" in str(node.target):
                continue
            if is_sym_node(node):
                syms.append(node)
            elif is_opaque_node(node):
                opaque.append(node)
            else:
                saved.append(node)
        return saved, syms, opaque

    def _backward_inputs(self, node: fx.Node) -> Iterator[fx.Node]:
        if node.op != "output":
            yield from node.all_input_nodes
            return
        outputs = output_nodes(self.graph)[self.capture.num_fwd_outputs :]
        yield from (x for x in outputs if isinstance(x, fx.Node))

    def _execute(self, op_id: OpId, t: int) -> None:
        """Emit execution t of the plan: the operation and the items of its tuple."""
        node = self.capture.op_nodes[op_id]
        if not self.capture.problem.operations[op_id].fusible:
            self.kernels += 1
        copy = self._late_sum(node) or self._copy(node)
        self.emitted_at[copy] = self.kernels
        copy.meta[MATERIALIZED] = t in self.materialized
        copy.meta[WORKSPACE] = self.capture.problem.operations[op_id].workspace_bytes
        self.fixed[node] = copy
        for item in _items_of(node):  # lists and numbers, of the execution before
            self.fixed.pop(item, None)
        for value in self.capture.problem.operations[op_id].writes:
            owner = self.capture.value_nodes[value]
            if owner is node:
                self.current[value] = copy
            elif owner is not None:
                self.current[value] = self._copy(owner)

    def _late_sum(self, node: fx.Node) -> fx.Node | None:
        """Emit x + mm as x - (-mm), the same bits, when the product is long done.

        Inductor turns the sum of a product and another value into one call at the
        place of the sum (addmm): the product's operands would live until then.
        """
        if not (self.keep_apart and self.in_backward) or node.kwargs:
            return None
        if node.target is not torch.ops.aten.add.Tensor:
            return None
        for product, other in (node.args, node.args[::-1]):
            if not isinstance(product, fx.Node) or not isinstance(other, fx.Node):
                return None
            if product.target is not torch.ops.aten.mm.default:
                continue
            copy = self._lookup(product)
            if self.emitted_at.get(copy, self.kernels) < self.kernels:
                neg = self.graph.call_function(torch.ops.aten.neg.default, (copy,))
                neg.meta = {k: v for k, v in product.meta.items() if k != "recompute"}
                arguments = (self._lookup(other), neg)
                result = self.graph.call_function(torch.ops.aten.sub.Tensor, arguments)
                result.meta = dict(node.meta)
                return result
        return None

    def _copy(self, node: fx.Node) -> fx.Node:
        copy = self.graph.node_copy(node, self._lookup)
        if self.in_backward:
            copy.meta.pop("recompute", None)
            copy.meta.setdefault("partitioner_tag", "is_backward")
            if copy.meta["partitioner_tag"] == "is_forward":
                copy.meta["partitioner_tag"] = "is_backward"
        return copy

    def _lookup(self, node: fx.Node) -> fx.Node:
        """Return the copy of a node to read now, emitting views and sizes."""
        value = self.capture.root.get(node)
        if value is None:
            if node not in self.fixed:
                self.fixed[node] = self._copy(node)
            return self.fixed[node]
        owner = self.current[value]
        item = self.capture.value_nodes[value]
        if node is item or (item is not None and _takes_same_item(node, item)):
            return owner
        if (node, owner) not in self.views:
            self.views[node, owner] = self._copy(node)
        return self.views[node, owner]

    def _emit_reachable_sizes(self) -> None:
        """Emit the sizes that the forward can compute: the backward may need them."""
        for node in self.capture.graph.nodes:
            if node.op != "call_function" or node in self.fixed:
                continue
            if is_sym_node(node) and all(map(self._is_there, node.all_input_nodes)):
                self.fixed[node] = self._copy(node)

    def _is_there(self, node: fx.Node) -> bool:
        value = self.capture.root.get(node)
        if value is None:
            return node in self.fixed
        owner = self.current.get(value)
        return owner is not None and "tangents" not in str(owner.target)

    def _output(self, item: Any) -> Any:
        return self._lookup(item) if isinstance(item, torch.fx.Node) else item
