"""Hooks and wrappers around the step of an optimizer, with a distinction between flatout's hooks and the user's."""

from __future__ import annotations

import contextlib
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from operator import itemgetter
from typing import Any

import torch
from torch.optim.optimizer import _global_optimizer_pre_hooks, register_optimizer_step_pre_hook

OPTIMIZERS = sys.modules[register_optimizer_step_pre_hook.__module__]  # torch.optim hides it
_OF_ALL_OPTIMIZERS = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")

_HOOKED = torch.optim.Optimizer.profile_hook_step(lambda: None).__code__

_checks: list[Callable[[torch.optim.Optimizer], None]] = []


@contextlib.contextmanager
def before_steps(check: Callable[[torch.optim.Optimizer], None]) -> Iterator[None]:
    """Call ``check`` before each optimizer step inside the block. ``check`` may raise, but must change nothing."""
    handle = register_optimizer_step_pre_hook(_call_checks)
    _checks.append(check)
    try:
        yield
    finally:
        _checks.remove(check)
        handle.remove()


@contextlib.contextmanager
def without_users_hooks(optimizer: torch.optim.Optimizer | None) -> Iterator[None]:
    """Disable the user's step hooks inside the block. Such hooks may update averages of weights or schedules.

    Args:
        optimizer: the optimizer that steps. Its own hooks are disabled, too.
    """
    own: list[dict[Any, Any]] = []
    if optimizer is not None:
        own = [optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks]
    kept = [dict(hooks) for hooks in own]
    of_all = {name: getattr(OPTIMIZERS, name) for name in _OF_ALL_OPTIMIZERS}
    try:
        for hooks in own:
            hooks.clear()
        for name in of_all:  # replaced, not cleared, because torch may be iterating over the present dict
            setattr(OPTIMIZERS, name, OrderedDict())
        yield
    finally:
        for name, hooks in of_all.items():
            setattr(OPTIMIZERS, name, hooks)
        for hooks, earlier in zip(own, kept, strict=True):
            hooks.clear()
            hooks.update(earlier)


def is_hook_table(value: Any) -> bool:
    """Return True for torch's tables of the step hooks of all optimizers."""
    return type(value) is OrderedDict and any(value is getattr(OPTIMIZERS, name) for name in _OF_ALL_OPTIMIZERS)


def users_hooks(table: dict[int, Any]) -> list[tuple[int, Any]]:
    """Return the ids and hooks in a table of step hooks, without those of flatout."""
    return [(key, hook) for key, hook in table.items() if not _is_own(hook)]


def set_users_hooks(table: dict[int, Any], hooks: list[tuple[int, Any]]) -> None:
    """Replace the hooks that ``users_hooks`` returns. Hooks of flatout stay, in the order of registration."""
    own = [(key, hook) for key, hook in table.items() if _is_own(hook)]
    table.clear()
    table.update(sorted(hooks + own, key=itemgetter(0)))


def _is_own(hook: Any) -> bool:
    namespace = getattr(getattr(hook, "__func__", hook), "__globals__", {})
    return str(namespace.get("__name__", "")).startswith("flatout.")


def has_users_pre_hooks() -> bool:
    """Return True if the user has registered a global step pre-hook, which may change parameters or gradients."""
    hooks = _global_optimizer_pre_hooks
    return bool(hooks) and any(hook is not _call_checks for hook in hooks.values())


def unhooked_step(cls: type[torch.optim.Optimizer]) -> Callable[..., Any]:
    """Return ``cls.step`` without the profiling and hook wrapper that torch puts around it once per class."""
    step: Any = cls.step
    while getattr(step, "__code__", None) is _HOOKED:  # no attribute marks it, because functools.wraps copies them
        step = step.__wrapped__
    return step


def is_patched(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if ``step`` was replaced on the instance by anything but an LR scheduler's wrapper."""
    step = optimizer.__dict__.get("step")
    if step is None:
        return False
    return not hasattr(step, "_wrapped_by_lr_sched") or step.__wrapped__ is not type(optimizer).step


def _call_checks(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for check in list(_checks):
        check(optimizer)
