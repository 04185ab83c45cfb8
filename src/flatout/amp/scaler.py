"""``GradScaler``: torch's, with the update as one function and no question to the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from flatout import _gradients
from flatout.optim.base import NativeStep
from flatout.optim.update import apply, update


class GradScaler(torch.amp.GradScaler):
    """Equals ``torch.amp.GradScaler``: same arguments, same ``state_dict``.

    What it adds:

    - ``step(optimizer, max_grad_norm=...)`` clips inside the update. With an optimizer of ``flatout.optim``
      that is the *lazy* form: gradients are read, never rewritten (``p.grad`` stays scaled and unclipped),
      and whether to skip is decided on the device.
    - ``unscale_`` checks, unscales and stays exact: followed by clipping and ``step``, gradients are unscaled
      once.
    """

    def step(
        self, optimizer: torch.optim.Optimizer, *args: Any, max_grad_norm: float | None = None, **kwargs: Any
    ) -> float | None:
        """Unscales (unless ``unscale_`` did), clips, and steps unless a gradient is inf or NaN.

        Args:
            optimizer: the optimizer that owns the gradients.
            args: forwarded to ``optimizer.step`` of optimizers that are not flatout's.
            max_grad_norm: clip the unscaled gradients' global norm to this.
            kwargs: as ``args``. Closures are not supported.

        Returns:
            What ``optimizer.step`` returned (None for optimizers of ``flatout.optim``).

        Raises:
            RuntimeError: a closure was given, or ``step`` was called already since the last ``update``.
            ValueError: ``max_grad_norm`` is negative or NaN.
        """
        if not self._enabled:
            if max_grad_norm is None:
                return optimizer.step(*args, **kwargs)
            update(optimizer, max_grad_norm=max_grad_norm)
            return None
        if not isinstance(optimizer, NativeStep):
            if max_grad_norm is not None:
                self._clip_eagerly(optimizer, max_grad_norm)
            return super().step(optimizer, *args, **kwargs)
        if args or "closure" in kwargs:
            raise RuntimeError("Closure use is not currently supported if GradScaler is enabled.")
        scale, _ = self._check_scale_growth_tracker("step")
        record = self._per_optimizer_states[id(optimizer)]
        if record["stage"] is OptState.STEPPED:
            raise RuntimeError("step() has already been called since the last update().")
        if record["stage"] is OptState.READY:
            self._lazy_step(optimizer, scale, max_grad_norm, record)
        else:
            self._unscaled_step(optimizer, max_grad_norm, record)
        record["stage"] = OptState.STEPPED
        return None

    def _lazy_step(
        self, optimizer: NativeStep, scale: Tensor, max_grad_norm: float | None, record: dict[str, Any]
    ) -> None:
        # A user's own `grad_scale` multiplies ours, and is used up, as in torch.
        own = optimizer.__dict__.pop("grad_scale", None)
        total = scale if own is None else scale * own
        result = update(optimizer, inv_scale=_inverse(total), max_grad_norm=max_grad_norm)
        if result.found_inf is None:
            raise AssertionError("No inf checks were recorded for this optimizer.")
        record["found_inf_per_device"] = {result.found_inf.device: result.found_inf}

    def _unscaled_step(self, optimizer: NativeStep, max_grad_norm: float | None, record: dict[str, Any]) -> None:
        found = list(record["found_inf_per_device"].values())
        if not found:
            raise AssertionError("No inf checks were recorded for this optimizer.")
        found_inf = found[0]
        for other in found[1:]:
            found_inf = found_inf + _gradients.move(other, found_inf.device)
        factor = None
        if max_grad_norm is not None:
            factor = _gradients.check(_gradients_of(optimizer), None, max_grad_norm).grad_factor
        apply(optimizer, factor, found_inf)

    def _clip_eagerly(self, optimizer: torch.optim.Optimizer, max_grad_norm: float) -> None:
        if self._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY:
            self.unscale_(optimizer)
        grads = _gradients_of(optimizer)
        if grads:
            _gradients.scale_(grads, _gradients.check(grads, None, max_grad_norm).grad_factor)

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: Tensor,
        found_inf: Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, Tensor]:
        """torch's hook behind ``unscale_``: per device, one pass that checks and rewrites."""
        per_device: dict[torch.device, list[Tensor]] = {}
        for grad in _gradients_of(optimizer):
            if grad.dtype == torch.float16 and not allow_fp16:
                raise ValueError("Attempting to unscale FP16 gradients.")
            per_device.setdefault(grad.device, []).append(grad)
        return {device: _gradients.unscale_(grads, inv_scale)[0] for device, grads in per_device.items()}


def _inverse(scale: Tensor) -> Tensor:
    # As in torch: the reciprocal in float64, because float32 division can be imprecise under some compilers.
    return scale.double().reciprocal().float()


def _gradients_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return _gradients.gradients_of(p for group in optimizer.param_groups for p in group["params"])
