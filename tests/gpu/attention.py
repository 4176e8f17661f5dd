"""CUDA's fused attention for CPU tensors, written out; so that its callers can run."""

from __future__ import annotations

from typing import Any

import torch

_QUANTUM = 32  # CUDA's efficient attention pads its log-sum-exp to a multiple of it


def install_attention() -> torch.library.Library:
    """Register the operators for CPU tensors; they stay while the result lives."""
    library = torch.library.Library("aten", "IMPL")
    for name, function in {
        "_scaled_dot_product_flash_attention": _flash,
        "_scaled_dot_product_flash_attention_backward": _flash_backward,
        "_scaled_dot_product_efficient_attention": _efficient,
        "_scaled_dot_product_efficient_attention_backward": _efficient_backward,
    }.items():
        library.impl(name, function, "CPU")
    return library


def _scores(
    query: torch.Tensor, key: torch.Tensor, is_causal: bool, scale: float | None
) -> torch.Tensor:
    scores = query.float() @ key.float().mT * _scale(query, scale)
    if is_causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    return scores


def _scale(query: torch.Tensor, scale: float | None) -> float:
    return float(query.shape[-1] ** -0.5 if scale is None else scale)


def _forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    is_causal: bool,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (output, log-sum-exp)."""
    scores = _scores(query, key, is_causal, scale)
    output = (scores.softmax(-1) @ value.float()).to(query.dtype)
    return output, scores.logsumexp(-1)


def _by_position(x: torch.Tensor) -> torch.Tensor:
    """Lay out by position, then head, as the efficient kernels do."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _as(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Lay out like another tensor, as the flash kernels do."""
    return torch.empty_like(like).copy_(x)


def _backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    logsumexp: torch.Tensor,
    is_causal: bool,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    scores = _scores(query, key, is_causal, scale)
    weights = (scores - logsumexp.unsqueeze(-1)).exp()
    gradient = gradient.float()
    of_weights = gradient @ value.float().mT
    drift = (gradient * output.float()).sum(-1, keepdim=True)
    of_scores = weights * (of_weights - drift) * _scale(query, scale)
    gradients = (
        of_scores @ key.float(),
        of_scores.mT @ query.float(),
        weights.mT @ gradient,
    )
    of_query, of_key, of_value = (g.to(query.dtype) for g in gradients)
    return of_query, of_key, of_value


def _flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    _require_none_dropped(dropout_p)
    output, logsumexp = _forward(query, key, value, is_causal, scale)
    output = _as(output, query)
    seed = torch.zeros(2, dtype=torch.uint64)
    offset = torch.zeros((), dtype=torch.uint64)
    lengths = (query.shape[2], key.shape[2])
    mask = torch.empty(0, dtype=query.dtype)
    return (output, logsumexp, None, None, *lengths, seed, offset, mask)


def _flash_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    logsumexp: torch.Tensor,
    cum_seq_q: Any,
    cum_seq_k: Any,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Any,
    philox_offset: Any,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    _require_none_dropped(dropout_p)
    gradients = _backward(
        gradient, query, key, value, output, logsumexp, is_causal, scale
    )
    inputs = (query, key, value)
    return tuple(_as(g, like) for g, like in zip(gradients, inputs, strict=True))


def _efficient(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: torch.Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    _require_none_dropped(dropout_p)
    assert attn_bias is None
    output, logsumexp = _forward(query, key, value, is_causal, scale)
    length = query.shape[2]
    padded = logsumexp.new_full(
        (*logsumexp.shape[:2], -(-length // _QUANTUM) * _QUANTUM), float("inf")
    )
    padded[..., :length] = logsumexp
    zero = torch.zeros((), dtype=torch.int64)
    return (_by_position(output), padded, zero, zero.clone())


def _efficient_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: torch.Tensor | None,
    output: torch.Tensor,
    logsumexp: torch.Tensor,
    philox_seed: Any,
    philox_offset: Any,
    dropout_p: float,
    grad_input_mask: Any,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    _require_none_dropped(dropout_p)
    logsumexp = logsumexp[..., : query.shape[2]]
    gradients = _backward(
        gradient, query, key, value, output, logsumexp, is_causal, scale
    )
    return (*map(_by_position, gradients), None)


def _require_none_dropped(dropout_p: float) -> None:
    if dropout_p:
        raise NotImplementedError("attention with dropout")
