"""Keeps Inductor's fusion from undoing the plan's order.

A fused kernel runs at the place of its earliest member, and everything that its latest
member needs is computed before that. Fusing pieces that lie far apart in the plan
therefore hoists the recomputation of one layer in front of another's: on a small GPT
at its floor the backward peaked at 51.5 instead of 43.1 MB. Inductor's own limit is a
distance of 64 nodes; what counts here is how many library calls (products,
convolutions, attention) lie between the pieces, since those carry the memory.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

from gcpass.torch_private import InductorChoices, V, compile_fx_inner

# Library calls that a fused kernel may span: a linear layer's input and weight
# gradients lie between its bias gradient and the kernel that makes the gradient.
MOST_CALLS_SPANNED = 2


class PlanOrder(InductorChoices):
    """Inductor's choices, without fusions across many library calls."""

    @staticmethod
    def can_fuse(
        scheduler: Any, node1: Any, node2: Any, shared_data_score: int
    ) -> bool:
        """Return whether two scheduler nodes may become one kernel."""
        first = min(node1.min_order, node2.min_order)
        last = max(node1.max_order, node2.max_order)
        calls = _library_calls(scheduler)
        spanned = bisect_left(calls, last) - bisect_left(calls, first)
        if spanned > MOST_CALLS_SPANNED:
            return False
        return InductorChoices.can_fuse(scheduler, node1, node2, shared_data_score)

    def uuid(self) -> str:
        """Return what tells these choices from others in a cache key."""
        return f"gcpass-plan-order-{MOST_CALLS_SPANNED}"


def _library_calls(scheduler: Any) -> list[int]:
    """Return the places of the library calls in the scheduler's first order."""
    calls: list[int] | None = getattr(scheduler, "_gcpass_library_calls", None)
    if calls is None:
        calls = sorted(n.min_order for n in scheduler.nodes if n.is_extern())
        scheduler._gcpass_library_calls = calls
    return calls


def compile_in_plan_order(*arguments: Any, **keywords: Any) -> Any:
    """Compile a graph like Inductor's ``compile_fx_inner``, with `PlanOrder`."""
    with V.set_choices_handler(PlanOrder()):
        return compile_fx_inner(*arguments, **keywords)
