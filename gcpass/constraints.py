"""What may be recomputed and what may be saved, each refusal with its reason.

The reasons are shown to the user in the decisions, so they say what the graph does,
not which rule fired. Hard user tags (MUST_*) win over any budget; PREFER_* are hints
that only the plan without a budget follows.
"""

from __future__ import annotations

from torch import fx

from gcpass.cost import has_cost
from gcpass.op_facts import draws_random, is_discrete
from gcpass.torch_private import (
    CheckpointPolicy,
    HigherOrderOperator,
    OpOverload,
    is_backward_effect,
    is_forward_effect,
)

_COLLECTIVES = ("_c10d_functional", "_c10d_functional_autograd", "c10d", "_dtensor")


def why_not_recomputable(node: fx.Node, *, mutated: frozenset[fx.Node]) -> str | None:
    """Return why a second execution of the node is refused, None if it is allowed.

    Args:
        node: an operation of the joint graph.
        mutated: placeholders whose storage the region writes.
    """
    target = node.target
    if is_forward_effect(node) or is_backward_effect(node):
        return "writes memory that outlives it"
    if node.meta.get("recompute") is CheckpointPolicy.MUST_SAVE:
        return "tagged MUST_SAVE"
    if isinstance(target, OpOverload) and target.namespace in _COLLECTIVES:
        if node.meta.get("recompute") is not CheckpointPolicy.MUST_RECOMPUTE:
            return "collective"
    if isinstance(target, HigherOrderOperator):
        return f"higher-order operator {target.name()}"
    if node.is_impure(impure_random=False):  # what draws is judged call by call
        return "has a side effect"
    if draws_random(node):
        return "draws random numbers"
    if is_discrete(node):
        return "discrete result: a rounding difference would change it"
    if not has_cost(node):
        return "operation of unknown cost (gcpass.register_cost)"
    if any(source in mutated for source in node.all_input_nodes):
        return "reads an input that the region writes"
    return None


def must_not_be_saved(node: fx.Node, *, follow_hints: bool) -> bool:
    """Return whether the user's checkpoint tags forbid to save the node's value.

    A value that leaves its checkpoint region (some reader carries no tag, or another
    region's) may be saved: it is the region's output.
    """
    wanted = {CheckpointPolicy.MUST_RECOMPUTE}
    if follow_hints:
        wanted.add(CheckpointPolicy.PREFER_RECOMPUTE)
    if node.meta.get("recompute") not in wanted:
        return False
    region = node.meta.get("ac_graph_id")
    forward_users = [u for u in node.users if not _is_backward(u)]
    return all(
        user.meta.get("recompute") is not None
        and user.meta.get("ac_graph_id") == region
        for user in forward_users
    )


def _is_backward(node: fx.Node) -> bool:
    return node.meta.get("partitioner_tag") in ("is_backward", "must_be_in_backward")
