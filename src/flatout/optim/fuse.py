"""Conversion of a torch optimizer in use to flatout's, in place, and back."""

from __future__ import annotations

import functools
import weakref
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from flatout.core import gradients
from flatout.core.step_hooks import is_patched
from flatout.optim import options
from flatout.optim.adam import Adam, AdamW
from flatout.optim.bucket import keep_moment, takes
from flatout.optim.dynamic8 import coded
from flatout.optim.native_step import NativeStep, before_fuse
from flatout.optim.sgd import SGD

_Optimizer = TypeVar("_Optimizer", bound=torch.optim.Optimizer)

_NATIVE: dict[type, type[NativeStep]] = {native._torch_class: native for native in (AdamW, Adam, SGD)}
"""Classes of ``torch.optim`` that :func:`fuse` converts, with the native class of each."""

FUSABLE = tuple(cls.__name__ for cls in _NATIVE)
"""Names of the classes that :func:`fuse` converts."""


def why_not_fusable(optimizer: torch.optim.Optimizer) -> str | None:
    """Return why :func:`fuse` would not convert ``optimizer``, in one sentence; None if it would."""
    name = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    if isinstance(optimizer, NativeStep):
        return f"{name} is native already."
    if type(optimizer) not in _NATIVE:
        *others, last = FUSABLE
        return f"{name} has no native form ({', '.join(others)} and {last} of torch.optim have, subclasses have not)."
    if is_patched(optimizer):
        return "optimizer.step was replaced on the instance, and not by an LR scheduler."
    for i, group in enumerate(optimizer.param_groups):
        if group.get("differentiable"):
            return f"param_groups[{i}] has differentiable=True, which native steps cannot have."
        for p in group["params"]:
            if not gradients.has_kernels(p.device):
                return f"There are no native kernels for parameters on {p.device.type}."
            if is_lazy(p):
                return f"param_groups[{i}] has a lazy parameter. Run the model on one batch first."
            if not takes(p, None):
                kind = f"{type(p).__name__} of {p.dtype}"
                return f"param_groups[{i}] has a {kind}: only float and complex tensors, plain or DTensors, are native."
    return None


def fuse(optimizer: _Optimizer, **additions: Any) -> _Optimizer:
    """Give an optimizer of ``torch.optim`` its native step, in place and at any time.

    The object, its state, hooks, ``state_dict`` and LR schedulers (made before or after) do not change. Only its class
    becomes the subclass of the same name in ``flatout.optim``. Its copies and pickles have torch's class, unless they
    have additional options. :func:`unfuse` reverts the conversion.

    Args:
        optimizer: any optimizer. If it cannot be converted, nothing changes, and :func:`why_not_fusable` returns the
            reason. An optimizer that is already native only gets the additional options.
        additions: additional options of :class:`flatout.optim.AdamW`, for all groups.

    Returns:
        ``optimizer`` itself.

    Raises:
        TypeError: ``additions`` has an unknown option.
        ValueError: an additional option has an invalid value, or a value that these parameters cannot have. Nothing is
            changed.
    """
    unknown = additions.keys() - options.NEUTRAL.keys()
    if unknown:
        raise TypeError(f"fuse() got unexpected {', '.join(sorted(unknown))}: it takes {', '.join(options.NEUTRAL)}")
    options.normalize(additions)
    if not isinstance(optimizer, NativeStep) and why_not_fusable(optimizer) is not None:
        return optimizer
    for group in optimizer.param_groups:
        options.normalize({**group, **additions})
    for target in (optimizer.defaults, *optimizer.param_groups):
        target.update(additions)
    if not isinstance(optimizer, NativeStep):
        before_fuse[optimizer] = optimizer.__dict__.get("step")
        _become(optimizer, _NATIVE[type(optimizer)])
    return optimizer


def unfuse(optimizer: _Optimizer) -> _Optimizer:
    """Revert :func:`fuse`, on the optimizer or a copy of it: class, ``step``, options and state are torch's again.

    Masters, averages and all other state of the additional options are dropped.

    Args:
        optimizer: any optimizer. Nothing changes if :func:`fuse` did not convert it.

    Returns:
        ``optimizer`` itself.
    """
    if optimizer not in before_fuse or not isinstance(optimizer, NativeStep):
        return optimizer
    for target in (optimizer.defaults, *optimizer.param_groups):
        for name in options.NEUTRAL:
            target.pop(name, None)
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p in optimizer.state:
                optimizer.state[p] = _torchs(optimizer, group, p)
    optimizer.__dict__.pop("_plan", None)
    step = before_fuse.pop(optimizer)
    _become(optimizer, optimizer._torch_class)
    if step is not None:
        optimizer.__dict__["step"] = step
    return optimizer


def _torchs(optimizer: NativeStep, group: dict[str, Any], p: Tensor) -> dict[str, Any]:
    """Return the state of one parameter with the keys, dtypes and device of the step count that torch has."""
    state = optimizer._published(group, optimizer.state[p])
    for name in options.EXTRA_STATE:
        state.pop(name, None)
    for name in {*optimizer._streams(group), *coded(state)}:
        if state.get(name) is not None:
            keep_moment(state, name, p, p.dtype)
    return state


def _become(optimizer: torch.optim.Optimizer, cls: type[torch.optim.Optimizer]) -> None:
    optimizer.__class__ = cls
    optimizer._patch_step_function()
    if "step" in optimizer.__dict__:
        optimizer.__dict__["step"] = _as_scheduler_wraps(optimizer)


def _as_scheduler_wraps(optimizer: torch.optim.Optimizer) -> Any:
    """Return a ``step`` for the instance, as ``LRScheduler`` makes it: it notes the call and holds no reference."""
    function: Any = type(optimizer).step
    reference = weakref.ref(optimizer)

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        owner: Any = reference()
        owner._opt_called = True
        return function.__get__(owner, type(owner))(*args, **kwargs)

    wrapper._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    return wrapper
