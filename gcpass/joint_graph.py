"""The joint graph that AOTAutograd hands over: made ready, and what surrounds it."""

from __future__ import annotations

import torch
from torch import fx

from gcpass.capture import output_nodes
from gcpass.hardware import Device, current_device
from gcpass.torch_private import (
    cleanup_recompute_tags,
    functorch_config,
    fx_graph_cse,
    inputs_written_afterwards,
    is_tangent,
    mark_unrecomputable,
)


def prepare(joint_module: fx.GraphModule) -> fx.Graph:
    """Return the joint graph without dead code and common subexpressions, tagged."""
    joint_module.graph.eliminate_dead_code()
    if functorch_config.cse:
        joint_module.graph = fx_graph_cse(joint_module.graph)
    if any("recompute" in n.meta for n in joint_module.graph.nodes):
        cleanup_recompute_tags(joint_module, is_default_partition=False)
    mark_unrecomputable(joint_module)
    return joint_module.graph


def has_backward(graph: fx.Graph, num_fwd_outputs: int) -> bool:
    """Return whether there is anything to split: a gradient that needs a tangent."""
    gradients = output_nodes(graph)[num_fwd_outputs:]
    has_gradient = any(isinstance(x, fx.Node) for x in gradients)
    return has_gradient and any(
        is_tangent(n) for n in graph.find_nodes(op="placeholder")
    )


def mutated_inputs(graph: fx.Graph) -> frozenset[fx.Node]:
    """Return the placeholders whose storage the region writes."""
    found = set(inputs_written_afterwards(graph))
    for node in graph.find_nodes(
        op="call_function", target=torch.ops.aten.copy_.default
    ):
        if isinstance(node.args[0], fx.Node) and node.args[0].op == "placeholder":
            found.add(node.args[0])
    return frozenset(found)


def device_of(graph: fx.Graph) -> tuple[Device, torch.device]:
    """Return the device that most of the region's inputs are on, and torch's for it."""
    counts: dict[torch.device, int] = {}
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            counts[value.device] = counts.get(value.device, 0) + value.dim()
    if not counts:
        return current_device("cpu", None), torch.device("cpu")
    best = max(counts, key=lambda d: (counts[d], str(d)))
    name = None
    if best.type == "cuda" and torch.cuda.is_available():
        name = torch.cuda.get_device_name(best)
    return current_device(best.type, name), best
