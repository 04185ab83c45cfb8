"""Recorder of a script's outermost module calls, losses and optimizer steps.

The script does not change. ``Module.__call__`` and ``torch.autograd.backward`` are replaced by functions that record
the call and forward it. The owner of the recorder calls ``end_update`` after an optimizer has stepped.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from flatout.autotune.recorded import RecordedCall, batch_of
from flatout.core.batches import tensors_of


@dataclass(frozen=True, eq=False)
class RecordedUpdate:
    """Training calls that led to a step of an optimizer.

    Attributes:
        batches: the recorded calls of each module that holds some of the optimizer's parameters, one batch for each
            backward. Modules that are differentiated twice are left out, because compiled code cannot be differentiated
            twice.
        seconds: seconds of these calls, by module.
    """

    batches: Mapping[nn.Module, Sequence[dict[str, Any]]]
    seconds: Mapping[nn.Module, float]


@dataclass(eq=False)
class _Backward:
    """Loss of a backward, and the calls whose outputs received their first gradients in this backward, by module."""

    calls: weakref.WeakKeyDictionary[nn.Module, list[RecordedCall]]
    loss: Tensor


T = TypeVar("T")

MOST_BYTES = 1 << 30
"""Limit of the bytes of recorded calls that wait for a backward.

Above this limit, the oldest calls are dropped, and their modules are not recorded.
"""

MOST_CALLS = 256
"""Limit of the number of recorded calls that wait for a backward."""

MOST_BACKWARDS = 64
"""Limit of backwards without an update, as in a script that updates its weights by hand. The recording ends there."""


class Recorder:
    """Recorder of training calls until ``close``. A training call is a call with gradients of a module in train mode.

    Args:
        on_update: called with an optimizer and its update, after the step and before gradients are cleared.
        on_no_update: called when ``MOST_BACKWARDS`` have come without an update.
        on_failure: called with an error that has ended the recording. The script continues.
    """

    def __init__(
        self,
        on_update: Callable[[Optimizer, RecordedUpdate], object],
        on_no_update: Callable[[], object],
        on_failure: Callable[[Exception], object],
    ) -> None:
        self._on_update = on_update
        self._on_no_update = on_no_update
        self._on_failure = on_failure
        self._process = os.getpid()
        self._is_suspended = False
        self._thread = threading.local()
        self._calls: list[tuple[weakref.ref[nn.Module], RecordedCall]] = []  # the script may drop its modules
        self._dropped: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._backwards: list[_Backward] = []
        self._stepped_by: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._call, self._backward = nn.Module.__call__, torch.autograd.backward
        self._noted_call, self._noted_backward = self._noting_calls(self._call), self._noting_losses(self._backward)
        nn.Module.__call__ = self._noted_call  # type: ignore[method-assign]
        torch.autograd.backward = self._noted_backward

    def close(self) -> None:
        """Restore torch's functions."""
        self._is_suspended = True  # other code may have kept the functions of this recorder
        if nn.Module.__call__ is self._noted_call:
            nn.Module.__call__ = self._call  # type: ignore[method-assign]
        if torch.autograd.backward is self._noted_backward:
            torch.autograd.backward = self._backward
        self._calls.clear()
        self._backwards.clear()

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Record nothing inside the block."""
        self._is_suspended = True
        try:
            yield
        finally:
            self._is_suspended = False

    @property
    def _is_off(self) -> bool:
        """True while suspended, in a forked process, inside a backward, and under ``torch.func``.

        Activation checkpointing calls modules again inside a backward, and may run another backward there.
        """
        return (
            self._is_suspended
            or os.getpid() != self._process
            or torch._C._current_graph_task_id() != -1
            or torch._C._functorch.peek_interpreter_stack() is not None
        )

    def _noting_calls(self, call: Callable[..., Any]) -> Callable[..., Any]:
        recorder, thread = self, self._thread

        # torch's profiler takes the local `self` of the code of `Module.__call__` for the module.
        @wraps(call)
        def noting(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or getattr(thread, "is_called", False):
                return call(self, *args, **kwargs)
            if not (torch.is_grad_enabled() and self.training and _has_trainable(self)) or recorder._is_off:
                return call(self, *args, **kwargs)
            recorded = recorder._safely(RecordedCall.of, args, kwargs)
            if recorded is None:
                return call(self, *args, **kwargs)
            thread.is_called, begun = True, time.perf_counter()
            try:
                output = call(self, *args, **kwargs)
            finally:
                thread.is_called = False
            recorded.seconds = time.perf_counter() - begun
            watched = recorder._safely(recorded.watched, output)
            if watched is None or not any(tensor.requires_grad for tensor in tensors_of(output)):
                return output
            recorder._calls.append((weakref.ref(self), recorded))
            recorder._safely(recorder._drop_oldest)
            return watched

        return noting

    def _safely(self, function: Callable[..., T], *args: Any) -> T | None:
        """Return the result of a call, or end the recording if the call fails."""
        try:
            return function(*args)
        except Exception as error:
            self.close()
            self._on_failure(error)
            return None

    def _drop_oldest(self) -> None:
        """Drop old calls that no backward has reached, for example calls of an evaluation with gradients."""
        nbytes = sum(call.nbytes for _, call in self._calls)
        while len(self._calls) > 1 and (nbytes > MOST_BYTES or len(self._calls) > MOST_CALLS):
            reference, call = self._calls.pop(0)
            nbytes -= call.nbytes
            if (module := reference()) is not None:
                self._dropped.add(module)

    def _noting_losses(self, backward: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(backward)
        def noting(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            result = backward(tensors, *args, **kwargs)
            if not self._is_off:
                self._safely(self._note_backward, [tensors] if isinstance(tensors, Tensor) else list(tensors))
            return result

        return noting

    def _note_backward(self, losses: Sequence[Tensor]) -> None:
        """Record a backward with the calls that it reached.

        A backward that reaches only calls of an earlier backward adds its loss to the loss of the earlier one.
        """
        if self._stepped_by:
            self._backwards = []
            self._stepped_by.clear()
        loss = torch.stack([loss.detach().float().sum() for loss in losses]).sum()
        calls: weakref.WeakKeyDictionary[nn.Module, list[RecordedCall]] = weakref.WeakKeyDictionary()
        for reference, call in self._calls:
            if (module := reference()) is None:
                continue
            if call.is_differentiated_twice:
                self._dropped.add(module)
            if call.is_reached:
                calls.setdefault(module, []).append(call)
        self._calls = [(module, call) for module, call in self._calls if not call.is_reached]
        if calls and len(self._backwards) == MOST_BACKWARDS:
            self.close()
            self._on_no_update()
        elif calls:
            self._backwards.append(_Backward(calls, loss))
        elif self._backwards:
            self._backwards[-1].loss = self._backwards[-1].loss + loss

    def end_update(self, optimizer: Optimizer) -> None:
        """Record the end of an update. Call this after each step of an optimizer, before gradients are cleared.

        Two optimizers that step after the same backward share its calls. A subclass whose ``step`` calls the base's
        ``step`` fires torch's hook twice. The second time is ignored.
        """
        if self._backwards and not self._is_off and optimizer not in self._stepped_by:
            self._safely(self._pass_on, optimizer)

    def _pass_on(self, optimizer: Optimizer) -> None:
        self._stepped_by.add(optimizer)
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        batches: weakref.WeakKeyDictionary[nn.Module, list[dict[str, Any]]] = weakref.WeakKeyDictionary()
        seconds: weakref.WeakKeyDictionary[nn.Module, float] = weakref.WeakKeyDictionary()
        for backward in self._backwards:
            for module, calls in backward.calls.items():
                if module not in self._dropped and any(id(p) in held for p in module.parameters()):
                    batches.setdefault(module, []).append(batch_of(calls, backward.loss))
                    seconds[module] = seconds.get(module, 0.0) + sum(call.seconds for call in calls)
        self._on_update(optimizer, RecordedUpdate(batches, seconds))


def _has_trainable(module: nn.Module) -> bool:
    return any(p.requires_grad for p in module.parameters())
