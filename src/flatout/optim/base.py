"""What flatout's optimizers share: the step that runs native operators, and torch's own where they cannot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from flatout import _gradients


def unhooked_step(cls: type[torch.optim.Optimizer]) -> Callable[..., Any]:
    """``cls.step`` without the profiling and hook wrapper that torch puts around it once per class."""
    step: Any = cls.step
    while getattr(step, "hooked", False):
        step = step.__wrapped__
    return step


class NativeStep(torch.optim.Optimizer):
    """Mixin in front of a torch optimizer: same options, same state, one native pass per group.

    ``step`` leaves ``p.grad`` as it is: an AMP scale or a clip coefficient is applied in registers.
    """

    _torch_class: ClassVar[type[torch.optim.Optimizer]]
    # torch.amp.GradScaler then hands `grad_scale` and `found_inf` over as tensors instead of asking with
    # .item().
    _step_supports_amp_scaling = True

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch; ``differentiable=True`` is refused, because in-place native steps have no gradient."""
        if param_group.get("differentiable", self.defaults.get("differentiable", False)):
            raise ValueError(
                f"differentiable must be False for flatout.optim.{type(self).__name__}, got True: "
                f"use torch.optim.{self._torch_class.__name__}"
            )
        super().add_param_group(param_group)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates all parameters that have a gradient.

        Args:
            closure: reevaluates the model and returns the loss, as in torch.

        Returns:
            What ``closure`` returned, else None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            self._update()
        return loss

    @torch.compiler.disable
    def _update(self) -> None:
        found_inf = getattr(self, "found_inf", None)
        factor = getattr(self, "_grad_factor", None)
        grad_scale = getattr(self, "grad_scale", None)
        if grad_scale is not None:
            inverse = grad_scale.double().reciprocal().float()
            factor = inverse if factor is None else factor * inverse
        work = self._collect()
        if work is None:
            self._torch_update(factor, found_inf)
            return
        for group, buckets in work:
            for (device, _), (params, grads) in buckets.items():
                local_factor = _gradients.on_device(factor, device)
                local_inf = None if found_inf is None else _gradients.move(found_inf, device, torch.float32)
                try:
                    self._native_step(group, params, grads, local_factor, local_inf)
                except RuntimeError as error:
                    if not _gradients.is_about_layout(error):
                        raise
                    self._step_in_other_layouts(group, params, grads, local_factor, local_inf)
                torch.autograd.graph.increment_version(params)

    def _collect(self) -> list[tuple[dict[str, Any], dict[Any, tuple[list[Tensor], list[Tensor]]]]] | None:
        """Per group, parameters and gradients by (device, dtype); None when one is not for our kernels."""
        work = []
        for group in self.param_groups:
            if any(isinstance(beta, Tensor) and beta.device.type != "cpu" for beta in group.get("betas", ())):
                return None  # our kernels take betas from the host, which would wait for these
            buckets: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
            for p in group["params"]:
                g = p.grad
                if g is None:
                    continue
                key = (p.device, p.dtype)
                bucket = buckets.get(key)
                if bucket is None:
                    if not _gradients.is_native(p):
                        return None
                    bucket = buckets[key] = ([], [])
                if g.dtype != p.dtype or g.layout != torch.strided or g.device != key[0]:
                    return None
                if type(p) not in _gradients.PLAIN or type(g) not in _gradients.PLAIN:
                    return None
                bucket[0].append(p)
                bucket[1].append(g)
            work.append((group, buckets))
        return work

    def _native_step(
        self,
        group: dict[str, Any],
        params: list[Tensor],
        grads: list[Tensor],
        factor: Tensor | None,
        found_inf: Tensor | None,
        memory: list[Tensor] | None = None,
    ) -> None:
        """One group's parameters of one device and dtype.

        State belongs to ``params``; ``memory``, where given, stands in for them and lays out their state.
        """
        raise NotImplementedError

    def _step_in_other_layouts(
        self,
        group: dict[str, Any],
        params: list[Tensor],
        grads: list[Tensor],
        factor: Tensor | None,
        found_inf: Tensor | None,
    ) -> None:
        """The same where strides differ: the flat kernels need parameter, gradient and state laid out alike.

        A gradient or a moment laid out differently is copied; a parameter that is no dense block (a strided
        view) is computed in a copy and written back.
        """
        memory = [p if _gradients.is_dense(p) else p.contiguous() for p in params]
        like_params = [like(g, p) for g, p in zip(grads, memory, strict=True)]
        self._native_step(group, params, like_params, factor, found_inf, memory)
        for p, stand_in in zip(params, memory, strict=True):
            if stand_in is not p:
                p.copy_(stand_in)

    def _torch_update(self, factor: Tensor | None, found_inf: Tensor | None) -> None:
        """The same update by torch's class; it must ask the device whether to skip."""
        if found_inf is not None and found_inf.item():
            return
        if factor is not None:
            grads = _gradients.gradients_of(p for group in self.param_groups for p in group["params"])
            if grads:
                _gradients.scale_(grads, factor)
        handed: dict[str, Any] = {
            name: self.__dict__.pop(name) for name in ("grad_scale", "found_inf") if name in self.__dict__
        }
        try:
            unhooked_step(self._torch_class)(self)
        finally:
            self.__dict__.update(handed)


def like(tensor: Tensor, leader: Tensor) -> Tensor:
    """``tensor`` with the strides of ``leader``, a copy only where they differ."""
    if tensor.stride() == leader.stride() or (tensor.is_contiguous() and leader.is_contiguous()):
        return tensor
    return torch.empty_like(leader, requires_grad=False).copy_(tensor)


def learning_rate(lr: float | Tensor, device: torch.device) -> tuple[float, Tensor | None]:
    """The rate as a number, or as a tensor on ``device`` when only the device knows it."""
    if not isinstance(lr, Tensor):
        return float(lr), None
    if lr.device.type == "cpu":
        return float(lr), None
    return 0.0, _gradients.on_device(lr, device)


def step_count(state: dict[str, Any], device: torch.device) -> Tensor:
    """``state["step"]`` as the kernels read it: float32, moved to the parameter's device when elsewhere.

    Counts that torch made in float64 (as it does under such a default dtype) become float32 too: exact up to
    16.7 million steps, and torch goes on with either.
    """
    step = state["step"]
    if step.dtype != torch.float32 or step.device != device:
        state["step"] = step = step.to(device=device, dtype=torch.float32)
    return step
