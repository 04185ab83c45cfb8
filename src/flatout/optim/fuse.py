"""Turns a torch optimizer in use into flatout's, in place, and back."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from flatout import _gradients
from flatout.optim.adam import Adam, AdamW
from flatout.optim.base import NativeStep
from flatout.optim.sgd import SGD

_Optimizer = TypeVar("_Optimizer", bound=torch.optim.Optimizer)

_FLATOUT_CLASS: dict[type, type[NativeStep]] = {
    torch.optim.AdamW: AdamW,
    torch.optim.Adam: Adam,
    torch.optim.SGD: SGD,
}
# The `step` that an LR scheduler had put on the instance before `fuse` replaced it; None: there was none.
_before: weakref.WeakKeyDictionary[torch.optim.Optimizer, Any] = weakref.WeakKeyDictionary()


def why_not_fusable(optimizer: torch.optim.Optimizer) -> str | None:
    """Why :func:`fuse` would leave ``optimizer`` as it is, in one sentence; None when it would convert it."""
    name = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    if isinstance(optimizer, NativeStep):
        return f"{name} is native already."
    if type(optimizer) not in _FLATOUT_CLASS:
        return f"{name} has no native form (AdamW, Adam and SGD of torch.optim have, subclasses have not)."
    step = optimizer.__dict__.get("step")
    if step is not None and not hasattr(step, "_wrapped_by_lr_sched"):
        return "optimizer.step was replaced on the instance, and not by an LR scheduler."
    for i, group in enumerate(optimizer.param_groups):
        if group.get("differentiable"):
            return f"param_groups[{i}] has differentiable=True, which native steps cannot have."
        for p in group["params"]:
            if not _gradients.has_kernels(p.device):
                return f"There are no native kernels for parameters on {p.device.type}."
            if not _gradients.is_native(p):
                kind = f"{type(p).__name__} of {p.dtype}"
                return f"param_groups[{i}] has a {kind}: only plain float tensors are native."
    return None


def fuse(optimizer: _Optimizer) -> _Optimizer:
    """Gives a ``torch.optim.AdamW``, ``Adam`` or ``SGD`` its native step, in place and at any time.

    The object, its state, hooks, ``state_dict`` and LR schedulers (made before or after) stay what they are;
    only its class changes, to the subclass of the same name in ``flatout.optim``. :func:`unfuse` undoes it.

    Args:
        optimizer: any optimizer. One that cannot be converted is left alone; :func:`why_not_fusable` says
            why.

    Returns:
        ``optimizer`` itself.
    """
    if why_not_fusable(optimizer) is not None:
        return optimizer
    _before[optimizer] = optimizer.__dict__.get("step")
    _become(optimizer, _FLATOUT_CLASS[type(optimizer)])
    _move_counts(optimizer, lambda group, p: p.device)
    return optimizer


def unfuse(optimizer: _Optimizer) -> _Optimizer:
    """Undoes :func:`fuse`: class, ``step`` and the devices of step counts are as torch would have them.

    Args:
        optimizer: any optimizer; one that :func:`fuse` did not convert is left alone.

    Returns:
        ``optimizer`` itself.
    """
    if optimizer not in _before or not isinstance(optimizer, NativeStep):
        return optimizer
    step = _before.pop(optimizer)
    if isinstance(optimizer, SGD):
        optimizer._settle()
    _become(optimizer, optimizer._torch_class)
    if step is not None:
        optimizer.__dict__["step"] = step
    _move_counts(optimizer, _torchs_device)
    return optimizer


def _torchs_device(group: dict[str, Any], parameter: Tensor) -> torch.device:
    """Where torch keeps a step count: with the parameter when its step is capturable or fused, else on the CPU."""
    return parameter.device if group.get("capturable") or group.get("fused") else torch.device("cpu")


def _move_counts(optimizer: torch.optim.Optimizer, device: Callable[[dict[str, Any], Tensor], torch.device]) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            count = optimizer.state.get(p, {}).get("step")
            if isinstance(count, Tensor):
                optimizer.state[p]["step"] = count.to(device(group, p))


def _become(optimizer: torch.optim.Optimizer, cls: type[torch.optim.Optimizer]) -> None:
    optimizer.__class__ = cls
    optimizer._patch_step_function()
    if "step" in optimizer.__dict__:
        optimizer.__dict__["step"] = _as_scheduler_wraps(optimizer)


def _as_scheduler_wraps(optimizer: torch.optim.Optimizer) -> Any:
    """The class's step as ``LRScheduler`` puts it on an instance: notes the call, holds no reference."""
    function: Any = type(optimizer).step
    reference = weakref.ref(optimizer)

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        owner: Any = reference()
        owner._opt_called = True
        return function.__get__(owner, type(owner))(*args, **kwargs)

    wrapper._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    return wrapper
