"""FLOP formulas by operator: what torch prices at 0, prices wrongly or leaves out.

A multiplication and an addition count as two. A formula takes a `Call`, whose tensors
have metadata only, and returns the FLOPs: an int where sizes are plain ints, an
expression where they are functions of symbols. Formulas with a logarithm, and those of
linear algebra, take ints only and raise TypeError otherwise.

Why not torch's flop registry alone: it counts causal attention in full, the weight
gradient of a grouped convolution once per group too often, complex products as real
ones, and knows neither attention on the CPU nor FFT nor recurrent layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import sympy

from gcpass.sizes import ShapeOnly, at_least_one, hint_int, tensors_in
from gcpass.symbols import Symbolic

__all__ = ["OWN_FORMULAS", "Call", "per_input", "per_output"]

TRANSCENDENTAL_FLOPS = 16
"""FLOPs per element of exp, log, sin, tanh, erf and the like. Origin: a vectorised
single precision exp is a polynomial of degree 5 or 6 by fused multiply-adds (12), range
reduction (3) and scaling (1), as in Moshier's Cephes; the others are near it."""

NORMALISATION_FLOPS = 8
"""FLOPs per element of a normalisation that arrives as one operator: mean, variance,
subtract, scale, shift; its backward is about the same. Counted by hand."""

_COMPLEX_FLOPS = 4  # 4 multiplications and 4 additions where a real number has 1 and 1
_ROTATION_PASSES = 20  # eigh, svd: about 9 n^3 to 22 n^3, Golub and Van Loan (2013)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One operator call with metadata in place of data.

    Attributes:
        target: the operator.
        args, kwargs: arguments; tensors without data and sizes as plain ints, or all
            tensors as `ShapeOnly` and sizes as functions of symbols.
        out: the result's metadata in the same form.
    """

    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    out: Any

    def named(self) -> dict[str, Any]:
        """Return the arguments by the schema's names, defaults filled in."""
        schema = self.target._schema.arguments
        values = {a.name: a.default_value for a in schema if a.has_default_value()}
        values |= {a.name: v for a, v in zip(schema, self.args, strict=False)}
        return values | dict(self.kwargs)


CallFormula: TypeAlias = Callable[[Call], Symbolic]


def sizes_of(tensor: Any) -> list[Symbolic]:
    """Return the sizes of a tensor or `ShapeOnly`, those of a tensor by hint."""
    read = (lambda size: size) if isinstance(tensor, ShapeOnly) else hint_int
    return [read(size) for size in tensor.shape]


def _elements(tensor: Any) -> Symbolic:
    return math.prod(sizes_of(tensor))


def most(counts: Iterable[Symbolic]) -> Symbolic:
    """Return the largest of some counts, 0 of none."""
    known = list(counts)
    if all(isinstance(count, int) for count in known):
        return max(known, default=0)
    return sympy.Max(*known)


# --- matrix products, convolutions, recurrent layers ----------------------------------


def _product(left: str, right: str, *, transposed: bool = False) -> CallFormula:
    """Return the formula of left (.., m, k) @ right (.., k, n), or (.., n, k)."""

    def flops(call: Call) -> Symbolic:
        named = call.named()
        a, b = named[left], named[right]
        n = 1 if b.dim() == 1 else sizes_of(b)[-2 if transposed else -1]
        return _complex_factor(call) * 2 * _elements(a) * n

    return flops


def _complex_factor(call: Call) -> int:
    out = tensors_in(call.out)
    return _COMPLEX_FLOPS if out and out[0].dtype.is_complex else 1


def _grouped_product(call: Call) -> Symbolic:
    # self (g, m, k) @ mat2 (k, n) splits n over the groups: each row meets n/g columns
    named = call.named()
    a, b = named["self"], named["mat2"]
    shared = sizes_of(a)[0] if a.dim() == 3 and b.dim() == 2 else 1
    return 2 * _elements(a) * sizes_of(b)[-1] // shared


def _convolution_of(images: Any, weight: Any, call: Call) -> Symbolic:
    """Return 2 B S |W|: every weight once per image and position.

    The weight is (out, in / groups, kernel) or, transposed, (in, out / groups, kernel),
    so its size holds the groups already. S counts the positions of `images`: the
    output, or the input of a transposed convolution.
    """
    batch, _, *trailing = sizes_of(images)
    positions = batch * math.prod(trailing)
    return _complex_factor(call) * 2 * positions * _elements(weight)


def _convolution(call: Call) -> Symbolic:
    named = call.named()
    weight = named["weight"] if "weight" in named else named["W"]
    source = named["input"] if "input" in named else named.get("X", named.get("self"))
    output = tensors_in(call.out)[0]
    images = source if source is not None and named.get("transposed") else output
    return _convolution_of(images, weight, call)


def _convolution_backward(call: Call) -> Symbolic:
    # Both gradients pair every weight with every image and position again.
    named = call.named()
    images = named["input"] if named["transposed"] else named["grad_output"]
    to_input, to_weight, to_bias = (bool(flag) for flag in named["output_mask"])
    once = _convolution_of(images, named["weight"], call)
    bias = _elements(named["grad_output"]) if to_bias else 0
    return (to_input + to_weight) * once + bias


def _recurrent(passes: int) -> CallFormula:
    """Return the formula of a recurrent layer: every token meets every weight."""

    def flops(call: Call) -> Symbolic:
        named = call.named()
        tokens = _elements(named["input"]) // at_least_one(sizes_of(named["input"])[-1])
        weights = tensors_in([v for k, v in named.items() if k.startswith("weight")])
        weights = [
            w for w in weights if w.dim() > 1
        ]  # biases are added, not multiplied
        return passes * 2 * tokens * sum(_elements(w) for w in weights)

    return flops


# --- attention ------------------------------------------------------------------------


def _attention(products: int, *, sequence_axis: int = -2) -> CallFormula:
    """Return the formula of attention with so many products over (query, key) pairs.

    Forward: Q K^T and P V. Backward: the scores again and four gradients. Products
    along the head's width d_qk: 1 forward, 3 backward; along d_v: 1 and 2.

    Args:
        products: 2 forward, 5 backward.
        sequence_axis: -2 for (batch, heads, sequence, width), -3 where the sequence
            comes before the heads. Packed sequences then have no batch, and every
            query is taken to meet as many keys as the longest sequence has.
    """
    along_qk, along_v = {2: (1, 1), 5: (3, 2)}[products]

    def flops(call: Call) -> Symbolic:
        named = call.named()
        query, value = sizes_of(named["query"]), sizes_of(named["value"])
        keys = sizes_of(named["key"])[sequence_axis]
        packed = named.get("cum_seq_k", named.get("cu_seqlens_k")) is not None
        if packed and sequence_axis == -3:
            keys = named.get("max_k", named.get("max_seqlen_k")) or keys
        pairs = math.prod(query) // at_least_one(query[-1]) * keys
        width = along_qk * query[-1] + along_v * value[-1]
        return _halved_if_causal(call, 2 * pairs * width)

    return flops


def _halved_if_causal(call: Call, flops: Symbolic) -> Symbolic:
    """Return half of the FLOPs where the call masks the future.

    Flash kernels skip the blocks above the diagonal, half of them in long sequences.
    """
    named = call.named()
    causal = named.get("is_causal", False) or named.get("custom_mask_type", 0)
    return flops // 2 if causal else flops


# --- FFT, linear algebra, sorting -----------------------------------------------------


def _fourier(flops_per_point: float) -> CallFormula:
    """Return the formula 5 N log2 N per transform, half of it for real data.

    Cooley and Tukey (1965), radix 2; the count that FFTW's benchmarks use too.
    """

    def flops(call: Call) -> Symbolic:
        named = call.named()
        real = (
            call.out if "last_dim_size" in named else named["self"]
        )  # the longer side
        points = math.prod(sizes_of(real)[dim] for dim in named["dim"])
        if points < 2:
            return 0
        return round(flops_per_point * _elements(real) * math.log2(points))

    return flops


def _linear_algebra(coefficient: float) -> CallFormula:
    """Return the formula c m n min(m, n) per matrix (Golub and Van Loan, 2013)."""

    def flops(call: Call) -> Symbolic:
        matrix = tensors_in(call.args)[0]
        size = min(sizes_of(matrix)[-2:], default=0)
        return round(coefficient * _elements(matrix) * size)

    return flops


def _sort(call: Call) -> Symbolic:
    source = tensors_in(call.args)[0]
    longest = max(sizes_of(source), default=1)
    rounds: int = max(1, longest - 1).bit_length()
    return _elements(source) * rounds


# --- by kind --------------------------------------------------------------------------


def per_input(flops_per_element: int) -> CallFormula:
    """Return the formula: so many FLOPs per element of the largest input."""

    def flops(call: Call) -> Symbolic:
        inputs = tensors_in((call.args, dict(call.kwargs)))
        return flops_per_element * most(map(_elements, inputs))

    return flops


def per_output(flops_per_element: int) -> CallFormula:
    """Return the formula: so many FLOPs per element of the results."""

    def flops(call: Call) -> Symbolic:
        out = tensors_in(call.out)
        return flops_per_element * sum(map(_elements, out))

    return flops


def _table(groups: Sequence[tuple[str, CallFormula]]) -> dict[str, CallFormula]:
    return {f"aten::{op}": formula for ops, formula in groups for op in ops.split()}


_SDPA = "_scaled_dot_product"
_FREE = (
    "_to_copy _unsafe_view alias arange cat clone constant_pad_nd copy copy_ detach "
    "empty empty_like empty_strided eye fill flip full full_like lift_fresh_copy "
    "new_empty new_full new_ones new_zeros ones ones_like repeat roll scalar_tensor "
    "slice_scatter select_scatter diagonal_scatter zeros zeros_like tril triu "
    "sym_size sym_stride sym_numel sym_storage_offset"
)
_TRANSCENDENTAL = (
    "acos acosh asin asinh atan atan2 atanh cos cosh digamma erf erfc erfinv exp exp2 "
    "expm1 gelu gelu_backward lgamma log log10 log1p log2 log_sigmoid_forward logit "
    "mish mish_backward pow sigmoid silu silu_backward sin sinh softplus "
    "softplus_backward tan tanh"
)
_NORMALISATION = (
    "native_layer_norm native_layer_norm_backward native_group_norm "
    "native_group_norm_backward native_batch_norm native_batch_norm_backward "
    "_native_batch_norm_legit _native_batch_norm_legit_functional _fused_rms_norm "
    "_fused_rms_norm_backward cudnn_batch_norm cudnn_batch_norm_backward "
    "miopen_batch_norm miopen_batch_norm_backward var_mean var std std_mean"
)

OWN_FORMULAS: dict[str, CallFormula] = {
    **_table(
        [
            ("mm bmm _int_mm", _product("self", "mat2")),
            ("addmm _addmm_activation", _product("mat1", "mat2")),
            ("baddbmm addbmm", _product("batch1", "batch2")),
            ("mv addmv", per_input(2)),
            ("dot vdot", per_input(2)),
            ("linear", _product("input", "weight", transposed=True)),
            ("_weight_int8pack_mm", _product("self", "mat2", transposed=True)),
            ("_scaled_mm _scaled_mm_v2", _product("self", "mat2")),
            ("_grouped_mm _scaled_grouped_mm", _grouped_product),
            ("convolution _convolution cudnn_convolution", _convolution),
            ("convolution_overrideable mkldnn_convolution", _convolution),
            ("_slow_conv2d_forward miopen_convolution", _convolution),
            ("convolution_backward", _convolution_backward),
            ("convolution_backward_overrideable", _convolution_backward),
            ("mkldnn_rnn_layer _cudnn_rnn miopen_rnn", _recurrent(1)),
            ("mkldnn_rnn_layer_backward _cudnn_rnn_backward", _recurrent(2)),
            (f"{_SDPA}_flash_attention {_SDPA}_efficient_attention", _attention(2)),
            (f"{_SDPA}_flash_attention_for_cpu {_SDPA}_attention_math", _attention(2)),
            (f"{_SDPA}_cudnn_attention", _attention(2)),
            (f"{_SDPA}_attention_math_for_mps", _attention(2)),
            (f"{_SDPA}_fused_attention_overrideable", _attention(2)),
            (f"{_SDPA}_flash_attention_backward", _attention(5)),
            (f"{_SDPA}_flash_attention_for_cpu_backward", _attention(5)),
            (f"{_SDPA}_efficient_attention_backward", _attention(5)),
            (f"{_SDPA}_cudnn_attention_backward", _attention(5)),
            (f"{_SDPA}_fused_attention_overrideable_backward", _attention(5)),
            (
                "_flash_attention_forward _efficient_attention_forward",
                _attention(2, sequence_axis=-3),
            ),
            (
                "_flash_attention_backward _efficient_attention_backward",
                _attention(5, sequence_axis=-3),
            ),
            ("_fft_r2c _fft_c2r", _fourier(2.5)),
            ("_fft_c2c", _fourier(5.0)),
            ("linalg_cholesky_ex", _linear_algebra(1 / 3)),
            ("linalg_lu_factor_ex linalg_lu _linalg_solve_ex", _linear_algebra(2 / 3)),
            ("linalg_inv_ex cholesky_inverse", _linear_algebra(2.0)),
            ("linalg_qr geqrf", _linear_algebra(4 / 3)),
            ("_linalg_svd _linalg_eigh linalg_eig", _linear_algebra(_ROTATION_PASSES)),
            ("sort topk argsort", _sort),
            ("_softmax _log_softmax", per_input(TRANSCENDENTAL_FLOPS)),
            ("logsumexp", per_input(TRANSCENDENTAL_FLOPS)),
            ("cumsum cumprod count_nonzero", per_input(1)),
            ("scatter scatter_add scatter_reduce index_put index_add", per_input(1)),
            ("embedding_dense_backward", per_input(1)),
            (_NORMALISATION, per_input(NORMALISATION_FLOPS)),
            (_TRANSCENDENTAL, per_output(TRANSCENDENTAL_FLOPS)),
            (_FREE, per_output(0)),
        ]
    ),
    "mkldnn::_convolution_pointwise": _convolution,
    "mkldnn::_linear_pointwise": _product("X", "W", transposed=True),
    "prims::convert_element_type": per_output(0),
    "prims::iota": per_output(0),
    "prims::sum": per_input(1),
    "prims::var": per_input(NORMALISATION_FLOPS),
    "prims::prepare_softmax_online": per_input(TRANSCENDENTAL_FLOPS),
}
