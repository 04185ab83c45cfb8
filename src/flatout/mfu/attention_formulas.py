"""FLOPs of attention and of fused transformer layers."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from flatout.mfu.cost import Call, Cost, Formula, exactly, is_abstract


def causal_pairs(queries: int, keys: int) -> int:
    """Return the number of (query, key) pairs under ``is_causal``, where query i attends to keys 0..i, as in SDPA."""
    return _pairs(queries, keys, None, 0)


@functools.lru_cache(maxsize=1024)
def _pairs(queries: int, keys: int, left: int | None, right: int | None) -> int:
    """Return the number of (query, key) pairs in a band.

    Query i attends to the keys i - left .. i + right. None means no bound on a side.
    """
    if left is None and right is None:
        return queries * keys
    total = 0
    for i in range(queries):
        first = 0 if left is None else max(0, i - left)
        last = keys - 1 if right is None else min(keys - 1, i + right)
        total += max(0, last - first + 1)
    return total


def _attended(kept: int, full: int, size: int, value_size: int, backward: bool) -> Cost:
    """Return the cost of fused attention.

    A pair takes one dot product for the score (``size``) and one multiply-add per entry of the value. The backward
    takes two products for each of these and recomputes the score.

    Args:
        kept: pairs that the mask keeps, over all heads.
        full: all pairs, over all heads.
        size: entries of a key.
        value_size: entries of a value.
        backward: count the backward instead of the forward.
    """
    if not backward:
        return Cost(2 * kept * (size + value_size), 2 * full * (size + value_size))
    return Cost(4 * kept * (size + value_size), 4 * full * (size + value_size), 2 * kept * size)


def _sdpa(backward: bool, bottom_right: bool = False) -> Formula:
    """Return the formula of an SDPA operator on [batch, heads, length, size]. Keys may have fewer heads (GQA).

    A mask or bias tensor removes no pair, because the kernels compute every score.

    Args:
        backward: count the backward instead of the forward.
        bottom_right: align the causal mask to the last key, as CUDA's flash attention does.
    """

    def formula(call: Call) -> Cost:
        query, key, value = call["query"], call["key"], call["value"]
        queries, keys = query.shape[-2], key.shape[-2]
        heads = math.prod(query.shape[:-2])
        right = (keys - queries if bottom_right else 0) if call["is_causal"] else None
        kept = _pairs(queries, keys, None, right)
        return _attended(heads * kept, heads * queries * keys, query.shape[-1], value.shape[-1], backward)

    return formula


def _packed_attention(backward: bool) -> Formula:
    """Return the formula of a kernel that SDPA calls.

    Tensors are [batch, length, heads, size], or packed sequences with offsets.
    """

    def formula(call: Call) -> Cost:
        query, key, value = call["query"], call["key"], call["value"]
        lengths = _lengths(call, query, key)
        kept = sum(_pairs(q, k, *_band(call, q, k)) for q, k in lengths)
        full = sum(q * k for q, k in lengths)
        heads = query.shape[-2]
        return _attended(heads * kept, heads * full, query.shape[-1], value.shape[-1], backward)

    return formula


def _cudnn_attention(backward: bool) -> Formula:
    """Return the formula of cuDNN's kernels.

    Tensors are packed sequences with offsets, or [batch, heads, length, size] without offsets.
    """
    packed, plain = _packed_attention(backward), _sdpa(backward)
    return lambda call: (plain if call["cum_seq_q"] is None else packed)(call)


def _first(call: Call, *names: str) -> Any:
    return next((call.get(name) for name in names if call.get(name) is not None), None)


def _lengths(call: Call, query: Tensor, key: Tensor) -> list[tuple[int, int]]:
    """Return the number of queries and keys of each sequence, or the maximum if the offsets are abstract tensors."""
    offsets_q = _first(call, "cum_seq_q", "cu_seq_q", "cu_seqlens_q")
    offsets_k = _first(call, "cum_seq_k", "cu_seq_k", "cu_seqlens_k")
    if offsets_q is None:
        return [(query.shape[1], key.shape[1])] * query.shape[0]
    offsets_k = offsets_q if offsets_k is None else offsets_k
    if is_abstract(offsets_q) or is_abstract(offsets_k):
        longest = int(_first(call, "max_q", "max_seqlen_q")), int(_first(call, "max_k", "max_seqlen_k"))
        return [longest] * (offsets_q.numel() - 1)
    return list(zip(offsets_q.diff().tolist(), offsets_k.diff().tolist(), strict=True))


def _band(call: Call, queries: int, keys: int) -> tuple[int | None, int | None]:
    """Return how many keys before and after its own position a query attends to. None means no bound."""
    shift = keys - queries  # flash attention aligns the last query with the last key
    kind = call.get("custom_mask_type")
    if kind is not None:  # memory-efficient attention, where 1 is top-left and 2 is bottom-right
        at = shift if kind == 2 else 0
        window = call.get("window_size")
        return (window - 1 - at if window else None), (at if kind else None)
    window = call.get("window_size") or (call.get("window_size_left"), call.get("window_size_right"))
    left, right = (None if side is None or side < 0 else side for side in window)
    if call["is_causal"]:
        right = 0
    return (None if left is None else left - shift), (None if right is None else right + shift)


def flex_attention_cost(args: tuple[Any, ...], backward: bool) -> Cost:
    """Return the FLOPs of ``flex_attention``.

    The kept blocks count. All pairs count if there is no block mask, or if the mask is abstract.
    """
    query, key, value = args[:3]
    block_mask = next((a for a in args[3:] if isinstance(a, tuple) and len(a) > 10), None)
    (batch, heads, queries, _), keys = query.shape, key.shape[-2]
    full = batch * heads * queries * keys
    counts = () if block_mask is None else tuple(block_mask[i] for i in (2, 4) if block_mask[i] is not None)
    if block_mask is None or any(is_abstract(c) for c in counts):
        kept = full
    else:
        *_, block_queries, block_keys, _mask = block_mask
        rows = math.prod(counts[0].shape[:2])
        blocks = sum(int(c.sum()) for c in counts)
        kept = blocks * min(block_queries, queries) * min(block_keys, keys) * batch * heads // rows
    return _attended(min(kept, full), full, query.shape[-1], value.shape[-1], backward)


def _encoder_layer(call: Call) -> Cost:
    """Return the cost of ``nn.TransformerEncoderLayer``'s fast path, with self-attention and feed-forward products."""
    matrices = ("qkv_weight", "proj_weight", "ffn_weight_1", "ffn_weight_2")
    return exactly(_fused_block(call, call["src"], call["embed_dim"], matrices))


def _native_attention(call: Call) -> Cost:
    return exactly(_fused_block(call, call["query"], call["embed_dim"], ("qkv_weight", "proj_weight")))


def _fused_block(call: Call, input: Tensor, width: int, matrices: Iterable[str]) -> int:
    lengths = [len(t) for t in input.unbind()] if input.is_nested else [input.shape[1]] * input.shape[0]
    products = 2 * sum(lengths) * sum(call[name].numel() for name in matrices)
    return products + sum(4 * length * length * width for length in lengths)


ATTENTION: dict[str, Formula] = {
    **{f"aten::_scaled_dot_product_{name}{end}": _sdpa(backward=bool(end)) for end in ("", "_backward") for name in (
        "flash_attention_for_cpu", "efficient_attention", "cudnn_attention", "fused_attention_overrideable",
    )},
    "aten::_scaled_dot_product_attention_math_for_mps": _sdpa(backward=False),
    **{f"aten::_scaled_dot_product_flash_attention{end}": _sdpa(backward=bool(end), bottom_right=True)
       for end in ("", "_backward")},
    **{f"{name}": _packed_attention(backward=False) for name in (
        "aten::_flash_attention_forward", "aten::_flash_attention_forward_no_dropout_inplace",
        "aten::_efficient_attention_forward", "torch_attn::_varlen_attn", "torch_attn::_varlen_attn_out",
    )},
    **{f"{name}_backward": _packed_attention(backward=True) for name in (
        "aten::_flash_attention", "aten::_efficient_attention", "torch_attn::_varlen_attn",
    )},
    "aten::_cudnn_attention_forward": _cudnn_attention(backward=False),
    "aten::_cudnn_attention_backward": _cudnn_attention(backward=True),
    "aten::_transformer_encoder_layer_fwd": _encoder_layer,
    "aten::_native_multi_head_attention": _native_attention,
}  # fmt: skip
"""Formula of each operator, by name because no version of torch has all these operators."""
