"""FLOPs of operators, by formulas for torch's operators and by formulas that users register."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket


@dataclass(frozen=True)
class Cost:
    """FLOPs of one call.

    Attributes:
        needed: FLOPs of the model's mathematics, without the pairs that a causal mask removes.
        dense: FLOPs of the model's mathematics, with all pairs of causal attention.
        again: FLOPs that the kernel recomputes to save memory, such as the scores in a fused attention's backward.
    """

    needed: int
    dense: int
    again: int = 0

    def scaled(self, numerator: int, denominator: int) -> Cost:
        """Return the cost with ``needed`` reduced to the share ``numerator / denominator``."""
        return Cost(self.needed * numerator // denominator, self.dense, self.again)


@dataclass(frozen=True)
class Call:
    """Call of an operator.

    Attributes:
        arguments: arguments by their names in the operator's schema, defaults included.
        result: the operator's result.
    """

    arguments: Mapping[str, Any]
    result: Any

    @classmethod
    def of(cls, op: OpOverload, args: tuple[Any, ...], keywords: Mapping[str, Any], result: Any) -> Call:
        """Return the call of an operator with these arguments and this result."""
        names = op._schema.arguments
        arguments = {a.name: a.default_value for a in names if a.has_default_value()}
        arguments.update((a.name, value) for a, value in zip(names, args, strict=False))
        return cls({**arguments, **keywords}, result)

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def get(self, name: str) -> Any:
        """Return the argument, or None if the operator has no argument of that name."""
        return self.arguments.get(name)


Formula = Callable[[Call], Cost]


def exactly(flops: int) -> Cost:
    """Return the cost of a call without masked pairs and without recomputation."""
    flops = int(flops)  # sizes may be symbolic
    return Cost(flops, flops)


def is_abstract(tensor: Tensor) -> bool:
    """Return True if a tensor has a shape but no entries."""
    return tensor.is_meta or isinstance(tensor, torch._subclasses.FakeTensor)


def _contraction(name: str) -> Formula:
    """Return the formula of a product over the last dimension of argument ``name``."""
    return lambda call: exactly(2 * call.result.numel() * _depth(call[name]))


def _depth(operand: Tensor) -> int:
    """Return the size of the last dimension in values. Two 4-bit floats share an element."""
    return operand.size(-1) * (2 if operand.dtype == torch.float4_e2m1fn_x2 else 1)


def _linear_backward(call: Call) -> Cost:
    return exactly(2 * call["grad_output"].numel() * call["weight"].shape[1] * sum(call["output_mask"][:2]))


def _matmul_backward(call: Call) -> Cost:
    return exactly(2 * call["grad"].numel() * call["self"].size(-1) * sum(call["mask"]))


def _dot(call: Call) -> Cost:
    return exactly(2 * call["self"].numel())


def _addbmm(call: Call) -> Cost:
    return exactly(2 * call["batch1"].numel() * call["batch2"].shape[-1])


def _grouped_mm(call: Call) -> Cost:
    """Return the cost of a grouped product.

    Groups split a dimension if an operand is 2-D. In 3-D x 3-D the groups are the first dimension.
    """
    a, b = call["self"], call["mat2"]
    groups = a.shape[0] if a.dim() == b.dim() == 3 else 1
    return exactly(2 * groups * a.shape[-2] * _depth(a) * b.shape[-1])


def _foreach_mm(call: Call) -> Cost:
    return exactly(sum(2 * a.numel() * b.shape[-1] for a, b in zip(call["self"], call["mat2"], strict=True)))


def _trilinear(call: Call) -> Cost:
    """Return the cost of ``nn.Bilinear``, which is the contraction with its third factor.

    The product of the first two factors is element-wise and costs 0.
    """
    shapes = [_expanded(call, k) for k in (1, 2, 3)]
    return exactly(2 * math.prod(max(sizes) for sizes in zip(*shapes, strict=True)))


def _expanded(call: Call, k: int) -> list[int]:
    shape = list(call[f"i{k}"].shape)
    for dim in sorted(call[f"expand{k}"]):
        shape.insert(dim, 1)
    return shape


def _convolution(call: Call) -> Cost:
    input, result = (call.get("self") if call.get("input") is None else call["input"]), call.result
    return exactly(_convolution_flops(input, call["weight"], result, bool(call.get("transposed"))))


def _convolution_transpose(call: Call) -> Cost:
    return exactly(_convolution_flops(call["self"], call["weight"], call.result, True))


def _convolution_flops(input: Tensor, weight: Tensor, output: Tensor, transposed: bool) -> int:
    """Return the FLOPs of applying the kernel at each position of the output, or of the input if transposed.

    One position takes ``weight.numel()`` multiply-adds for any number of groups. ``weight`` is
    [out, in / groups, ...], or [in, out / groups, ...] if transposed, so one of its sides has one group's channels.
    """
    positions = input if transposed else output
    return 2 * positions.shape[0] * math.prod(positions.shape[2:]) * weight.numel()


def _convolution_backward(call: Call) -> Cost:
    """Return the cost of the gradients of input and weight. Each requested gradient costs as much as the forward."""
    output = call["grad_output"]
    forward = _convolution_flops(call["input"], call["weight"], output, bool(call["transposed"]))
    return exactly(forward * sum(bool(wanted) for wanted in call["output_mask"][:2]))


def _rnn(call: Call) -> Cost:
    """Return the cost of a recurrent layer, which multiplies each row of the input by each weight matrix."""
    return exactly(_rnn_flops(call))


def _rnn_backward(call: Call) -> Cost:
    """Return the cost of the gradients. The kernels compute the data's gradients even if unused."""
    mask = call.get("output_mask")
    return exactly(_rnn_flops(call) * (2 if mask is None or mask[3] else 1))


def _rnn_flops(call: Call) -> int:
    input = call["input"]
    weights = call.get("weight")
    if weights is None:  # mkldnn has the four weights of one direction of one layer
        weights = [call.get(f"weight{i}") for i in range(5) if call.get(f"weight{i}") is not None]
    return 2 * (input.numel() // input.shape[-1]) * sum(w.numel() for w in weights if w.dim() == 2)


PRODUCTS: dict[str, Formula] = {
    **{f"aten::{name}": _contraction("self") for name in (
        "mm", "bmm", "mv", "matmul", "mkldnn_linear", "_int_mm", "_scaled_mm", "_scaled_mm_v2", "_weight_int8pack_mm",
        "_weight_int4pack_mm", "_weight_int4pack_mm_for_cpu", "_weight_int4pack_mm_with_scales_and_zeros",
    )},
    **{f"aten::{name}": _contraction("mat1") for name in ("addmm", "addmm_", "_addmm_activation")},
    **{f"aten::{name}": _contraction("batch1") for name in ("baddbmm", "baddbmm_")},
    **{f"aten::{name}": _contraction("mat") for name in ("addmv", "addmv_")},
    **{f"aten::{name}": _contraction("input") for name in ("linear", "_mixed_dtypes_linear")},
    **{f"aten::{name}": _dot for name in ("dot", "vdot")},
    **{f"aten::{name}": _addbmm for name in ("addbmm", "addbmm_")},
    **{f"aten::{name}": _grouped_mm for name in ("_grouped_mm", "_scaled_grouped_mm", "_scaled_grouped_mm_v2")},
    "aten::linear_backward": _linear_backward,
    "aten::matmul_backward": _matmul_backward,
    "aten::_euclidean_dist": _contraction("x1"),
    "aten::_dyn_quant_matmul_4bit": _contraction("inp"),
    "aten::_foreach_mm": _foreach_mm,
    "aten::_trilinear": _trilinear,
    **{f"aten::{name}": _convolution for name in (
        "convolution", "_convolution", "convolution_overrideable", "cudnn_convolution", "cudnn_convolution_relu",
        "cudnn_convolution_add_relu", "mkldnn_convolution", "miopen_convolution", "miopen_convolution_relu",
        "miopen_convolution_add_relu", "miopen_depthwise_convolution", "_mps_convolution", "_slow_conv2d_forward",
        "slow_conv3d_forward", "slow_conv_dilated2d", "slow_conv_dilated3d", "_conv_depthwise2d", "conv_depthwise3d",
        "_nnpack_spatial_convolution",
    )},
    **{f"aten::{name}": _convolution_transpose for name in (
        "cudnn_convolution_transpose", "miopen_convolution_transpose", "_mps_convolution_transpose",
        "slow_conv_transpose2d", "slow_conv_transpose3d",
    )},
    **{f"aten::{name}": _convolution_backward for name in (
        "convolution_backward", "convolution_backward_overrideable",
    )},
    **{f"aten::{name}": _rnn for name in ("mkldnn_rnn_layer", "_cudnn_rnn", "miopen_rnn")},
    **{f"aten::{name}_backward": _rnn_backward for name in ("mkldnn_rnn_layer", "_cudnn_rnn", "miopen_rnn")},
}  # fmt: skip
"""Formula of each operator, by name because no version of torch has all these operators."""


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


Operator = OpOverload | OpOverloadPacket
UserFormula = Callable[..., int]

_FORMULAS = PRODUCTS | ATTENTION
_USER: dict[Operator, UserFormula] = {}
_DENSE = (torch.strided, torch.jagged, torch._mkldnn)  # type: ignore[attr-defined]
_FLEX = {"flex_attention": False, "flex_attention_backward": True}

# Words in the names of torch's operators that multiply matrices or do as much work. Some of these operators have no
# formula (factorizations, FFTs, distances, sparse products), so the count reports them as unknown.
_HEAVY = re.compile(
    r"mm$|mm_|mv_?$|matmul|conv|attn|attention|rnn|lstm|gru|linear|bilinear|transformer|cdist|pdist|solve|inverse|"
    r"cholesky|linalg|_lu_with|_fft_|geqrf|orgqr|ormqr|svd|matrix_exp|sampled_addmm|spsolve|semi_structured_(mm|addmm)"
)
# Words in the names of cheap operators whose names contain a word of _HEAVY.
_CHEAP = re.compile(
    r"^_thnn|upsample|slice_inverse|resolve_|convert_|reorder_|pack_4bit|flatten_weight|lgamma|gammaln|prepack$|pack_gemm|"
    r"linalg_(vector_norm|cross|diagonal|_powsum|check_errors)|pack_quantized|quantize_weight"
)
_KNOWN_NAMESPACES = frozenset(
    {"aten", "prim", "prims", "rngprims", "profiler", "c10d", "c10d_functional", "_c10d_functional", "flatout",
     "streams", "_dtensor", "fsdp", "symm_mem", "inductor"}
)  # fmt: skip


def cost_of(op: OpOverload, args: tuple[Any, ...], keywords: Mapping[str, Any], result: Any) -> Cost | None:
    """Return the FLOPs of one call that has run, or None for an operator without a formula."""
    user = _USER.get(op) or _USER.get(op.overloadpacket)
    if user is not None:
        flops = int(user(*args, **keywords))
        return Cost(flops, flops)
    formula = _FORMULAS.get(op.overloadpacket._qualified_op_name)
    if formula is None:
        return None
    tensors = [t for t in (*args, *keywords.values()) if isinstance(t, Tensor)]
    if any(t.layout not in _DENSE for t in tensors):
        return None  # the work of a sparse kernel depends on format and entries
    try:
        cost = formula(Call.of(op, args, keywords, result))
    except RuntimeError:
        if not any(t.is_nested for t in tensors):
            raise
        return None  # an irregular dimension has several sizes
    if any(t.is_complex() for t in tensors):
        return Cost(4 * cost.needed, 4 * cost.dense, 4 * cost.again)
    return cost


def higher_order_cost(op: HigherOrderOperator, args: tuple[Any, ...]) -> Cost | None:
    """Return the FLOPs of an operator that takes functions, or None if they depend on these functions."""
    backward = _FLEX.get(op.name())
    return None if backward is None else flex_attention_cost(args, backward)


def has_formula(op: OpOverload) -> bool:
    """Return True if the operator has a formula."""
    return op in _USER or op.overloadpacket in _USER or op.overloadpacket._qualified_op_name in _FORMULAS


def is_cheap(op: OpOverload) -> bool:
    """Return True if an operator without a formula costs 0, because its work is unlike a matrix product.

    Operators of unknown libraries are never cheap. flatout's own operators are element-wise, and so cheap.
    """
    if op.namespace not in _KNOWN_NAMESPACES:
        return False
    return _HEAVY.search(op._opname) is None or _CHEAP.search(op._opname) is not None


def register_flops(op: Operator, formula: UserFormula | None = None) -> Any:
    """Register the formula of a custom operator. A later formula replaces an earlier one.

    Example:
        >>> @torch.library.custom_op("readme::project", mutates_args=())
        ... def project(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ...     return x @ weight
        >>> @register_flops(torch.ops.readme.project)
        ... def project_flops(x, weight):
        ...     return 2 * x.numel() * weight.shape[1]

    Args:
        op: ``torch.ops.library.name`` (every overload) or ``torch.ops.library.name.overload``. Operators that its
            backward calls need formulas too.
        formula: function of the operator's arguments that returns FLOPs, where a multiply-add is 2. Without a formula,
            ``register_flops`` returns a decorator.

    Raises:
        TypeError: ``op`` is not an operator.
    """
    if not isinstance(op, OpOverload | OpOverloadPacket):
        raise TypeError(f"op must be an operator such as torch.ops.library.name, got {op!r}")

    def register(formula: UserFormula) -> UserFormula:
        _USER[op] = formula
        return formula

    return register if formula is None else register(formula)
