"""Everything private of torch that gcpass touches, in one place.

Read and tested on torch 2.11.0, 2.12.1, 2.13.0 and 2.14.1. `probe` compares
what is installed with what was read and says clearly when a release no longer fits.
"""

from __future__ import annotations

import copy
import inspect
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._C._profiler import ProfilerConfig, ProfilerState, _ExperimentalConfig
from torch._dynamo import config as dynamo_config
from torch._dynamo.exc import ShortenTraceback
from torch._functorch import config as functorch_config
from torch._functorch import partitioners
from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput
from torch._functorch.compile_utils import fx_graph_cse, raise_getitems
from torch._guards import CompileContext, TracingContext, compile_context, tracing
from torch._inductor import config as inductor_config
from torch._inductor import list_mode_options
from torch._inductor.choices import InductorChoices
from torch._inductor.codegen.cpp import CppScheduling
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.cudagraph_utils import BoxedDeviceIndex
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch._inductor.dependencies import StarDep, WeakDep
from torch._inductor.graph import GraphLowering
from torch._inductor.ir import (
    FixedLayout,
    Layout,
    MultiOutput,
    NonOwningLayout,
    StorageBox,
    TensorBox,
)
from torch._inductor.lowering import add_layout_constraint, require_contiguous
from torch._inductor.runtime.benchmarking import benchmarker
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch._inductor.scheduler import NopKernelSchedulerNode, SchedulerNode
from torch._inductor.utils import BoxedBool
from torch._inductor.virtualized import V
from torch._logging import _internal as torch_logging
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental import symbolic_shapes
from torch.fx.experimental.proxy_tensor import is_sym_node
from torch.fx.traceback import annotate
from torch.utils._ordered_set import OrderedSet
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import CheckpointPolicy

from gcpass.errors import UnsupportedTorchError
from gcpass.toolchain import require_torch

__all__ = [
    "BoxedBool",
    "BoxedDeviceIndex",
    "CheckpointPolicy",
    "CompileContext",
    "CppScheduling",
    "CustomPartitionerFn",
    "FakeTensor",
    "FakeTensorMode",
    "FixedLayout",
    "GraphLowering",
    "HigherOrderOperator",
    "InductorChoices",
    "Layout",
    "MultiOutput",
    "NonOwningLayout",
    "NopKernelSchedulerNode",
    "OpOverload",
    "OpOverloadPacket",
    "OrderedSet",
    "SchedulerNode",
    "StarDep",
    "StorageBox",
    "TensorBox",
    "TorchDispatchMode",
    "TracingContext",
    "V",
    "WeakDep",
    "add_layout_constraint",
    "allocations_during",
    "annotate",
    "benchmarker",
    "cache_dir",
    "cleanup_recompute_tags",
    "compile_context",
    "compile_fx",
    "compile_fx_inner",
    "compile_id",
    "compile_in_place",
    "default_partition",
    "donated",
    "dynamo_config",
    "ends_in_graph_break",
    "extract_forward_and_backward",
    "functorch_config",
    "fx_graph_cse",
    "in_backward",
    "inductor_config",
    "inputs_written_afterwards",
    "is_backward_effect",
    "is_forward_effect",
    "is_opaque_node",
    "is_sym_node",
    "is_tangent",
    "list_mode_options",
    "mark_unrecomputable",
    "optimization_hint",
    "own_context",
    "probe",
    "raise_getitems",
    "require_contiguous",
    "saves_through_hooks",
    "static_inputs",
    "surfaced",
    "trace_json",
    "tracing",
    "tree_leaves",
    "tree_map",
    "without_modes",
]

_EXTRACT_ARGUMENTS = (
    "joint_module",
    "saved_values",
    "saved_sym_nodes",
    "num_fwd_outputs",
    "static_lifetime_input_nodes",
)

cleanup_recompute_tags = partitioners.cleanup_recompute_tags
default_partition = partitioners.default_partition
is_forward_effect = partitioners._must_be_in_forward
is_backward_effect = partitioners._must_be_in_backward
_private: Any = partitioners  # re-exports that its stubs do not declare
_autograd: Any = torch.autograd
is_tangent: Callable[[torch.fx.Node], bool] = _private._is_tangent

# Both take (SymInt, fallback=int) and add no guard; 2.11 has the second only.
_HINT = (
    "optimization_hint"
    if hasattr(symbolic_shapes, "optimization_hint")
    else "size_hint"
)
optimization_hint: Callable[..., int] = getattr(symbolic_shapes, _HINT)


def _round_where_asked() -> None:
    """Make Inductor's C++ kernels heed emulate_precision_casts, as from torch 2.13 on.

    A kernel that rounds notes the number before as what a cast back gives, so that
    the rounding is lost to whatever reads the value in the same kernel.
    """
    from torch._inductor.codegen.cpp import CppKernel

    note: Any = CppKernel.cache_dtype_convert

    def note_unless_asked(self: CppKernel, *arguments: Any) -> None:
        if not inductor_config.emulate_precision_casts:
            note(self, *arguments)

    CppKernel.cache_dtype_convert = note_unless_asked  # type: ignore[method-assign]


if torch.__version__ < "2.13":
    _round_where_asked()


def probe() -> None:
    """Check that this torch is one that gcpass was read and tested on.

    Raises:
        UnsupportedTorchError: the version is out of range, or a private function
            that gcpass calls has lost an argument.
    """
    require_torch()
    have = inspect.signature(partitioners._extract_fwd_bwd_modules).parameters
    missing = [name for name in _EXTRACT_ARGUMENTS if name not in have]
    if missing:
        raise UnsupportedTorchError(
            f"torch {torch.__version__}: _extract_fwd_bwd_modules has no argument "
            f"{', '.join(missing)}; gcpass needs an update for this release"
        )


def is_opaque_node(node: torch.fx.Node) -> bool:
    """Return whether the node's value is an opaque object rather than a tensor."""
    check = getattr(partitioners, "is_opaque_node", None)
    return bool(check(node)) if check is not None else False


def mark_unrecomputable(joint_module: torch.fx.GraphModule) -> None:
    """Tag collectives, effects and sources of backward mutations MUST_SAVE."""
    if not functorch_config.unsafe_allow_optimization_of_collectives:
        partitioners.force_save_collectives(joint_module)
    partitioners.force_save_effectful_ops(joint_module)
    partitioners.force_save_bw_mutation_src(joint_module)


def extract_forward_and_backward(
    joint_module: torch.fx.GraphModule,
    *,
    saved_values: list[torch.fx.Node],
    saved_syms: list[torch.fx.Node],
    saved_opaque: list[torch.fx.Node],
    num_fwd_outputs: int,
    static_lifetime_input_nodes: Any,
) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
    """Return (forward, backward) by torch's own extraction, which owns the contract."""
    arguments: dict[str, Any] = {
        "num_fwd_outputs": num_fwd_outputs,
        "static_lifetime_input_nodes": static_lifetime_input_nodes,
    }
    extract = partitioners._extract_fwd_bwd_modules
    if "saved_opaque_nodes" in inspect.signature(extract).parameters:  # from 2.12 on
        arguments["saved_opaque_nodes"] = saved_opaque
    forward, backward = extract(
        joint_module, saved_values, saved_sym_nodes=saved_syms, **arguments
    )
    # Torch keeps a draw that nothing reads (attention whose inputs are saved), and with
    # Inductor's fallback_random the backward would run it.
    backward.graph.eliminate_dead_code(lambda n: n.is_impure(impure_random=False))
    forward, backward = raise_getitems(forward), raise_getitems(backward)
    thread_rng = getattr(partitioners, "thread_graphsafe_rng_from_hops", None)
    if thread_rng is not None:
        forward = thread_rng(forward, is_backward=False)
        backward = thread_rng(backward, is_backward=True)
    return forward, backward


def inputs_written_afterwards(graph: torch.fx.Graph) -> frozenset[torch.fx.Node]:
    """Return the placeholders that AOTAutograd writes once the forward has returned.

    A write that autograd must see is no part of the graph: the new value is an output
    of the forward, described as the mutation of an input. (The metadata on the tracing
    context says the same, but is not there yet when a graph is partitioned.)
    """
    (output,) = graph.find_nodes(op="output")
    written = {
        description.mutated_input
        for description in output.meta.get("desc", ())
        if isinstance(description, InputMutationAOTOutput)
    }
    placeholders = graph.find_nodes(op="placeholder")
    return frozenset(n for n in placeholders if n.meta.get("desc") in written)


def compile_id() -> str:
    """Return the id of the current compilation ("0/0"), "-" outside of one."""
    current = CompileContext.current_compile_id()
    return "-" if current is None else str(current)


def ends_in_graph_break(gm: torch.fx.GraphModule) -> bool:
    """Return whether the code that Dynamo captured goes on after this graph."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    return bool(getattr(reason, "graph_break", False))


def own_context(context: TracingContext | None) -> TracingContext | None:
    """Return a copy of Dynamo's context for one more compilation of one graph.

    A compilation leaves its metadata there for its backward. Where
    DistributedDataParallel splits a graph its parts share a context, and take turns by
    counting their compilations; one more would confuse them.
    """
    if context is None:
        return None
    own = copy.copy(context)
    own.ddp_optimizer_ctx = None
    return own


@contextmanager
def donated(positions: Sequence[int]) -> Iterator[None]:
    """Tell Inductor which inputs of a backward it may write, as AOTAutograd will.

    It reads that from Dynamo's context, where AOTAutograd's metadata are put only after
    the graph was split.
    """
    context = TracingContext.try_get()
    if context is None:
        yield
        return
    before = context.fw_metadata
    metadata: Any = types.SimpleNamespace(
        bw_donated_idxs=list(positions), static_input_indices=[]
    )
    context.fw_metadata = metadata
    try:
        yield
    finally:
        context.fw_metadata = before


def in_backward() -> bool:
    """Return whether this thread is in a backward, as when a checkpoint recomputes."""
    return torch._C._current_graph_task_id() != -1


def saves_through_hooks() -> bool:
    """Return whether what autograd saves now goes to hooks, as in a checkpoint."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def compile_in_place(module: torch.nn.Module, backend: Callable[..., Any]) -> None:
    """Compile a module as ``module.compile(backend=...)`` does, apart from all others.

    Dynamo counts recompilations by code object, of which all modules share one. Here
    the module gets its own, so that nothing counts against the user's limit.
    """
    call_impl: Callable[..., Any] = module._call_impl

    def call(*arguments: Any, **named: Any) -> Any:
        return call_impl(*arguments, **named)

    call.__code__ = call.__code__.replace()
    module._compiled_call_impl = torch.compile(call, backend=backend)


def static_inputs(
    placeholders: Sequence[torch.fx.Node], indices: Sequence[int] | None
) -> Any:
    """Return the set of placeholders that live as long as the module (parameters)."""
    chosen = set(indices or ())
    return OrderedSet(node for i, node in enumerate(placeholders) if i in chosen)


@contextmanager
def surfaced(kind: type[Exception]) -> Iterator[None]:
    """Let errors of a kind reach the user as they are.

    Dynamo wraps what a backend raises in BackendCompilerFailed, except for its own
    ShortenTraceback. The error is raised again as a class that is both, so that
    ``except InfeasibleBudgetError`` works around the first call of a model.
    """
    try:
        yield
    except ShortenTraceback:
        raise
    except kind as error:
        raise _as_dynamo_error(error) from error


def _as_dynamo_error(error: Exception) -> Exception:
    plain = type(error)
    both: Any = type(plain.__name__, (plain, ShortenTraceback), {})
    both.__module__ = plain.__module__
    result: Exception = both.__new__(both)
    result.args = error.args
    result.__dict__.update(error.__dict__)
    result.first_useful_frame = None  # type: ignore[attr-defined]
    return result


def trace_json(name: str, payload: Callable[[], str]) -> None:
    """Put a JSON text into the compile trace, if torch writes one (TORCH_TRACE)."""
    about = {"name": name, "encoding": "json"}
    torch_logging.trace_structured(
        "artifact", metadata_fn=lambda: about, payload_fn=payload
    )


@contextmanager
def without_modes() -> Iterator[None]:
    """Run operators for real although a fake or tracing mode is active."""
    with _disable_current_modes(), torch.no_grad(), torch._C._DisableAutocast():
        yield


def allocations_during(call: Callable[[], object]) -> list[int]:
    """Return the changes of allocated CPU bytes while ``call`` runs, in order.

    The legacy profiler is used: it records this thread's allocations and, other than
    the current one, writes nothing to the terminal.

    Raises:
        RuntimeError: a profiler is active already.
    """
    settings = ProfilerConfig(
        ProfilerState.CPU, False, True, False, False, False, _ExperimentalConfig(), ""
    )
    _autograd._enable_profiler_legacy(settings)
    try:
        result = call()
    finally:
        records = _autograd._disable_profiler_legacy()
    del result
    return [
        event.cpu_memory_usage()
        for thread in records
        for event in thread
        if event.kind() == "memory_alloc"
    ]
