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
    times ``inv_scale``, within rounding. On a GPU, up to 2,300 parameters take one launch per dtype. After a lazy
    update, gradients are still scaled and unclipped, and so are the norms without ``inv_scale``.

    Args:
        parameters: parameters whose gradients may have any device, dtype and layout.
        norm_type: order of the norm. 1, 2 and inf are native. torch computes other orders.
        inv_scale: factor of the norms, such as 1 / loss scale.

    Returns:
        Norms in the order of ``parameters``, of shape [number of parameters], on the device of the first gradient. The
        dtype is float64 if all gradients are in double precision, else float32. The host does not wait for the result.
        A parameter without a gradient has norm 0. For a DTensor, every rank gets the norm of the whole gradient.
    """
    found = [gradients.dense(parameter) for parameter in parameters]
    if all(grad is None for grad in found):
        return torch.zeros(len(found))
    return gradients.norms(found, inv_scale, float(norm_type))
