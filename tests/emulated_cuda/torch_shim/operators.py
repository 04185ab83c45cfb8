"""Operators that torch leaves to cuDNN and to attention kernels.

The replacements here call emulated operators, so they are queued and captured like emulated operators.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def _weights(query: Tensor, key: Tensor, bias: Tensor | None, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Return the attention weights, and the logarithm of their denominators."""
    scores = (query.float() @ key.float().transpose(-1, -2)) * scale
    if bias is not None:
        scores = scores + bias
    if is_causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, -math.inf)
    return torch.softmax(scores, -1), torch.logsumexp(scores, -1)


def _scale_of(query: Tensor, scale: float | None) -> float:
    return 1 / math.sqrt(query.shape[-1]) if scale is None else scale


def _as_stored(values: Tensor, like: Tensor) -> Tensor:
    """Return values of shape (batch, heads, length, width) in the memory order of torch's kernels: (B, L, H, W)."""
    return values.to(like.dtype).transpose(1, 2).contiguous().transpose(1, 2)


def _with_heads(values: Tensor, heads: int) -> Tensor:
    """Repeat the heads of keys or values that several heads of the query share."""
    return values if values.shape[1] == heads else values.repeat_interleave(heads // values.shape[1], 1)


def _fold_heads(gradient: Tensor, like: Tensor) -> Tensor:
    heads = like.shape[1]
    return gradient if gradient.shape[1] == heads else gradient.unflatten(1, (heads, -1)).sum(2)


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    dropout: float,
    is_causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return output, logarithms of the denominators, and the scaled dropout mask, which is empty without dropout."""
    heads = query.shape[1]
    weights, denominators = _weights(query, _with_heads(key, heads), bias, is_causal, _scale_of(query, scale))
    mask = _nothing(query)
    if dropout > 0:
        mask = torch.empty_like(weights).bernoulli_(1 - dropout) / (1 - dropout)
        weights = weights * mask
    return _as_stored(weights @ _with_heads(value, heads).float(), query), denominators, mask


def _backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    bias: Tensor | None,
    mask: Tensor,
    is_causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of query, key, value and scores."""
    heads, scale = query.shape[1], _scale_of(query, scale)
    keys, values = _with_heads(key, heads).float(), _with_heads(value, heads).float()
    weights, _ = _weights(query, keys, bias, is_causal, scale)
    gradient, kept = gradient.float(), mask if mask.numel() else 1
    of_values = (weights * kept).transpose(-1, -2) @ gradient
    of_weights = (gradient @ values.transpose(-1, -2)) * kept
    of_scores = weights * (of_weights - (gradient * out.float()).sum(-1, keepdim=True))
    of_query = of_scores @ keys * scale
    of_keys = of_scores.transpose(-1, -2) @ query.float() * scale
    return (
        _as_stored(of_query, query),
        _as_stored(_fold_heads(of_keys, key), key),
        _as_stored(_fold_heads(of_values, value), value),
        of_scores,
    )


def _nothing(like: Tensor) -> Tensor:
    return torch.empty(0, device=like.device)


# The arguments have torch's names, because torch passes arguments by name. Dropout masks replace Philox seeds.


def _flash(
    query, key, value, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None
) -> tuple[Any, ...]:
    out, denominators, mask = _forward(query, key, value, None, dropout_p, is_causal, scale)
    none = _nothing(query)
    return out, denominators, none, none, query.shape[2], key.shape[2], mask, none.clone(), none.clone()


def _flash_backward(
    grad_out,
    query,
    key,
    value,
    out,
    logsumexp,
    cum_seq_q,
    cum_seq_k,
    max_q,
    max_k,
    dropout_p,
    is_causal,
    philox_seed,
    philox_offset,
    *,
    scale=None,
) -> tuple[Any, ...]:
    return _backward(grad_out, query, key, value, out, None, philox_seed, is_causal, scale)[:3]


def _efficient(
    query, key, value, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, *, scale=None
) -> tuple[Any, ...]:
    out, denominators, mask = _forward(query, key, value, attn_bias, dropout_p, is_causal, scale)
    return out, denominators, mask, _nothing(query)


def _efficient_backward(
    grad_out_,
    query,
    key,
    value,
    attn_bias,
    out,
    logsumexp,
    philox_seed,
    philox_offset,
    dropout_p,
    grad_input_mask,
    is_causal=False,
    *,
    scale=None,
) -> tuple[Any, ...]:
    *gradients, scores = _backward(grad_out_, query, key, value, out, attn_bias, philox_seed, is_causal, scale)
    wants_bias = attn_bias is not None and grad_input_mask[3]
    return (*gradients, scores.to(attn_bias.dtype).sum_to_size(attn_bias.shape) if wants_bias else None)


def _cudnn(
    query,
    key,
    value,
    attn_bias,
    compute_log_sumexp,
    dropout_p=0.0,
    is_causal=False,
    return_debug_mask=False,
    *,
    scale=None,
) -> tuple[Any, ...]:
    out, denominators, mask = _forward(query, key, value, attn_bias, dropout_p, is_causal, scale)
    none = _nothing(query)
    return out, denominators, none, none, query.shape[2], key.shape[2], mask, none.clone(), none.clone()


def _cudnn_backward(
    grad_out,
    query,
    key,
    value,
    out,
    logsumexp,
    philox_seed,
    philox_offset,
    attn_bias,
    cum_seq_q,
    cum_seq_k,
    max_q,
    max_k,
    dropout_p,
    is_causal,
    *,
    scale=None,
) -> tuple[Any, ...]:
    return _backward(grad_out, query, key, value, out, attn_bias, philox_seed, is_causal, scale)[:3]


def _cudnn_batch_norm(
    input, weight, bias, running_mean, running_var, training, exponential_average_factor, epsilon
) -> tuple[Tensor, ...]:
    results = aten.native_batch_norm(
        input, weight, bias, running_mean, running_var, training, exponential_average_factor, epsilon
    )
    return (*results, torch.empty(0, dtype=torch.uint8, device=input.device))


def _cudnn_batch_norm_backward(
    input, grad_output, weight, running_mean, running_var, save_mean, save_var, epsilon, reserveSpace
) -> tuple[Tensor, ...]:
    return aten.native_batch_norm_backward(
        grad_output, input, weight, running_mean, running_var, save_mean, save_var, True, epsilon, [True] * 3
    )


_OPERATORS = {
    "_scaled_dot_product_flash_attention": _flash,
    "_scaled_dot_product_flash_attention_backward": _flash_backward,
    "_scaled_dot_product_efficient_attention": _efficient,
    "_scaled_dot_product_efficient_attention_backward": _efficient_backward,
    "_scaled_dot_product_cudnn_attention": _cudnn,
    "_scaled_dot_product_cudnn_attention_backward": _cudnn_backward,
    "cudnn_batch_norm": _cudnn_batch_norm,
    "cudnn_batch_norm_backward": _cudnn_batch_norm_backward,
}

_library = torch.library.Library("aten", "IMPL")  # its operators exist as long as this object


def register() -> None:
    """Replace the operators."""
    for name, function in _OPERATORS.items():
        _library.impl(name, function, "CUDA", allow_override=True)
