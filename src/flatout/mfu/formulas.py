"""FLOPs of operators, by formulas for torch's operators and by formulas that users register.

A multiply-add is 2 FLOPs, and a complex multiply-add is 8. A complex convolution takes 6, because torch computes it
with three real convolutions. Only work like a matrix product counts. Element-wise operators, reductions,
normalizations, look-ups and copies cost 0, as in published figures.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

from flatout.mfu.attention_formulas import ATTENTION, flex_attention_cost
from flatout.mfu.cost import Call, Cost
from flatout.mfu.product_formulas import PRODUCTS

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
