"""flatout's hook before every optimizer step, which the fast update can tell from a user's hook."""

from __future__ import annotations

import contextlib
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim.optimizer import _global_optimizer_pre_hooks, register_optimizer_step_pre_hook

_OPTIMIZERS = sys.modules[register_optimizer_step_pre_hook.__module__]  # torch.optim hides it
_OF_ALL_OPTIMIZERS = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")

_checks: list[Callable[[torch.optim.Optimizer], None]] = []


@contextlib.contextmanager
def before_steps(check: Callable[[torch.optim.Optimizer], None]) -> Iterator[None]:
    """Call ``check`` before each optimizer step inside the block. ``check`` may raise, but must not change anything."""
    handle = register_optimizer_step_pre_hook(_call_checks)
    _checks.append(check)
    try:
        yield
    finally:
        _checks.remove(check)
        handle.remove()


@contextlib.contextmanager
def without_users_hooks(optimizer: torch.optim.Optimizer | None) -> Iterator[None]:
    """Let steps inside the block call no hooks of the user, which may keep averages of weights or step schedules.

    Args:
        optimizer: the optimizer that steps, whose own hooks are set aside, too.
    """
    own: list[dict[Any, Any]] = []
    if optimizer is not None:
        own = [optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks]
    kept = [dict(hooks) for hooks in own]
    of_all = {name: getattr(_OPTIMIZERS, name) for name in _OF_ALL_OPTIMIZERS}
    try:
        for hooks in own:
            hooks.clear()
        for name in of_all:  # torch may be iterating the present one
            setattr(_OPTIMIZERS, name, OrderedDict())
        yield
    finally:
        for name, hooks in of_all.items():
            setattr(_OPTIMIZERS, name, hooks)
        for hooks, earlier in zip(own, kept, strict=True):
            hooks.clear()
            hooks.update(earlier)


def has_users_pre_hooks() -> bool:
    """Return whether a user's global step pre-hook is registered, which may change parameters or gradients."""
    return any(hook is not _call_checks for hook in _global_optimizer_pre_hooks.values())


def _call_checks(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for check in list(_checks):
        check(optimizer)
