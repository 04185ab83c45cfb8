"""Optimizer update in one call: unscale, check, clip and step. A native update never waits for the device."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from flatout.core import gradients
from flatout.core.dtensor import Ranks
from flatout.core.step_hooks import has_users_pre_hooks, is_patched, unhooked_step
from flatout.core.torch_state import uncompiled
from flatout.optim.bucket import Bucket
from flatout.optim.native_step import NativeStep

_ops = torch.ops.flatout


class UpdateResult(NamedTuple):
    """Findings of an update: 0-dim tensors on the device, or None if not measured."""

    found_inf: Tensor | None
    """float32: 1 when a gradient was inf or NaN, else 0."""
    grad_norm: Tensor | None
    """2-norm of the unscaled gradients before clipping."""
    skipped: Tensor | None = None
    """``found_inf`` as bool. None, unless the check also computed the next loss scale."""


@uncompiled
def update(
    optimizer: torch.optim.Optimizer,
    *,
    inv_scale: Tensor | float | LossScale | None = None,
    max_grad_norm: float | None = None,
    skip_nonfinite: bool | None = None,
    unscale_grads: bool = False,
) -> UpdateResult:
    """Step ``optimizer`` with its gradients times ``inv_scale``, clipped to a global norm.

    With an optimizer of ``flatout.optim`` this is the lazy form. Gradients are read once by the check and once by the
    step, and are not rewritten: ``p.grad`` stays scaled and unclipped, for step pre-hooks too. AdamW moves 32 bytes per
    fp32 parameter instead of 48. For any other optimizer, gradients are first rewritten in place, with the same result.
    Only torch's fused classes can skip a step on the device. For other classes the host waits for the device.

    Args:
        optimizer: the optimizer; all gradients of all its groups share one norm, as in
            ``torch.nn.utils.clip_grad_norm_``.
        inv_scale: factor of the gradients, applied first: 1 / loss scale, 1 / accumulated micro-batches, or their
            product. A 0-dim tensor stays on its device. A ``LossScale`` stands for 1 / scale. The next scale is
            computed if all gradients are native and on the device of the scale.
        max_grad_norm: clip to this norm.
        skip_nonfinite: leave everything unchanged (step counts included) when a gradient is inf or NaN. Default:
            True if ``inv_scale`` is a tensor or a ``LossScale``, as from a gradient scaler.
        unscale_grads: True if the step of a flatout optimizer also writes the gradients that it uses to ``p.grad``,
            even after a skipped step. This takes 4 more bytes per fp32 parameter. Step pre-hooks see the written
            gradients unless one of them is float16.

    Returns:
        Findings of the check. All are None without gradients, and if neither ``max_grad_norm`` nor ``skip_nonfinite``
        requires a check.

    Raises:
        ValueError: ``max_grad_norm`` is negative or NaN.
    """
    if skip_nonfinite is None:
        skip_nonfinite = isinstance(inv_scale, (Tensor, LossScale))
    gradients.check_max_norm(max_grad_norm)
    wants_look = skip_nonfinite or max_grad_norm is not None
    ready = optimizer._prepare() if isinstance(optimizer, NativeStep) else None
    prepared = ready or []
    look, factor = None, None
    if ready is not None:
        if ready and wants_look:
            look = _look(ready, inv_scale, max_grad_norm)
        elif ready:
            factor = gradients.on_device(_factor(inv_scale), ready[0].device)
    elif wants_look or inv_scale is not None:  # collecting sparse gradients coalesces them, which changes rounding
        grads = gradients.of_optimizer(optimizer)
        if grads and wants_look:
            look = gradients.check(grads, _factor(inv_scale), max_grad_norm)
        elif grads:
            factor = gradients.on_device(_factor(inv_scale), grads[0].device)
    try:
        if look is None:
            apply(optimizer, factor, None, ready, unscale_grads)
            return UpdateResult(None, None)
        apply(optimizer, look.grad_factor, look.found_inf if skip_nonfinite else None, ready, unscale_grads)
        return UpdateResult(look.found_inf, look.grad_norm, look.skipped)
    finally:
        for bucket in prepared:  # a hook may have raised
            bucket.forget_grads()


def _factor(inv_scale: Tensor | float | LossScale | None) -> Tensor | float | None:
    return inverse(inv_scale.scale) if isinstance(inv_scale, LossScale) else inv_scale


def _look(
    ready: list[Bucket], inv_scale: Tensor | float | LossScale | None, max_norm: float | None
) -> gradients.GradCheck:
    """Check the gradients that are set in buckets of any devices and ranks."""
    by_place: dict[tuple[torch.device, Ranks | None], list[int]] = {}
    for bucket in ready:
        by_place.setdefault((bucket.device, bucket.ranks), []).append(bucket.handle)
    if len(by_place) == 1:
        ((device, ranks), handles) = next(iter(by_place.items()))
        if ranks is None:
            return _look_at_once(handles, device, inv_scale, max_norm)
    factor = _factor(inv_scale)
    looks = [
        gradients.agreed(_ops.check_buckets(handles, gradients.on_device(factor, device), None)[:2], ranks)
        for (device, ranks), handles in by_place.items()
    ]
    return gradients.conclude(looks, factor, max_norm)


def _look_at_once(
    handles: list[int], device: torch.device, inv_scale: Tensor | float | LossScale | None, max_norm: float | None
) -> gradients.GradCheck:
    """Check unsharded gradients of one device, in one call."""
    if isinstance(inv_scale, LossScale) and inv_scale.scale.device == device:
        return gradients.GradCheck(*_ops.check_scaled_buckets(handles, *inv_scale, max_norm))
    factor = _factor(inv_scale)
    if factor is None or isinstance(factor, Tensor):
        return gradients.GradCheck(*_ops.check_buckets(handles, gradients.on_device(factor, device), max_norm))
    return gradients.GradCheck(*_ops.check_buckets(handles, None, max_norm, float(factor)))


def _steps_at_once(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if no hook, and no ``step`` of the user's, can change gradients before the native step."""
    return (
        not optimizer._optimizer_step_pre_hooks
        and not has_users_pre_hooks()
        and not is_patched(optimizer)
        and unhooked_step(type(optimizer)) is NativeStep.step
    )


def apply(
    optimizer: torch.optim.Optimizer,
    factor: Tensor | None,
    found_inf: Tensor | None,
    ready: list[Bucket] | None = None,
    unscale_grads: bool = False,
) -> None:
    """Call ``optimizer.step()`` with gradients times ``factor``, or skip the step if ``found_inf`` is set.

    Args:
        optimizer: the optimizer.
        factor: factor of the gradients, 0-dim; None: 1.
        found_inf: 0-dim tensor, not 0 to skip the step; None: never.
        ready: buckets of a native optimizer whose gradients are set.
        unscale_grads: see :func:`update`.
    """
    if isinstance(optimizer, NativeStep):
        if not _steps_at_once(optimizer):
            ready = None
            if unscale_grads and factor is not None:
                grads = gradients.of_optimizer(optimizer)
                # Unscaling before the step would round small float16 gradients to 0.
                if all(grad.dtype != torch.float16 for grad in grads):
                    gradients.scale_(grads, factor)
                    factor = None
        _step_with(
            optimizer, _grad_factor=factor, found_inf=found_inf, _ready=ready, _unscales_grads=unscale_grads or None
        )
        return
    skips = getattr(optimizer, "_step_supports_amp_scaling", False) and not spoils_buffers(optimizer)
    if found_inf is not None and not skips and found_inf.item():
        return
    if factor is not None:
        gradients.scale_(gradients.of_optimizer(optimizer), factor)
    _step_with(optimizer, found_inf=found_inf if skips else None)


def spoils_buffers(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if the next step of a torch SGD creates momentum buffers.

    A fused SGD that skips this step leaves the buffers uninitialized.
    """
    return isinstance(optimizer, torch.optim.SGD) and any(
        p.grad is not None and optimizer.state.get(p, {}).get("momentum_buffer") is None
        for group in optimizer.param_groups
        if group["momentum"] != 0
        for p in group["params"]
    )


def _step_with(optimizer: torch.optim.Optimizer, **handed: Any) -> None:
    """Call ``step`` with tensors passed as attributes of the optimizer, as torch.amp.GradScaler does."""
    handed = {name: value for name, value in handed.items() if value is not None}
    optimizer.__dict__.update(handed)
    try:
        optimizer.step()
    finally:
        for name in handed:
            optimizer.__dict__.pop(name, None)


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
