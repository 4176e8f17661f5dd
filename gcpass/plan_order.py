"""Has Inductor keep the plan's order, and in memory what the plan keeps there.

Left alone, Inductor undoes what a plan saves:

- A pointwise value is computed where a library call first reads it, and all that it is
  made of lives until then. A value that the plan materializes is stored in its place.
- A value that the plan leaves to the kernels of its readers is stored all the same by
  rules of thumb (many reads, an exponential on the CPU). Only values of very long
  expressions still are, to bound the code.
- A fused kernel runs at the place of its earliest member, after all that the others
  need, and what they read and write is alive at once. Inductor's own limit is a
  distance of 64 nodes. Here a kernel spans few library calls, and fusing must not lift
  the memory above the peak of the unfused program by more than the budget leaves.
- C++ kernels between two library calls become one function, and nothing is freed inside
  of it. It ends early where that would lift the memory.

`examples/accuracy.py` shows how close programs are. The hooks do nothing unless
`compile_in_plan_order` is running (`V.choices` is local to the thread).
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Callable
from typing import Any

from torch import fx

from gcpass.kernel_memory import WORKSPACE, KernelMemory
from gcpass.torch_private import (
    CppScheduling,
    GraphLowering,
    InductorChoices,
    StorageBox,
    TensorBox,
    V,
    compile_fx_inner,
    inductor_config,
)

# Keys of a node's meta:
MATERIALIZED = "gcpass_materialized"  # whether the plan keeps its value in memory
HELD = "gcpass_held"  # of a placeholder: the caller holds it until the step's end
SPARE_BYTES = "gcpass_spare_bytes"  # of the output: what fusion may add to the peak

# Library calls that a fused kernel may span: a linear layer's input and weight
# gradients lie between its bias gradient and the kernel that makes the gradient.
MOST_CALLS_SPANNED = 2


class PlanOrder(InductorChoices):
    """Inductor's choices as a plan wants them.

    Args:
        graph: forward or backward as `gcpass.rewrite` marked it.
    """

    def __init__(self, graph: fx.Graph) -> None:
        (output,) = graph.find_nodes(op="output")
        placeholders = graph.find_nodes(op="placeholder")
        self.spare_bytes: int = output.meta[SPARE_BYTES]
        self.held = {str(n.target) for n in placeholders if n.meta.get(HELD)}
        self.kept = [n.name for n in graph.nodes if n.meta.get(MATERIALIZED)]
        self.workspaces = [n.meta.get(WORKSPACE, 0) for n in graph.nodes]

    def can_fuse(  # type: ignore[override]
        self, scheduler: Any, node1: Any, node2: Any, shared_data_score: int
    ) -> bool:
        """Return whether two scheduler nodes may become one kernel."""
        first = min(node1.min_order, node2.min_order)
        last = max(node1.max_order, node2.max_order)
        calls = _library_calls(scheduler)
        if bisect_left(calls, last) - bisect_left(calls, first) > MOST_CALLS_SPANNED:
            return False
        if not InductorChoices.can_fuse(scheduler, node1, node2, shared_data_score):
            return False
        return self.memory_of(scheduler).allows(node1, node2)

    def memory_of(self, scheduler: Any) -> KernelMemory:
        """Return the memory of a scheduler's nodes as they are fused so far."""
        memory: KernelMemory | None = getattr(scheduler, "_gcpass_memory", None)
        if memory is None:
            memory = KernelMemory(scheduler, self.held, self.spare_bytes)
            scheduler._gcpass_memory = memory
            scheduler.fuse_two_nodes = _noting(scheduler.fuse_two_nodes, memory)
        return memory

    def fingerprint(self) -> str:
        """Return a digest of the marks."""
        marks = f"{self.spare_bytes} {sorted(self.held)} {self.kept} {self.workspaces}"
        return hashlib.sha256(marks.encode()).hexdigest()


def compile_in_plan_order(gm: fx.GraphModule, *arguments: Any, **keywords: Any) -> Any:
    """Compile a graph like Inductor's ``compile_fx_inner``, with `PlanOrder`."""
    (output,) = gm.graph.find_nodes(op="output")
    if SPARE_BYTES not in output.meta:  # no plan's: a graph without a backward
        return compile_fx_inner(gm, *arguments, **keywords)
    _install()
    order = PlanOrder(gm.graph)
    # Keys of compile caches know a graph's code and its own meta, not that of nodes.
    gm.meta["gcpass_plan_order"] = order.fingerprint()
    ordered = inductor_config.patch(reorder_for_peak_memory=False)
    with ordered, V.set_choices_handler(order):
        return compile_fx_inner(gm, *arguments, **keywords)


def _library_calls(scheduler: Any) -> list[int]:
    """Return the places of the library calls in the scheduler's first order."""
    calls: list[int] | None = getattr(scheduler, "_gcpass_library_calls", None)
    if calls is None:
        calls = sorted(n.min_order for n in scheduler.nodes if n.is_extern())
        scheduler._gcpass_library_calls = calls
    return calls


def _noting(fuse: Callable[..., Any], memory: KernelMemory) -> Callable[..., Any]:
    def fuse_two_nodes(node1: Any, node2: Any, *arguments: Any) -> Any:
        fused = fuse(node1, node2, *arguments)  # which may ask once more
        memory.fuse(node1, node2)
        return fused

    return fuse_two_nodes


def _install() -> None:
    """Put the hooks into Inductor, once per process."""
    if getattr(GraphLowering.run_node, "_gcpass_hook", False):
        return
    for owner, hook in (
        (GraphLowering, _run_node),
        (StorageBox, _has_exceeded_max_reads),
        (StorageBox, _should_realize_on_reuse),
        (CppScheduling, _codegen_node),
    ):
        name = hook.__name__.removeprefix("_")
        hooked: Any = hook(getattr(owner, name))
        hooked._gcpass_hook = True
        setattr(owner, name, hooked)


def _run_node(original: Callable[..., Any]) -> Callable[..., Any]:
    def run_node(self: Any, n: fx.Node) -> Any:
        result = original(self, n)
        planned = isinstance(V.choices, PlanOrder) and n.meta.get(MATERIALIZED)
        if planned and isinstance(result, TensorBox):
            result.realize()
        return result

    return run_node


def _has_exceeded_max_reads(original: Callable[..., Any]) -> Callable[..., Any]:
    def has_exceeded_max_reads(self: Any) -> bool:
        return not _is_virtual(self) and original(self)

    return has_exceeded_max_reads


def _should_realize_on_reuse(original: Callable[..., Any]) -> Callable[..., Any]:
    def should_realize_on_reuse(self: Any, users: int, **named: Any) -> bool:
        # Broadcasting asks too, for its number of copies: there Inductor may store.
        if _is_virtual(self) and users == len(V.graph.current_node.users):
            return users > 1 and bool(self.has_large_inner_fn())
        return bool(original(self, users, **named))

    return should_realize_on_reuse


def _is_virtual(box: Any) -> bool:
    """Return whether the plan leaves a value to the kernels of its readers.

    The node that made it is noted once that is lowered; views of it, which are lowered
    later, ask again.
    """
    if not isinstance(V.choices, PlanOrder):
        return False
    node = box.data.get_origin_node() or V.graph.current_node
    return (
        isinstance(node, fx.Node)
        and node.meta.get(MATERIALIZED) is False
        and node in box.data.origins
    )


def _codegen_node(original: Callable[..., Any]) -> Callable[..., Any]:
    def codegen_node(self: Any, node: Any) -> Any:
        result = original(self, node)
        choices = V.choices
        if isinstance(choices, PlanOrder):
            memory = choices.memory_of(self.scheduler)
            if node.get_name() in memory.last_of_functions(self.scheduler):
                self._set_flush_status(True)
        return result

    return codegen_node
