"""Norm of each gradient, in one pass."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from flatout.core import gradients


def grad_norms(
    parameters: Iterable[Tensor], norm_type: float = 2.0, *, inv_scale: Tensor | float | None = None
) -> Tensor:
    """Return the norm of each parameter's gradient.

    Equals ``torch.stack([torch.linalg.vector_norm(p.grad, norm_type, dtype=torch.float32) for p in parameters])``
    times ``inv_scale``, within rounding. On a GPU, 2,300 parameters of one dtype take one launch. After a lazy update
    the gradients are still scaled and unclipped, and so are these norms.

    Args:
        parameters: parameters whose gradients may have any device, dtype and layout.
        norm_type: order of the norm. 1, 2 and inf are native. torch computes other orders.
        inv_scale: factor of the norms, such as 1 / loss scale.

    Returns:
        Norms in the order of ``parameters``, shape [number of parameters], on the device of the first gradient, not
        synchronized: float32, or float64 if all gradients are. The norm is 0 for a parameter without a gradient. For
        DTensors, every rank gets the norm of the full gradient.
    """
    found = [gradients.dense(parameter) for parameter in parameters]
    if all(grad is None for grad in found):
        return torch.zeros(len(found))
    return gradients.norms(found, inv_scale, float(norm_type))
