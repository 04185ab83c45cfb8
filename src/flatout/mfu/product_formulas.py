"""FLOPs of matrix products, convolutions and recurrent layers."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flatout.mfu.cost import Call, Cost, Formula, exactly


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
