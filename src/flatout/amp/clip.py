"""Unscaling and clipping of gradients in place, with the semantics of torch."""

from __future__ import annotations

import types
import warnings
from collections.abc import Iterable

import torch
from torch import Tensor

from flatout.core import dtensor, gradients


def _as_list(tensors: Tensor | Iterable[Tensor]) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def unscale_and_check_(tensors: Tensor | Iterable[Tensor], inv_scale: Tensor | float | None) -> tuple[Tensor, Tensor]:
    """Multiply gradients by ``inv_scale`` in place, and check them in the same pass.

    Args:
        tensors: gradients or parameters. A tensor that requires grad, or is an ``nn.Parameter``, counts as a parameter.
            The gradient of a parameter is its ``.grad``, if that is not None.
        inv_scale: 1 / loss scale. None: the gradients are only checked.

    Returns:
        ``(found_inf, grad_norm)``, 0-dim on the device of the first gradient, not synchronized. ``found_inf`` is 1.0 if
        a gradient was inf or NaN before unscaling, else 0.0. ``grad_norm`` is the 2-norm of all gradients after
        unscaling, in float32, or in float64 if all gradients are float64. Without gradients, both are 0 on the CPU.
    """
    grads: list[Tensor] = []
    for tensor in _as_list(tensors):
        if tensor.requires_grad or isinstance(tensor, torch.nn.Parameter):
            grads += gradients.gradients_of([tensor])
        else:
            grads.append(tensor)
    if not grads:
        return torch.zeros(()), torch.zeros(())
    return gradients.together(gradients.unscale_(grads, inv_scale))


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Clip gradients as ``torch.nn.utils.clip_grad_norm_``, without overflow and rounding of the norm in 16 bits.

    The norm is computed in float32 (float64 if all gradients are float64) and accumulated in float64. If the norm is
    small enough, no gradient is written. The device makes this decision, so the host does not wait.

    Args:
        parameters: parameters whose gradients are clipped, in place.
        max_norm: largest norm allowed, >= 0.
        norm_type: order of the norm. 1, 2 and inf are native. torch computes other orders.
        error_if_nonfinite: raise an error if the norm is inf or NaN. This waits for the device.
        foreach: accepted for compatibility with torch, without effect.

    Returns:
        The norm of all gradients before clipping, 0-dim. If all gradients are DTensors of one mesh, the norm is a
        DTensor that is the same on all ranks, as in torch. For a mix of gradients, the norm is a plain tensor, in which
        plain gradients count once.

    Raises:
        RuntimeError: the norm is not finite and ``error_if_nonfinite`` is set, or a gradient is expanded. No gradient
            is changed.
        ValueError: ``max_norm`` is negative or NaN.
    """
    is_generator = isinstance(parameters, types.GeneratorType)
    listed = _as_list(parameters)
    if is_generator and not listed:
        warnings.warn("`parameters` is an empty generator, no gradient clipping will occur.", stacklevel=3)
    grads = gradients.gradients_of(listed)
    if not grads:
        return torch.tensor(0.0)
    max_norm, norm_type = float(max_norm), float(norm_type)
    if not max_norm >= 0:
        raise ValueError(f"max_norm must be >= 0, got {max_norm}")
    look = gradients.check(grads, None, max_norm, norm_type)
    if error_if_nonfinite and not bool(look.grad_norm.isfinite()):
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, so it "
            "cannot be clipped. To disable this error and scale the gradients by the non-finite norm anyway, "
            "set `error_if_nonfinite=False`"
        )
    gradients.scale_(grads, look.grad_factor)
    return dtensor.replicated(look.grad_norm, grads)


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
