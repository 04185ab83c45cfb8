"""Forms of a model in TorchScript: scripted or traced."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from flatout.core.batches import tensors_of
from flatout.core.instance_class import as_written


class TakenOver:
    """Attributes, parameters and modes of a module at the time when a script or trace fixed them.

    Python's own dictionaries are compared. This detects a replaced value, but no change inside a value.
    """

    def __init__(self, module: nn.Module) -> None:
        self._modules = list(module.modules())
        self._values = [[vars(m) | {"training": training} for training in (False, True)] for m in self._modules]
        self._slots = [
            (slots, list(slots.values()), list(map(id, slots.values())))
            for m in self._modules
            for slots in (m._parameters, m._buffers, m._modules)
        ]
        self._hooks = [
            hooks
            for m in self._modules
            for hooks in (m._forward_hooks, m._forward_pre_hooks, m._backward_hooks, m._backward_pre_hooks)
        ]

    @property
    def modes(self) -> tuple[bool, ...]:
        """Mode of every module: train (True) or eval (False)."""
        return tuple([m.training for m in self._modules])

    @property
    def hooked(self) -> bool:
        """True if hooks are registered. The plain call is used then, because a TorchScript call would skip hooks."""
        return any(self._hooks) or bool(nn.modules.module._has_any_global_hook())

    def changed(self) -> str:
        """Return the first change since the record; empty without a change."""
        for slots, _, ids in self._slots:
            if list(map(id, slots.values())) != ids:
                return "a parameter, buffer or submodule was replaced"
        for module, values in zip(self._modules, self._values, strict=True):
            if not _same(vars(module), values[module.training]):
                return f"attribute {_first_changed(vars(module), values[module.training])!r} was changed"
        return ""


def _same(now: Any, then: Any) -> bool:
    try:
        return bool(now == then)
    except Exception:  # == may raise, for example for arrays. It runs only if an array was replaced.
        return False


def _first_changed(now: Mapping[str, Any], then: Mapping[str, Any]) -> str:
    return next((k for k in {**then, **now} if k not in now or k not in then or not _same(now[k], then[k])), "")


class ScriptForm:
    """Scripted module, whose modes follow those of the original module."""

    def __init__(self, module: nn.Module) -> None:
        with as_written(module):
            self._scripted = torch.jit.script(module)
        scripted = dict(self._scripted.named_modules(remove_duplicate=False))
        named = module.named_modules(remove_duplicate=False)
        self._pairs = [(m, scripted[name]) for name, m in named if name in scripted]
        self._modes = [m.training for m, _ in self._pairs]

    def prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Do nothing, because a script holds both sides of every branch."""

    def way(self) -> Callable[..., Any]:
        """Return the callable for the present modes."""
        modes = [m.training for m, _ in self._pairs]
        if modes != self._modes:
            for (module, scripted), before in zip(self._pairs, self._modes, strict=True):
                if module.training != before:
                    scripted.training = module.training
            self._modes = modes
        return self._scripted


class TraceForm:
    """Traces of a module, one for each traced combination of modes."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._modules = list(module.modules())
        self._traces: dict[tuple[bool, ...], Callable[..., Any]] = {}

    def prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Trace the module in its present modes.

        Raises:
            ValueError: the trace would be wrong for other inputs.
        """
        if args and kwargs:
            raise ValueError("a trace takes positional arguments or keywords, not both")
        devices = {t.device.type for t in tensors_of((args, kwargs))}
        with contextlib.ExitStack() as stack:
            said = stack.enter_context(warnings.catch_warnings(record=True))
            warnings.simplefilter("always")
            torch.jit.TracerWarning.ignore_lib_warnings()  # torch's own code warns about its checks of sizes
            stack.enter_context(as_written(self._module))
            for device in devices:  # autocast would make 16-bit weights constants of the trace
                stack.enter_context(torch.autocast(device, enabled=False))
            traced = torch.jit.trace(
                self._module, args or None, example_kwarg_inputs=kwargs or None, check_trace=False, strict=False
            )
        for warning in said:
            if issubclass(warning.category, torch.jit.TracerWarning):
                place = f"{os.path.basename(warning.filename)}:{warning.lineno}"
                raise ValueError(f"it would not hold for other inputs: {place}: {_sentence(warning.message)}")
        self._traces[self._modes()] = traced

    def way(self) -> Callable[..., Any] | None:
        """Return the trace for the present modes; None without one."""
        return self._traces.get(self._modes())

    def _modes(self) -> tuple[bool, ...]:
        return tuple([m.training for m in self._modules])


FORMS: Mapping[str, Callable[[nn.Module], ScriptForm | TraceForm]] = {"script": ScriptForm, "trace": TraceForm}


def _sentence(message: object) -> str:
    return str(message).split(". ")[0].strip()
