"""Code that others have installed in torch and in Python: hooks, modes, tracers and patches.

A step calls this code without a reference to it, so that a search from the step does not find it.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import _get_current_function_mode_stack, _pop_mode_temporarily
from torch.utils import checkpoint
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from flatout.core.reachable import is_users, module_of

_OPTIMIZERS = sys.modules[register_optimizer_step_pre_hook.__module__]  # torch.optim hides it
_PATCHED = (torch, torch.Tensor, torch.autograd, torch.amp, torch.linalg, nn, nn.Module, nn.functional, nn.utils)
"""Namespaces of torch whose functions a step calls. Scripts and libraries replace functions there."""
_TORCHS = {"torch", "flatout", *sys.stdlib_module_names, "typing_extensions"}
_OF_STEPS = frozenset(("state", "param_groups", "defaults"))


def installed(optimizer: torch.optim.Optimizer | None = None) -> list[Any]:
    """Return hooks, modes, tracers and patches that a step of the process runs, without those of flatout.

    Args:
        optimizer: the optimizer of the step. Its instance and class may be patched, too.
    """
    hooks = [hook for table in _hook_tables() for hook in table.values()]
    modes = [*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()]
    packing = torch._C._autograd._top_saved_tensors_default_hooks(False) or ()
    found = [each for each in (*hooks, *modes, *packing) if _package(each) != "flatout"]
    found += [each for each in (sys.gettrace(), sys.getprofile()) if is_users(module_of(each))]  # not a debugger
    if optimizer is not None:
        kinds = [kind for kind in type(optimizer).__mro__ if is_users(kind.__module__)]
        own = [value for name, value in vars(optimizer).items() if name not in _OF_STEPS]
        found += [*kinds, *(each for each in own if _package(each) != "flatout")]
    return [*found, *_patches(type(optimizer))]


@contextlib.contextmanager
def without_modes() -> Iterator[None]:
    """Turn off the modes of the thread inside the block, so that they do not count operations of flatout."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(_disable_current_modes())
        for _ in _get_current_function_mode_stack():
            stack.enter_context(_pop_mode_temporarily())
        yield


def _hook_tables() -> Iterator[dict[Any, Any]]:
    for module in (nn.modules.module, _OPTIMIZERS):
        for name, table in vars(module).items():
            if name.startswith("_global_") and isinstance(table, dict):
                yield table


def _patches(kind: type) -> Iterator[Any]:
    """Yield functions in torch's namespaces, and in a class of optimizers, that are not torch's own."""
    for owner in (*_PATCHED, checkpoint, torch.optim.Optimizer, kind):
        for value in list(vars(owner).values()):
            for each in _wrapped(value):
                if _package(each) not in _TORCHS:
                    yield each


def _wrapped(value: Any) -> Iterator[Any]:
    """Yield a function, and the functions that it wraps, outermost first."""
    while isinstance(value, (types.FunctionType, types.MethodType)):
        yield value
        value = getattr(value, "__wrapped__", None)


def _package(value: Any) -> str:
    return module_of(value).partition(".")[0]
