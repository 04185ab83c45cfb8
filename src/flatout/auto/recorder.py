"""Recorder of a script's training: the outermost calls of its modules, its losses, and its optimizers' steps.

Nothing of the script changes. ``Module.__call__`` and ``torch.autograd.backward`` are replaced by functions that note
the call and pass it on. torch's hook on optimizers tells when an update is complete.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from flatout.auto.recorded import RecordedCall, batch_of
from flatout.core.batches import tensors_of


@dataclass(frozen=True, eq=False)
class RecordedUpdate:
    """One step of an optimizer, with the training calls that led to it.

    Attributes:
        optimizer: the optimizer that has stepped.
        batches: the recorded calls of each module that holds some of the optimizer's parameters, one batch for each
            backward.
    """

    optimizer: Optimizer
    batches: Mapping[nn.Module, Sequence[dict[str, Any]]]


@dataclass(eq=False)
class _Backward:
    """One backward: its loss, and the calls whose outputs received their first gradients in it, by module."""

    calls: dict[nn.Module, list[RecordedCall]]
    loss: Tensor


MOST_BYTES = 1 << 30
"""Bytes of recorded calls that wait for a backward.

If there are more, the oldest are dropped, and their module is not recorded.
"""


class Recorder:
    """Records training calls until it is closed: calls with gradients of modules in train mode.

    Args:
        on_update: called with each update, when the optimizer has stepped and gradients are still there.
    """

    def __init__(self, on_update: Callable[[RecordedUpdate], object]) -> None:
        self._on_update = on_update
        self._process = os.getpid()
        self._thread = threading.local()
        self._calls: list[tuple[nn.Module, RecordedCall]] = []
        self._dropped: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._backwards: list[_Backward] = []
        self._is_stepped = False
        self._call, self._backward = nn.Module.__call__, torch.autograd.backward
        nn.Module.__call__ = self._noting_calls(self._call)  # type: ignore[method-assign]
        torch.autograd.backward = self._noting_losses(self._backward)
        self._hook = register_optimizer_step_post_hook(self._stepped)

    def close(self) -> None:
        """Give torch its functions back."""
        nn.Module.__call__ = self._call  # type: ignore[method-assign]
        torch.autograd.backward = self._backward
        self._hook.remove()
        self._calls.clear()
        self._backwards.clear()

    @property
    def _is_elsewhere(self) -> bool:
        """True in a process that the script has forked."""
        return os.getpid() != self._process

    def _noting_calls(self, call: Callable[..., Any]) -> Callable[..., Any]:
        thread = self._thread

        @wraps(call)
        def noting(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or getattr(thread, "is_called", False):
                return call(module, *args, **kwargs)
            if not (torch.is_grad_enabled() and module.training and _has_trainable(module)) or self._is_elsewhere:
                return call(module, *args, **kwargs)
            recorded = RecordedCall.of(args, kwargs)
            thread.is_called = True
            try:
                output = call(module, *args, **kwargs)
            finally:
                thread.is_called = False
            if any(tensor.requires_grad for tensor in tensors_of(output)):
                self._calls.append((module, recorded))
                self._drop_oldest()
            return recorded.watched(output)

        return noting

    def _drop_oldest(self) -> None:
        """Drop calls that no backward has reached, such as those of an evaluation with gradients."""
        while len(self._calls) > 1 and sum(call.nbytes for _, call in self._calls) > MOST_BYTES:
            self._dropped.add(self._calls.pop(0)[0])

    def _noting_losses(self, backward: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(backward)
        def noting(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            result = backward(tensors, *args, **kwargs)
            if not self._is_elsewhere:
                self._note_backward([tensors] if isinstance(tensors, Tensor) else list(tensors))
            return result

        return noting

    def _note_backward(self, losses: Sequence[Tensor]) -> None:
        """Record a backward with the calls that it reached.

        A backward that reaches only calls of an earlier one adds its loss to that one's.
        """
        if self._is_stepped:
            self._backwards, self._is_stepped = [], False
        loss = torch.stack([loss.detach().float().sum() for loss in losses]).sum()
        calls: dict[nn.Module, list[RecordedCall]] = {}
        for module, call in self._calls:
            if call.is_reached:
                calls.setdefault(module, []).append(call)
        self._calls = [(module, call) for module, call in self._calls if not call.is_reached]
        if calls:
            self._backwards.append(_Backward(calls, loss))
        elif self._backwards:
            self._backwards[-1].loss = self._backwards[-1].loss + loss

    def _stepped(self, optimizer: Optimizer, *_: object) -> None:
        """End an update. Optimizers that step without a backward between them share its calls."""
        if self._is_elsewhere or not self._backwards:
            return
        self._is_stepped = True
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        batches: dict[nn.Module, list[dict[str, Any]]] = {}
        for backward in self._backwards:
            for module, calls in backward.calls.items():
                if module not in self._dropped and any(id(p) in held for p in module.parameters()):
                    batches.setdefault(module, []).append(batch_of(calls, backward.loss))
        self._on_update(RecordedUpdate(optimizer, batches))


def _has_trainable(module: nn.Module) -> bool:
    return any(p.requires_grad for p in module.parameters())
