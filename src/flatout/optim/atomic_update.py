"""Check that an update that ran out of memory has changed nothing, so that the update can be tried again."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from itertools import chain
from operator import is_
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import _global_optimizer_post_hooks
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from flatout.core.errors import parameters_of, ran_out_of_memory, versions
from flatout.core.step_hooks import has_users_pre_hooks, is_patched, unhooked_step

_HANDED = ("grad_scale", "found_inf")
_TORCHS_FOLDER = os.path.join(os.path.dirname(torch.__file__), "optim", "")


class PartialUpdateError(RuntimeError):
    """An optimizer ran out of memory after it had updated some of the parameters, or some of its state."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        name = f"{type(optimizer).__module__}.{type(optimizer).__name__}"
        super().__init__(
            f"{name} ran out of memory in the middle of its step: some parameters, or some of its state, are those of "
            "the step and the rest are not. Go on from a checkpoint. What would help: an optimizer of flatout.optim, "
            "which takes its memory before it changes anything; foreach=False, which takes less"
        )


class AtomicUpdate:
    """Context manager for updates by any optimizer. An update that runs out of memory in it changes nothing, or raises.

    State that the update has begun is dropped, because torch's optimizers take an entry that exists for a whole one.

    Version counters of tensors show writes to parameters and state. Reading the counters of all tensors would cost time
    in every step. torch's own optimizers write to certain tensors first, the witnesses. Only these are read. For each
    group, device and dtype, the witnesses are the first parameter with a gradient, the first parameter with a gradient
    and state, and the state of both.

    Fused kernels of torch do not change version counters (torch 2.14). Adam and Adagrad increase the step count before
    their fused kernel runs, and its counter shows this. For a fused SGD, and for foreach kernels on wrapper subclasses
    such as ``DTensor``, no counter changes. An out of memory there raises, unless no kernel can have run before.

    Args:
        optimizer: makes the updates.

    Attributes:
        optimizer: the argument.
        has_rewritten_gradients: True if the failed update has changed the gradients. They are scaled, averaged and
            clipped in place before the optimizer's step, without new memory: all of them, or none.

    Raises:
        PartialUpdateError: by the end of the block, if the update has changed parameters or state.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.has_rewritten_gradients = False
        self._parameters: list[Tensor] = []
        self._alike: list[list[Tensor]] = []
        self._step: tuple[Any, bool] = None, False
        """The last ``step`` of the optimizer's class, and whether its code is torch's."""

    def __enter__(self) -> AtomicUpdate:
        optimizer = self.optimizer
        self.has_rewritten_gradients = False
        self._is_torchs_own = self._runs_only_torchs_code()
        parameters = parameters_of(optimizer)
        if not _are_same(parameters, self._parameters):
            self._parameters, self._alike = parameters, _alike(optimizer)
        self._groups = [] if self._is_torchs_own else [dict(group) for group in optimizer.param_groups]
        self._lengths = [len(entry) if isinstance(entry, dict) else 0 for entry in optimizer.state.values()]
        own = vars(optimizer)
        self._handed = {name: own[name] for name in _HANDED if name in own}
        self._witnesses = self._first_written() if self._is_torchs_own else parameters
        self._values = self._values_of(self._witnesses)
        self._versions = versions(self._values)
        self._gradient = self._first_gradient()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            if error is not None and ran_out_of_memory(error):
                self._check(error)
        finally:
            self._witnesses, self._values, self._gradient = [], [], (None, 0)  # they keep replaced state alive

    def _check(self, error: BaseException) -> None:
        optimizer = self.optimizer
        if len(optimizer.state) < len(self._lengths):
            raise PartialUpdateError(optimizer) from error
        is_fused = any(group.get("fused") for group in optimizer.param_groups)
        has_used_new_state = is_fused and any(versions(list(self._begun())))
        self._drop_what_was_begun()
        values = self._values_of(self._witnesses)
        alike, before = _alike(optimizer), self._alike
        is_grouped_as_before = len(alike) == len(before) and all(map(_are_same, alike, before))
        if not is_grouped_as_before:  # a parameter has another dtype or device
            self._parameters = []
        if (
            has_used_new_state
            or not is_grouped_as_before
            or not _are_same(values, self._values)
            or versions(values) != self._versions
            or _hides_writes(optimizer, alike)
        ):
            raise PartialUpdateError(optimizer) from error
        gradient, version = self._first_gradient()
        self.has_rewritten_gradients = gradient is not self._gradient[0] or version != self._gradient[1]

    def _runs_only_torchs_code(self) -> bool:
        """Return True if nothing but the code of torch runs in the optimizer's step."""
        optimizer, cls = self.optimizer, type(self.optimizer)
        if cls.step is not self._step[0]:
            file = unhooked_step(cls).__code__.co_filename
            self._step = cls.step, cls.__module__.startswith("torch.optim") and file.startswith(_TORCHS_FOLDER)
        return self._step[1] and not (
            optimizer._optimizer_step_pre_hooks
            or optimizer._optimizer_step_post_hooks
            or _global_optimizer_post_hooks
            or has_users_pre_hooks()
            or is_patched(optimizer)
        )

    def _first_written(self) -> list[Tensor]:
        """Return the parameters whose versions, with those of their state, show if anything has changed."""
        found, state = [], self.optimizer.state
        for alike in self._alike:
            for p in alike:
                if p.grad is not None:
                    found.append(p)
                    if not state or state.get(p):
                        break
                    found += [q for q in alike if q.grad is not None and state.get(q)][:1]
                    break
        return found

    def _values_of(self, witnesses: list[Tensor]) -> list[Any]:
        """Return parameters and their state; for optimizers that are not torch's, the state of all parameters."""
        state = self.optimizer.state
        if not state:
            return witnesses
        entries = [state[p] for p in witnesses if p in state] if self._is_torchs_own else state.values()
        return [*witnesses, *chain.from_iterable(map(_values_in, entries))]

    def _first_gradient(self) -> tuple[Tensor | None, int]:
        """Return a gradient that is scaled together with all others, and the number of writes to it."""
        sparse = None
        for p in self._parameters:
            if p.grad is not None:
                if p.grad.layout is torch.strided:
                    return p.grad, p.grad._version
                sparse = p.grad if sparse is None else sparse
        return sparse, 0 if sparse is None else sparse._values()._version

    def _begun(self) -> Iterator[Any]:
        """Yield the state of parameters that had none."""
        for entry in list(self.optimizer.state.values())[len(self._lengths) :]:
            yield from _values_in(entry)

    def _drop_what_was_begun(self) -> None:
        """Drop the state that the update has begun. New keys are the last ones, because dicts keep their order."""
        optimizer = self.optimizer
        for key in list(optimizer.state)[len(self._lengths) :]:
            del optimizer.state[key]
        for entry, length in zip(optimizer.state.values(), self._lengths, strict=True):
            if isinstance(entry, dict):
                for name in list(entry)[length:]:
                    del entry[name]
        for group, before in zip(optimizer.param_groups, self._groups, strict=False):  # torch's own change no option
            group.update(before)
        for name in _HANDED:  # a failed step of torch's GradScaler leaves them set
            vars(optimizer).pop(name, None)
        vars(optimizer).update(self._handed)


def _has_post_hooks(optimizer: torch.optim.Optimizer) -> bool:
    return bool(optimizer._optimizer_step_post_hooks or _global_optimizer_post_hooks)


def _hides_writes(optimizer: torch.optim.Optimizer, alike: list[list[Tensor]]) -> bool:
    """Return True if the version counters may not show the writes of a failed update."""
    for group in optimizer.param_groups:
        if group.get("fused") and isinstance(optimizer, torch.optim.SGD):
            return len(alike) > 1 or _has_post_hooks(optimizer)
        if group.get("foreach", False) is not False and any(map(is_traceable_wrapper_subclass, group["params"])):
            return True
    return False


def _alike(optimizer: torch.optim.Optimizer) -> list[list[Tensor]]:
    """Return the parameters of each group, device and dtype, which torch's optimizers update together."""
    found: dict[Any, list[Tensor]] = {}
    for number, group in enumerate(optimizer.param_groups):
        for p in group["params"]:
            found.setdefault((number, p.device, p.dtype), []).append(p)
    return list(found.values())


def _are_same(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(map(is_, one, other))


def _values_in(entry: Any) -> Iterable[Any]:
    return entry.values() if isinstance(entry, dict) else (entry,)
