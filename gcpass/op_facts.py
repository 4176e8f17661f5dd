"""What gcpass knows of an operator besides its work: kind, randomness, discreteness.

Answers are per call, not per operator: attention with dropout probability 0 draws
nothing although its tag says that it may (pytorch#187985).
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from enum import Enum
from functools import cache
from typing import Any

import torch
from torch import fx

from gcpass.flop_formulas import Call
from gcpass.flops import call_of, carried_call, graph_bodies, op_names
from gcpass.sizes import tensors_in
from gcpass.torch_private import HigherOrderOperator, OpOverload

__all__ = [
    "Kind",
    "absorbs",
    "draws_random",
    "is_cast",
    "is_discrete",
    "is_elementwise",
    "op_kind",
    "selects",
]


class Kind(Enum):
    """How a node becomes code.

    Attributes:
        VIEW: shares the memory of what it reads, or picks an item of a tuple; free.
        POINTWISE: Inductor computes it inside the kernels of its readers or writers.
        REDUCTION: may absorb pointwise producers; its own result is stored. Scans
            and pooling count here: they read a window and are no one's producer, and
            what pooling reads is stored (`absorbs`).
        EXTERN: a kernel of its own that reads and writes memory: products,
            attention, `cat`, scatter, sort, fallbacks, operators of other libraries.
        NONE: no code: inputs, constants, arithmetic on sizes, assertions.
    """

    VIEW = "view"
    POINTWISE = "pointwise"
    REDUCTION = "reduction"
    EXTERN = "extern"
    NONE = "none"


def _names(namespace: str, ops: str) -> frozenset[str]:
    return frozenset(f"{namespace}::{op}" for op in ops.split())


# What Inductor lowers to pointwise code though torch.Tag.pointwise is missing:
# creation, copies, gathers. `cat` is not here: Inductor stores its result
# (ConcatKernel) unless its inputs are few and cheap.
_POINTWISE = _names(
    "aten",
    "_to_copy arange bucketize constant_pad_nd copy copy_ diagonal_scatter embedding "
    "empty empty_like empty_strided eye fill flip full full_like gather glu index "
    "index_select lift_fresh_copy masked_fill new_empty new_empty_strided new_full "
    "new_ones new_zeros ones ones_like reflection_pad1d reflection_pad2d "
    "reflection_pad3d repeat replication_pad1d replication_pad2d replication_pad3d "
    "roll scalar_tensor searchsorted select_scatter slice_scatter tril triu "
    "upsample_nearest1d upsample_nearest2d upsample_nearest3d _unsafe_index "
    "_unsafe_masked_index zeros zeros_like native_dropout",
) | _names(
    "prims",
    # drawing from a given seed is pointwise; whether it may be repeated is another
    # question (`draws_random`)
    "convert_element_type inductor_force_stride_order inductor_lookup_seed "
    "inductor_randint inductor_random iota where abs add clone div eq exp fma ge gt le "
    "log lt maximum minimum mul ne neg pow rsqrt sin cos sqrt sub tanh erf reciprocal "
    "rev _inductor_bucketize _low_memory_max_pool_offsets_to_indices",
)
_REDUCTION = _names(
    "aten",
    "_log_softmax _log_softmax_backward_data _native_batch_norm_legit "
    "_native_batch_norm_legit_functional _native_batch_norm_legit_no_training _softmax "
    "_softmax_backward_data _fused_rms_norm _fused_rms_norm_backward "
    "adaptive_avg_pool2d _adaptive_avg_pool2d avg_pool1d avg_pool2d "
    "avg_pool2d_backward avg_pool3d cummax cummin cumprod cumsum logcumsumexp "
    "max_pool2d_with_indices max_pool2d_with_indices_backward "
    "max_pool3d_with_indices native_batch_norm native_batch_norm_backward "
    "native_group_norm native_group_norm_backward native_layer_norm "
    "native_layer_norm_backward",
) | _names(
    "prims",
    "sum prod amax amin var xor_sum prepare_softmax_online "
    "_low_memory_max_pool_with_offsets",
)
# Of the pointwise ones, those that compute each element from the elements at its place
# though the tag is missing.
_ELEMENTWISE = _names(
    "aten", "_to_copy clone copy masked_fill native_dropout tril triu"
) | _names(
    "prims",
    "convert_element_type where abs add clone div eq exp fma ge gt le log lt maximum "
    "minimum mul ne neg pow rsqrt sin cos sqrt sub tanh erf reciprocal",
)
# Of these, the ones that read every element several times, from another place each:
# Inductor stores what they read (`realize_hint` in its lowerings of pooling).
_WINDOWS = _names(
    "aten",
    "adaptive_avg_pool2d _adaptive_avg_pool2d avg_pool1d avg_pool2d "
    "avg_pool2d_backward avg_pool3d max_pool2d_with_indices "
    "max_pool2d_with_indices_backward max_pool3d_with_indices",
) | _names("prims", "_low_memory_max_pool_with_offsets")
# Scans are kernels where Triton generates them, library calls on the CPU.
_SCANS = _names("aten", "cummax cummin cumprod cumsum logcumsumexp")
_NO_CODE = _names(
    "aten",
    "_assert_async _assert_scalar _assert_tensor_metadata sym_constrain_range "
    "sym_constrain_range_for_size sym_numel sym_size sym_storage_offset sym_stride",
)
_COPY_FREE = _names("aten", "_unsafe_view")  # a view whose schema does not say so
_COMPLEX_NATIVE = _names("aten", "clone copy full zeros ones empty")

# Draws on the CPU are a function of the given seed, and replays are exact there. They
# count as draws all the same: CUDA replays draw other numbers in another kernel shape
# (pytorch#198333).
_SEED_READERS = _names(
    "prims",
    "inductor_seed inductor_seeds inductor_lookup_seed inductor_random "
    "inductor_randint inductor_rand_eager_offset inductor_rand_eager_offsets",
)
# operator: (argument with the drop probability, argument that switches training off)
_DROPOUT_ARGUMENTS = {
    **dict.fromkeys(
        _names("aten", "native_dropout dropout alpha_dropout"), ("p", "train")
    ),
    **dict.fromkeys(
        _names("aten", "_cudnn_rnn miopen_rnn lstm gru rnn_tanh rnn_relu"),
        ("dropout", "train"),
    ),
    **dict.fromkeys(
        _names("aten", "rrelu_with_noise rrelu_with_noise_functional"),
        (None, "training"),
    ),
}

_DISCRETE = _names(
    "aten",
    "_unique _unique2 argmax argmin argsort bincount bucketize cummax cummin histc "
    "kthvalue max.dim median min.dim mode multinomial nanmedian nonzero nonzero_static "
    "searchsorted sort topk unique_consecutive unique_dim unique_dim_consecutive",
) | _names("prims", "_inductor_bucketize")
_COMPARISONS = _names("aten", "eq ge gt le lt ne") | _names(
    "prims", "eq ge gt le lt ne"
)
_CONVERSIONS = _names("aten", "_to_copy") | _names("prims", "convert_element_type")


def op_kind(node: fx.Node) -> Kind:
    """Return how the node becomes code."""
    target = node.target
    if node.op != "call_function":
        return Kind.NONE
    if target is operator.getitem:
        return Kind.VIEW
    if isinstance(target, OpOverload):
        return _overload_kind(node, target)
    makes_tensors = bool(tensors_in(node.meta.get("val")))
    is_operator = isinstance(target, HigherOrderOperator) or makes_tensors
    return Kind.EXTERN if is_operator else Kind.NONE


def absorbs(node: fx.Node) -> bool:
    """Return whether the node's kernel can compute what it reads by itself."""
    if op_kind(node) not in (Kind.POINTWISE, Kind.REDUCTION):
        return False
    target = node.target
    windows = isinstance(target, OpOverload) and op_names(target)[-1] in _WINDOWS
    return not windows


def is_cast(node: fx.Node) -> bool:
    """Return whether the node's operator is one that changes the type of numbers."""
    target = node.target
    return isinstance(target, OpOverload) and op_names(target)[-1] in _CONVERSIONS


@cache
def is_elementwise(target: Any) -> bool:
    """Return whether an operator computes each element from those at its place."""
    if not isinstance(target, OpOverload) or _real_kind(target) is not Kind.POINTWISE:
        return False
    name = op_names(target)[-1]
    return name in _ELEMENTWISE or torch.Tag.pointwise in target.tags


def draws_random(node: fx.Node) -> bool:
    """Return whether this call draws random numbers, its arguments considered.

    A second execution of a node that draws gives other numbers: it must be saved.
    """
    return _any_call(node, _may_draw, _call_draws)


def is_discrete(node: fx.Node) -> bool:
    """Return whether a rounding difference can change the result by a whole step.

    Positions, counts and float-to-integer conversions select: recomputed in a kernel
    that rounds differently, they may pick another expert or another row than the
    forward did, and the gradient belongs to another function. So do comparisons of
    tensors: values are at the step wherever one tensor was picked from the other, as
    in ``x == x.amax()`` or ``x >= x.topk(3).values[-1]``.

    Comparisons with a number and rounding to float (floor, round) are not counted:
    where a flip happens the argument is at the step to rounding, one element changes,
    and either value is a valid subgradient there; refusing them would save the mask of
    every relu and clamp.
    """
    return _any_call(node, _may_be_discrete, _call_is_discrete)


def selects(node: fx.Node) -> bool:
    """Return whether the node is discrete and reads what rounding can change.

    It must read what the forward computed: what it would select from values that are
    computed again may be another thing than the forward used.
    """
    floats = [t for t in _tensors_read(node) if t.dtype.is_floating_point]
    return bool(floats) and is_discrete(node)


def _tensors_read(node: fx.Node) -> list[torch.Tensor]:
    return tensors_in([n.meta.get("val") for n in node.all_input_nodes])


def _any_call(
    node: fx.Node, may: Callable[[OpOverload], bool], does: Callable[[Call], bool]
) -> bool:
    """Return whether the node's call does something, or one inside of its body.

    Args:
        node: any node.
        may: whether some call of the operator does; cheap, so that arguments are
            looked at for few nodes only.
        does: whether this call does, asked where some call may.
    """
    target = node.target
    if node.op != "call_function":
        return False
    if isinstance(target, OpOverload):
        return may(target) and does(call_of(node))
    if not isinstance(target, HigherOrderOperator):
        return False
    call = call_of(node)
    carried = carried_call(call)
    if carried is not None:
        return may(carried.target) and does(carried)
    return any(
        _any_call(inner, may, does)
        for body in graph_bodies(call)
        for inner in body.graph.nodes
    )


@cache
def _may_draw(target: OpOverload) -> bool:
    if op_names(target)[-1] in _SEED_READERS:
        return True
    takes_generator = any("Generator" in str(a.type) for a in target._schema.arguments)
    return takes_generator or torch.Tag.nondeterministic_seeded in target.tags


def _call_draws(call: Call) -> bool:
    named, name = call.named(), op_names(call.target)[-1]
    if "dropout_p" in named:
        return bool(named["dropout_p"] != 0)
    if name not in _DROPOUT_ARGUMENTS:
        return True
    rate, switch = _DROPOUT_ARGUMENTS[name]
    never = rate is not None and named[rate] == 0
    return not never and named[switch] is not False


@cache
def _may_be_discrete(target: OpOverload) -> bool:
    names = op_names(target)
    by_arguments = names[-1] in _CONVERSIONS or names[-1] in _COMPARISONS
    return by_arguments or any(name in _DISCRETE for name in names)


def _call_is_discrete(call: Call) -> bool:
    name = op_names(call.target)[-1]
    if name in _COMPARISONS:
        compared = tensors_in(call.args)
        return len(compared) > 1 and all(t.dtype.is_floating_point for t in compared)
    return _truncates(call.args, call.out) if name in _CONVERSIONS else True


def _truncates(args: Any, out: Any) -> bool:
    sources, results = tensors_in(args), tensors_in(out)
    if not sources or not results:
        return False
    to = results[0].dtype
    is_integer = not (to.is_floating_point or to.is_complex or to is torch.bool)
    return sources[0].dtype.is_floating_point and is_integer


def _overload_kind(node: fx.Node, target: OpOverload) -> Kind:
    kind = _real_kind(target)
    if op_names(target)[-1] in _SCANS and _is_on_cpu(node):
        return Kind.EXTERN
    if kind not in (Kind.POINTWISE, Kind.REDUCTION) or not _is_complex(node):
        return kind
    # Inductor generates no code for complex numbers; eager kernels run instead.
    return kind if op_names(target)[-1] in _COMPLEX_NATIVE else Kind.EXTERN


@cache
def _real_kind(target: OpOverload) -> Kind:
    """Return the kind of an operator on real numbers."""
    name = op_names(target)[-1]
    if name in _NO_CODE:
        return Kind.NONE
    if name in _COPY_FREE or _is_view(target):
        return Kind.VIEW
    if name in _POINTWISE:
        return Kind.POINTWISE
    if name in _REDUCTION or torch.Tag.reduction in target.tags:
        return Kind.REDUCTION
    if torch.Tag.pointwise in target.tags or torch.Tag.view_copy in target.tags:
        return Kind.POINTWISE
    return Kind.EXTERN


def _is_view(target: OpOverload) -> bool:
    returns = target._schema.returns
    return bool(returns) and all(
        r.alias_info is not None and not r.alias_info.is_write for r in returns
    )


def _is_on_cpu(node: fx.Node) -> bool:
    return all(t.device.type == "cpu" for t in tensors_in(node.meta.get("val")))


def _is_complex(node: fx.Node) -> bool:
    values = [n.meta.get("val") for n in (node, *node.all_input_nodes)]
    return any(t.dtype.is_complex for t in tensors_in(values))
