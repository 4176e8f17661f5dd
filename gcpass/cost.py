"""What one execution of a node costs, in FLOPs, bytes and seconds.

The time is a roofline: Williams, Waterman and Patterson, "Roofline: An Insightful
Visual Performance Model for Multicore Architectures", 2009,
doi:10.1145/1498765.1498785. The larger of compute and traffic time counts, plus the
launch. It ranks what to recompute; it is no clock.

The caller says how many bytes an operation moves, since only the caller knows what
stays inside a fused kernel.

Not modelled: caches, occupancy, overlap of kernels.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from gcpass.flops import USER_FORMULAS, call_of, node_flops, op_names, user_formulas
from gcpass.function_text import function_text
from gcpass.hardware import Device
from gcpass.op_facts import Kind, draws_random, is_discrete, op_kind
from gcpass.products import product_efficiency
from gcpass.sizes import read_bytes, storage_bytes, tensors_in
from gcpass.torch_private import HigherOrderOperator, OpOverload, OpOverloadPacket

__all__ = ["Kind", "NodeCost", "cost_registry_fingerprint", "draws_random"]
__all__ += ["has_cost", "is_discrete", "node_cost", "op_kind", "register_cost"]
__all__ += ["roofline_seconds", "unregister_cost"]

MATRIX_EFFICIENCY = 0.7
"""Share of the dense peak that matrix products reach whose sizes waste nothing, see
`gcpass.products`. Origin: large bf16 products reach
about 0.6 to 0.75 of an H100's peak and up to 0.85 of an A100's in public measurements;
one number for all devices, as only ratios between operations matter to a plan."""

VECTOR_EFFICIENCY = 0.5
"""The same for other code: additions and multiplications rarely pair up to fused
multiply-adds, which the peak counts as two."""

BANDWIDTH_EFFICIENCY = 0.85
"""Share of the nominal bandwidth that a streaming kernel reaches; STREAM-like copies
reach 0.8 to 0.92 on GPUs and servers."""

UNKNOWN_FLOPS_PER_BYTE = 1000
"""FLOPs per byte moved assumed for an operator without a formula. It is above the ridge
of every device in the table (an H100 reaches its bf16 peak at 295), so an unknown
operator costs more than any streaming one and about as much as a product of 3000 x 3000
matrices in bf16."""

_MATRIX_OPS = frozenset(
    f"aten::{op}"
    for op in (
        "mm bmm addmm baddbmm addbmm linear _addmm_activation _int_mm _scaled_mm "
        "_scaled_mm_v2 _grouped_mm _scaled_grouped_mm _weight_int8pack_mm convolution "
        "_convolution convolution_backward convolution_overrideable cudnn_convolution "
        "mkldnn_convolution miopen_convolution _slow_conv2d_forward mkldnn_rnn_layer "
        "mkldnn_rnn_layer_backward _cudnn_rnn _cudnn_rnn_backward miopen_rnn "
        "_flash_attention_forward _flash_attention_backward "
        "_efficient_attention_forward _efficient_attention_backward"
    ).split()
)
# Gathers read the rows that they return, not the whole table.
_GATHERS = frozenset(
    f"aten::{op}" for op in "embedding gather index index_select _unsafe_index".split()
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCost:
    """The cost of one execution.

    Attributes:
        flops: floating point operations; assumed ones where `known` is False.
        bytes_moved: bytes read and written in device memory.
        seconds: roofline time with the launch.
        known: whether a formula gave the FLOPs.
    """

    flops: int
    bytes_moved: int
    seconds: float
    known: bool


_FREE = NodeCost(flops=0, bytes_moved=0, seconds=0.0, known=True)


def roofline_seconds(
    flops: int,
    bytes_moved: int,
    dtype_name: str,
    device: Device,
    *,
    compute_efficiency: float = 1.0,
    bandwidth_efficiency: float = 1.0,
) -> float:
    """Return max(compute time, traffic time) + launch, in seconds.

    Args:
        flops: floating point operations.
        bytes_moved: bytes read and written.
        dtype_name: torch's name of the dtype computed in ("bfloat16"), or "tf32".
        device: peak rates.
        compute_efficiency: share of the peak rate that is reached, in (0, 1].
        bandwidth_efficiency: share of the bandwidth that is reached, in (0, 1].
    """
    compute = flops / (device.peak_flops(dtype_name) * compute_efficiency)
    traffic = bytes_moved / (device.bandwidth_bytes_per_s * bandwidth_efficiency)
    return max(compute, traffic) + device.launch_seconds


def node_cost(
    node: fx.Node,
    device: Device,
    *,
    bytes_moved: int | None = None,
    tf32: bool = False,
) -> NodeCost:
    """Return the cost of one execution of the node.

    Args:
        node: a node of the joint graph.
        device: where it runs.
        bytes_moved: bytes that it moves, 0 when it runs inside another node's kernel
            (then it has no launch either); None for all its inputs and outputs.
        tf32: whether float32 products run in tf32.
    """
    if op_kind(node) in (Kind.VIEW, Kind.NONE):
        return _FREE
    moved = _all_bytes(node) if bytes_moved is None else bytes_moved
    flops = node_flops(node)
    known = flops is not None
    if flops is None:
        flops = UNKNOWN_FLOPS_PER_BYTE * (moved or _all_bytes(node))
    on_matrix_units = _on_matrix_units(node)
    dtype_name = _rate_dtype(node, on_matrix_units=on_matrix_units, tf32=tf32)
    efficiency = VECTOR_EFFICIENCY
    if on_matrix_units:
        rate = device.peak_flops(dtype_name)
        efficiency = MATRIX_EFFICIENCY * product_efficiency(call_of(node), rate, device)
    seconds = roofline_seconds(
        flops,
        moved,
        dtype_name,
        device,
        compute_efficiency=efficiency,
        bandwidth_efficiency=BANDWIDTH_EFFICIENCY,
    )
    if moved == 0 and known:
        seconds -= device.launch_seconds
    return NodeCost(flops=flops, bytes_moved=moved, seconds=seconds, known=known)


def has_cost(node: fx.Node) -> bool:
    """Return whether the node's cost is known; if not, gcpass refuses to repeat it."""
    return op_kind(node) in (Kind.VIEW, Kind.NONE) or node_flops(node) is not None


def register_cost(op: Any, formula: Callable[..., int]) -> None:
    """Give an operator a cost; that also allows gcpass to recompute it.

    Formulas given to `torch.utils.flop_counter.register_flop_formula` are honoured as
    well, after these. A later registration for the same operator replaces it.

    Args:
        op: `torch.ops.lib.op`, an overload of it, what `torch.library.custom_op`
            returned, a higher-order operator, or a name ("lib::op" or
            "lib::op.overload").
        formula: called as ``formula(*args, **kwargs, out=result)`` with the arguments
            of the call; returns FLOPs, an int of 0 or more. Tensors have no data, only
            shape, stride and dtype, and all sizes are plain ints.

    >>> register_cost("my_lib::attend", lambda q, k, v, out: 4 * q.numel() * len(k))
    >>> unregister_cost("my_lib::attend")
    """
    USER_FORMULAS[_registered_name(op)] = formula


def unregister_cost(op: Any) -> None:
    """Forget what `register_cost` was told about an operator, if anything."""
    USER_FORMULAS.pop(_registered_name(op), None)


def cost_registry_fingerprint() -> str:
    """Return a digest of all user formulas, the same in every process.

    It holds the operators' names and the formulas' text, see `gcpass.function_text`.
    """
    digest = hashlib.sha256()
    for name, formula in sorted(user_formulas().items()):
        digest.update(f"{name}\0{function_text(formula)}\0".encode())
    return digest.hexdigest()


def _registered_name(op: Any) -> str:
    if isinstance(op, OpOverload | HigherOrderOperator):
        return op_names(op)[0]
    if isinstance(op, OpOverloadPacket):
        return str(op).replace(".", "::", 1)
    if isinstance(op, str):
        return op if "::" in op else op.replace(".", "::", 1)
    qualified = getattr(op, "_qualname", None)  # torch.library.custom_op's result
    if isinstance(qualified, str):
        return qualified
    raise TypeError(
        f"register_cost takes an operator or its name and was given {op!r}; "
        "pass torch.ops.lib.op or 'lib::op'"
    )


def _all_bytes(node: fx.Node) -> int:
    written = storage_bytes(node.meta.get("val"))
    if isinstance(node.target, OpOverload) and op_names(node.target)[-1] in _GATHERS:
        sources = [n.meta.get("val") for n in node.all_input_nodes[1:]]
        return 2 * written + read_bytes(sources)
    return written + read_bytes([n.meta.get("val") for n in node.all_input_nodes])


def _on_matrix_units(node: fx.Node) -> bool:
    """Return whether the work runs at the matrix units' rate.

    Operators of other libraries count as such: they are hand-written for a reason.
    """
    target = node.target
    if not isinstance(target, OpOverload):
        return True
    if target.namespace not in ("aten", "prims"):
        return True
    name = op_names(target)[-1]
    return name in _MATRIX_OPS or name.startswith("aten::_scaled_dot_product")


def _rate_dtype(node: fx.Node, *, on_matrix_units: bool, tf32: bool) -> str:
    """Return the dtype whose rate holds.

    Products run in the dtype of their factors, the narrowest: biases, scales and
    results can be wider.

    Other code computes in float32, also on half precision values, or in float64.
    """
    values = [n.meta.get("val") for n in (*node.all_input_nodes, node)]
    dtypes = [t.dtype for t in tensors_in(values)]
    floating = [d for d in dtypes if d.is_floating_point or d.is_complex]
    known = floating or dtypes or [torch.float32]
    dtype = min(known, key=lambda d: d.itemsize) if on_matrix_units else known[0]
    name = str(dtype).removeprefix("torch.")
    if on_matrix_units:
        return "tf32" if tf32 and dtype is torch.float32 else name
    return "float64" if dtype in (torch.float64, torch.complex128) else "float32"
