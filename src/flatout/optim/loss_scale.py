"""Loss scale of a gradient scaler, as an argument of native updates."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class LossScale(NamedTuple):
    """Loss scale on a device, the rule for its next value, and memory for the next value, in the operator's order.

    ``torch._amp_update_scale_`` defines the rule. Each tensor has one element.
    """

    scale: Tensor
    """float32."""
    growth_tracker: Tensor
    """Updates without inf or NaN since the last change of the scale; int32."""
    next_scale: Tensor
    """Receives the next scale; float32."""
    next_growth_tracker: Tensor
    """Receives the next ``growth_tracker``; int32."""
    growth_factor: float
    backoff_factor: float
    growth_interval: int


def inverse(scale: Tensor) -> Tensor:
    """Return the reciprocal of a scale in float32.

    The division is in float64, as in torch, because float32 division is imprecise with some compilers.
    """
    return scale.double().reciprocal().float()
