"""Gradients rewritten in place, with torch's meaning to the letter."""

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
    """Multiplies gradients with ``inv_scale`` in place, and looks at them, in one pass.

    Args:
        tensors: parameters (those that require grad: their ``.grad`` is meant, where there is one) or
            gradients.
        inv_scale: 1 / loss scale; None rewrites nothing.

    Returns:
        ``(found_inf, grad_norm)``, 0-dim on the first gradient's device, not synchronised: ``found_inf`` is
        1.0 when one of the gradients as given is inf or NaN, ``grad_norm`` the 2-norm of all gradients after
        unscaling, in float32 whatever their dtype (float64 for float64).
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
    """``torch.nn.utils.clip_grad_norm_``, its norm safe from overflow and rounding in 16-bit dtypes.

    The norm is computed in float32 (float64 where all gradients are) and accumulated in double. Where it is
    already small enough the gradients are not written at all, which only the device decides.

    Args:
        parameters: whose gradients to clip, in place.
        max_norm: largest norm allowed, >= 0.
        norm_type: order of the norm; 1, 2 and inf are native, any other goes through torch's norms.
        error_if_nonfinite: raise when the norm is inf or NaN (this waits for the device).
        foreach: accepted for torch's sake.

    Returns:
        The norm of all gradients before clipping, 0-dim. Of gradients that are all DTensors of one mesh, as in torch,
        a DTensor that is the same on all ranks; of a mix, a plain tensor, to which plain gradients count once.

    Raises:
        RuntimeError: the norm is not finite and ``error_if_nonfinite`` is set, or a gradient is expanded; no
            gradient has been changed.
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
