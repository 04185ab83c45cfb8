"""flatout's hook before every optimizer step, which the fast update can tell from a user's hook."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim.optimizer import _global_optimizer_pre_hooks, register_optimizer_step_pre_hook

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


def has_users_pre_hooks() -> bool:
    """Return whether a user's global step pre-hook is registered, which may change parameters or gradients."""
    return any(hook is not _call_checks for hook in _global_optimizer_pre_hooks.values())


def _call_checks(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for check in list(_checks):
        check(optimizer)
