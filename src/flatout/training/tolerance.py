"""Tolerance of numerics, as a limit of the relative difference of two results for each dtype."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from flatout.core.batches import tensors_of
from flatout.mfu.peaks import Products, multiplies_in_tf32
from flatout.training.autocast import autocast_dtype

FLOOR = 0.1
"""Smallest norm that errors of a tensor are compared with, relative to the tensor's even part in the whole norm.

For example, the gradient of a bias before a BatchNorm consists of rounding errors. Its own norm is no measure.
"""


@dataclass(frozen=True)
class Allowed:
    """Largest accepted relative differences.

    Attributes:
        outputs: limit for the model's outputs, by tensor.
        gradients: limit for the gradients, by parameter.
        losses: limit for the mean of the loss trajectory.
    """

    outputs: float
    gradients: float
    losses: float


ALLOWED: Mapping[torch.dtype | str, Allowed] = {
    torch.float64: Allowed(1e-6, 1e-5, 5e-3),
    torch.float32: Allowed(1e-3, 1e-2, 5e-3),
    "tf32": Allowed(1e-2, 5e-2, 5e-3),
    torch.float16: Allowed(1e-2, 5e-2, 2e-2),
    torch.bfloat16: Allowed(5e-2, 2e-1, 2e-2),
}
"""Limits by the dtype of products, from the finest to the coarsest.

Rounding differs by a unit in the last place (1e-7, 1e-3 or 8e-3 of a value) from operator to operator, and grows with
depth. A wrong mask, an outdated weight or a wrong branch changes results by about their own size. Some models amplify
rounding errors more. For example, gradients of freshly initialized residual networks with BatchNorm differ by 16 to
50 % in bfloat16. The limit of such models is ``tuning.equivalence.LEEWAY`` times the effect of a change of the weights
by half a unit in the last place.
"""

_CUDNN_LAYERS: Mapping[type[nn.Module], Products] = {_ConvNd: "conv", nn.RNNBase: "rnn"}
"""Layers that use cuDNN on a GPU, with the name of their TF32 setting in torch."""


def apart(baseline: Mapping[str, Tensor], candidate: Mapping[str, Tensor]) -> tuple[float, str]:
    """Return the largest relative difference of any tensor, ``|candidate - baseline| / |baseline|``, and its name.

    The error of a tensor with a small norm is compared with ``FLOOR`` of its even part in the whole norm. The result is
    infinite for a NaN, for different shapes, and for a tensor that only one side has.
    """
    if not baseline and not candidate:
        return 0.0, ""
    for name in (*baseline, *candidate):
        if name not in baseline or name not in candidate or baseline[name].shape != candidate[name].shape:
            return float("inf"), name
    names = [name for name in baseline if baseline[name].numel()]
    if not names:
        return 0.0, ""
    norms = torch.stack([torch.linalg.vector_norm(baseline[n].float()) for n in names])
    errors = torch.stack([torch.linalg.vector_norm(candidate[n].float() - baseline[n].float()) for n in names])
    sizes = torch.tensor([float(baseline[n].numel()) for n in names], device=norms.device)
    even = torch.linalg.vector_norm(norms) * (sizes / sizes.sum()).sqrt()
    scale = torch.maximum(norms, FLOOR * even)
    relative = torch.where(scale > 0, errors / scale, errors).nan_to_num(nan=float("inf"))
    worst = int(relative.argmax())
    return float(relative[worst]), names[worst]


def compute_dtype(model: nn.Module) -> torch.dtype | str:
    """Return the dtype of the model's products, which is a torch dtype or ``"tf32"``."""
    tensors = [p for p in model.parameters() if p.is_floating_point()]
    coarsest = max((p.dtype for p in tensors if p.dtype in ALLOWED), key=list(ALLOWED).index, default=torch.float32)
    dtype = autocast_dtype(model) or coarsest
    if dtype is not torch.float32:
        return dtype
    cuda = next((p.device for p in tensors if p.device.type == "cuda"), torch.device("cpu"))
    modules = list(model.modules())
    products: list[Products] = ["matmul"]
    products += [name for layer, name in _CUDNN_LAYERS.items() if any(isinstance(m, layer) for m in modules)]
    return "tf32" if any(multiplies_in_tf32(cuda, name) for name in products) else dtype


def floats_of(output: Any) -> list[Tensor]:
    """Return all real or complex floating-point tensors of an output."""
    return [t for t in tensors_of(output) if t.is_floating_point() or t.is_complex()]
