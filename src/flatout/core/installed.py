"""Code that others have installed in torch and in Python: hooks, modes, patches and profilers.

A step calls this code without a reference to it, so that a search from the step does not find it.
"""

from __future__ import annotations

import _lsprof
import contextlib
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.overrides import _get_current_function_mode_stack, _pop_mode_temporarily
from torch.utils import checkpoint
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from flatout.core.reachable import is_users, module_of
from flatout.core.step_hooks import OPTIMIZERS

_PATCHED = (torch, torch.Tensor, torch.autograd, torch.amp, torch.linalg, nn, nn.Module, nn.functional, nn.utils)
"""Namespaces of torch whose functions a step calls. Scripts and libraries replace functions there."""
_TORCHS = {"torch", "flatout", *sys.stdlib_module_names, "typing_extensions"}
_IN_C = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)
_OF_STEPS = frozenset(("state", "param_groups", "defaults"))


def installed(optimizer: torch.optim.Optimizer | None = None) -> list[Any]:
    """Return hooks, modes and patches that a step of the process runs, without those of flatout.

    Args:
        optimizer: the optimizer of the step. Its instance and class may be patched, too.
    """
    hooks = [hook for table in _hook_tables() for hook in table.values()]
    modes = [*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()]
    packing = torch._C._autograd._top_saved_tensors_default_hooks(False) or ()
    found = [each for each in (*hooks, *modes, *packing) if _package(each) != "flatout"]
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


@contextlib.contextmanager
def without_profilers() -> Iterator[None]:
    """Turn off profilers and tracers of the thread's Python code inside the block, so that they do not count its calls.

    cProfile ends the calls that it is measuring. Of a function that is running, the later time is not counted.
    """
    profiler, tracer, c_profiler = sys.getprofile(), sys.gettrace(), _c_profiler()
    if c_profiler is not None:
        c_profiler.disable()
    elif profiler is not None:
        sys.setprofile(None)
    if tracer is not None:
        sys.settrace(None)
    try:
        yield
    finally:
        if tracer is not None:
            sys.settrace(tracer)
        if c_profiler is not None:
            c_profiler.enable()
        elif profiler is not None:
            sys.setprofile(profiler)


def _c_profiler() -> _lsprof.Profiler | None:
    """Return the active ``cProfile.Profile`` of the thread, or None."""
    active: Any = sys.getprofile()
    if sys.version_info >= (3, 12):
        tool, event = sys.monitoring.PROFILER_ID, sys.monitoring.events.PY_START
        if sys.monitoring.get_tool(tool) is None:
            return None
        callback = sys.monitoring.register_callback(tool, event, None)  # the only way to read a callback
        sys.monitoring.register_callback(tool, event, callback)
        active = getattr(callback, "__self__", None)
    return active if isinstance(active, _lsprof.Profiler) else None


def _hook_tables() -> Iterator[dict[Any, Any]]:
    for module in (nn.modules.module, OPTIMIZERS):
        for name, table in vars(module).items():
            if name.startswith("_global_") and isinstance(table, dict):
                yield table


def _patches(kind: type) -> Iterator[Any]:
    """Yield functions in torch's namespaces, and in a class of optimizers, that are not torch's own."""
    for owner in (*_PATCHED, checkpoint, torch.optim.Optimizer, kind):
        candidates = [
            value
            for name, value in list(vars(owner).items())
            if name != "compile"  # no part of a step, and its trials leave compiled code
            and not isinstance(value, (type, *_IN_C))
            and not (
                type(value) is types.FunctionType  # nearly all: without a call of Python for each of them
                and "__wrapped__" not in vars(value)
                and value.__globals__.get("__name__", "").partition(".")[0] in _TORCHS
            )
        ]
        yield from (each for value in candidates for each in _wrapped(value) if _package(each) not in _TORCHS)


def _wrapped(value: Any) -> Iterator[Any]:
    """Yield a function, and the functions that it wraps, outermost first. Objects with ``__call__`` count as well."""
    while callable(value) and not isinstance(value, (type, types.ModuleType)):
        yield value
        value = getattr(value, "__dict__", {}).get("__wrapped__")


def _package(value: Any) -> str:
    return module_of(value).partition(".")[0]
