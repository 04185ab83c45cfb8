"""``GradScaler``: torch's class with updates in one call. Updates of native optimizers do not wait for the device."""

from __future__ import annotations

import functools
import math
import operator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from flatout.core import gradients
from flatout.core.torch_state import uncompiled
from flatout.optim.native_step import NativeStep
from flatout.optim.update import LossScale, apply, inverse, spoils_buffers, update


class _Inputs(NamedTuple):
    """Inputs of ``GradScaler.update``, with the versions that show later changes.

    Attributes:
        tensors: the scale, its growth tracker, and every ``found_inf``.
        numbers: versions of the tensors, growth factor, backoff factor and growth interval.
    """

    tensors: list[Tensor]
    numbers: list[float]

    def equals(self, other: _Inputs) -> bool:
        """Return True if the tensors are the same objects with the same versions, and the schedules are equal."""
        return self.numbers == other.numbers and all(map(operator.is_, self.tensors, other.tensors))


class GradScaler(torch.amp.GradScaler):
    """Equals ``torch.amp.GradScaler``: same arguments, same ``state_dict``.

    Additions:

    - ``step(optimizer, max_grad_norm=...)`` clips inside the update. With an optimizer of ``flatout.optim`` this is the
      *lazy* form, which reads gradients and never rewrites them: ``p.grad`` stays scaled and unclipped.
      ``max_grad_norm=math.inf`` is the lazy form without clipping.
    - ``step(optimizer)`` leaves unscaled gradients in ``p.grad``, as torch's does, even after a skipped step. An
      optimizer of ``flatout.optim`` writes the gradients in the same pass (4 more bytes per fp32 parameter).
    - With an optimizer of ``flatout.optim`` the device decides whether to skip, without a host synchronization.
    - ``unscale_`` checks and unscales in one pass. Clipping and ``step`` after this do not unscale again.
    - ``last_step_skipped`` is True if the last step was skipped.

    Gradients may be float16, such as those of float16 parameters with master weights, only for ``step`` of a flatout
    optimizer. That step unscales them in float32 registers. ``unscale_`` refuses float16 gradients with and without
    master weights, as torch's does. Written back in float16 before the step, small gradients would become the zeros
    that loss scaling prevents. The plain ``step`` writes them back after use, as torch's fused optimizers do.
    """

    keeps_scale_in_place = False
    """True to make ``update`` write to the memory of the scale, as CUDA graphs that read the scale require.

    If False, ``update`` may replace the tensor of the scale. A scaler that is used in a capture sets this attribute.
    """

    _last_step_skipped: Tensor | None = None
    _spare: tuple[Tensor, Tensor] | None = None  # receives the scale and growth tracker after an update
    _computed: _Inputs | None = None  # inputs of the check that has computed both

    @property
    def last_step_skipped(self) -> Tensor | None:
        """True if the last ``step`` found an inf or a NaN and changed nothing: 0-dim bool, on the device.

        The host waits only for a read of the value, as by ``bool()``. The value stays until the next ``step`` of any
        optimizer. It is neither saved nor copied with the scaler. None before the first step, for a disabled scaler,
        and for optimizers that do their own checks.
        """
        return self._last_step_skipped

    @uncompiled  # as torch's method
    def scale(self, outputs: Any) -> Any:
        """Multiply outputs by the scale. Arguments and results are those of torch."""
        self._note_capture()
        return super().scale(outputs)

    def _note_capture(self) -> None:
        if self._device == "cuda" and torch.cuda.is_current_stream_capturing():
            self.keeps_scale_in_place = True

    @uncompiled
    def step(
        self, optimizer: torch.optim.Optimizer, *args: Any, max_grad_norm: float | None = None, **kwargs: Any
    ) -> float | None:
        """Unscale (unless ``unscale_`` did), clip, and step unless a gradient is inf or NaN.

        Args:
            optimizer: the optimizer that owns the gradients.
            args: forwarded to ``optimizer.step`` of optimizers that are not flatout's.
            max_grad_norm: clip the unscaled gradients' global norm to this value. An optimizer of ``flatout.optim``
                then leaves ``p.grad`` unchanged.
            kwargs: forwarded like ``args``. Closures are not supported.

        Returns:
            The result of ``optimizer.step``; None for optimizers of ``flatout.optim``, or if the step was skipped.

        Raises:
            RuntimeError: a closure is given, or ``step`` was already called since the last ``update``.
            ValueError: ``max_grad_norm`` is negative or NaN.
        """
        if not self._enabled and max_grad_norm is None:
            return optimizer.step(*args, **kwargs)
        native = isinstance(optimizer, NativeStep)
        if "closure" in kwargs or ((args or kwargs) and (native or not self._enabled)):
            raise RuntimeError("Closure use is not currently supported if GradScaler is enabled or clips.")
        gradients.check_max_norm(max_grad_norm)
        lazy = max_grad_norm is not None
        if max_grad_norm == math.inf:
            max_grad_norm = None
        if not self._enabled:
            update(optimizer, max_grad_norm=max_grad_norm)
            return None
        self._note_capture()
        record = self._per_optimizer_states[id(optimizer)]
        if record["stage"] is OptState.STEPPED:
            raise RuntimeError("step() has already been called since the last update().")
        result, skipped = None, None
        if not native:
            if max_grad_norm is not None:
                self._clip(optimizer, max_grad_norm, record)
            if self._must_not_skip(optimizer, record):
                optimizer.__dict__.pop("grad_scale", None)
            else:
                result = super().step(optimizer, *args, **kwargs)
        elif record["stage"] is OptState.READY:
            skipped = self._checked_step(optimizer, max_grad_norm, record, lazy)
        else:
            self._unscaled_step(optimizer, max_grad_norm, record, lazy)
        record["stage"] = OptState.STEPPED
        found_inf = _found_inf(record)
        # A new tensor, because update() adds the findings of other optimizers to `found_inf`.
        self._last_step_skipped = skipped if skipped is not None or found_inf is None else found_inf != 0
        return result

    def _checked_step(
        self, optimizer: torch.optim.Optimizer, max_grad_norm: float | None, record: dict[str, Any], lazy: bool
    ) -> Tensor | None:
        scale, growth_tracker = self._check_scale_growth_tracker("step")
        self._computed = None  # the check overwrites the results of an earlier check
        # As in torch, a `grad_scale` that the user has set multiplies the scale, and is removed.
        own = optimizer.__dict__.pop("grad_scale", None)
        factor: Tensor | LossScale
        if own is None and self._computes_natively(scale):
            factor = self._loss_scale(scale, growth_tracker)
        else:
            factor = inverse(scale if own is None else scale * own)
        result = update(optimizer, inv_scale=factor, max_grad_norm=max_grad_norm, unscale_grads=not lazy)
        if result.found_inf is not None:  # a step without gradients records nothing, as with torch's fused optimizers
            record["found_inf_per_device"] = {result.found_inf.device: result.found_inf}
        if result.skipped is not None:
            inputs = self._inputs()
            self._computed = inputs if len(inputs.tensors) == 3 else None  # only this optimizer has a finding
        return result.skipped

    def _computes_natively(self, scale: Tensor) -> bool:
        """Return False for subclasses, which may override ``update``, and for inference tensors without a version."""
        return type(self) is GradScaler and not (scale.is_inference() or torch.is_inference_mode_enabled())

    def _loss_scale(self, scale: Tensor, growth_tracker: Tensor) -> LossScale:
        if self._spare is None:
            self._spare = torch.empty_like(scale), torch.empty_like(growth_tracker)
        torch.autograd.graph.increment_version(self._spare)
        return LossScale(
            scale, growth_tracker, *self._spare, self._growth_factor, self._backoff_factor, self._growth_interval
        )

    def _inputs(self) -> _Inputs:
        records = self._per_optimizer_states.values()
        found = [found for record in records for found in record["found_inf_per_device"].values()]
        tensors = [*self._check_scale_growth_tracker("update"), *found]
        versions = [tensor._version for tensor in tensors]
        return _Inputs(tensors, [*versions, self._growth_factor, self._backoff_factor, self._growth_interval])

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Update the scale, like torch's GradScaler.

        Args:
            new_scale: the new scale. None: grow or shrink the scale by the findings of the steps.
        """
        self._note_capture()
        computed, self._computed = self._computed, None
        if (
            computed is None
            or self._spare is None
            or self.keeps_scale_in_place
            or new_scale is not None
            or not computed.equals(self._inputs())
        ):
            super().update(new_scale)
            return
        before = computed.tensors[0], computed.tensors[1]
        (self._scale, self._growth_tracker), self._spare = self._spare, before
        self._per_optimizer_states.clear()

    def _unscaled_step(
        self, optimizer: torch.optim.Optimizer, max_grad_norm: float | None, record: dict[str, Any], lazy: bool
    ) -> None:
        own = optimizer.__dict__.pop("grad_scale", None)
        factor = None if own is None else inverse(own)
        grads = gradients.of_optimizer(optimizer)
        if max_grad_norm is not None and grads:
            factor = gradients.check(grads, factor, max_grad_norm).grad_factor
        apply(optimizer, factor, _found_inf(record), unscale_grads=not lazy)

    def _must_not_skip(self, optimizer: torch.optim.Optimizer, record: dict[str, Any]) -> bool:
        """Return True if ``step`` must not be called, because the optimizer would skip it and spoil its state.

        This waits for the device.
        """
        if not (getattr(optimizer, "_step_supports_amp_scaling", False) and spoils_buffers(optimizer)):
            return False
        if record["stage"] is OptState.READY:
            self._check_inf_per_device(optimizer)
        found_inf = _found_inf(record)
        return found_inf is not None and bool(found_inf)

    def _clip(self, optimizer: torch.optim.Optimizer, max_grad_norm: float, record: dict[str, Any]) -> None:
        if record["stage"] is OptState.READY:
            self.unscale_(optimizer)
        grads = gradients.of_optimizer(optimizer)
        if grads:
            gradients.scale_(grads, gradients.check(grads, None, max_grad_norm).grad_factor)

    @uncompiled
    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: Tensor,
        found_inf: Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, Tensor]:
        """Check and unscale gradients in one pass. torch's ``unscale_`` calls this method."""
        grads = gradients.of_optimizer(optimizer)
        if not allow_fp16 and any(grad.dtype == torch.float16 for grad in grads):
            raise ValueError(
                "Attempting to unscale FP16 gradients. (step(optimizer, max_grad_norm=...) of a flatout "
                "optimizer takes them: it unscales in float32.)"
            )
        found: dict[torch.device, Tensor] = {}
        if grads:
            for new, _ in gradients.unscale_(grads, inv_scale):
                found[new.device] = torch.maximum(found[new.device], new) if new.device in found else new
        return found

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        for name in ("_last_step_skipped", "_spare", "_computed"):  # caches and results are not saved
            state.pop(name, None)
        return state


def _found_inf(record: dict[str, Any]) -> Tensor | None:
    """Return a tensor that is not 0 if a gradient on any device is inf or NaN; None if no gradient was checked."""
    found = record["found_inf_per_device"].values()
    return functools.reduce(lambda a, b: a + gradients.move(b, a.device), found) if found else None
