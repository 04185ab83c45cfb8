"""Snapshot of everything that training changes, restored bit for bit.

Trials, undo and recovery use the same ``Snapshot``. Python attributes that a user's ``forward``, loss or dataset sets
are not saved, even if they are tensors or hooks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from flatout.core.cleanup import run_all
from flatout.core.foreign import StepGuard, add_foreign, copied_before_writes
from flatout.core.process_flags import Restorable, saved_flags
from flatout.core.random_state import RandomState
from flatout.core.saved import Saved


class Snapshot:
    """Snapshot of a training job, which ``Snapshot.capture(...)`` makes and ``restore()`` restores at any time.

    Restoring is bit-exact and in place. Parameters, buffers and optimizer state keep their objects and their memory, so
    views, tied weights and other references stay valid. A snapshot takes the memory of one copy of the model, its
    gradients and the optimizer's state.
    """

    def __init__(self, saved: Saved, *parts: Restorable) -> None:
        self._saved = saved
        self._parts = (saved, *parts)
        self._guard = StepGuard(saved)

    @classmethod
    def capture(
        cls,
        modules: Iterable[nn.Module],
        optimizer: torch.optim.Optimizer | None = None,
        loader: Any = None,
        code: Sequence[Any] = (),
        *,
        also: Sequence[Restorable] = (),
        on: torch.device | None = None,
    ) -> Snapshot:
        """Copy everything that a training step changes.

        Args:
            modules: the model and loss modules, whose parameters, buffers, gradients, train/eval modes and random
                generators are captured.
            optimizer: the optimizer, whose parameters, state, hyper-parameters and attributes are captured, with the
                tensors, containers and optimizers inside them.
            loader: the loader, whose random generators are captured, with the generators of its samplers and dataset.
            code: callables of the step, such as the loss. The snapshot has the random generators that they use, and
                the modules, optimizers and tensors that they can reach.
            also: other objects that are restored together with this one, for example the loader's position.
            on: the device for the copies. None means the device of each original.
        """
        modules = list(modules)
        saved = Saved(on)
        for module in modules:
            saved.module(module)
        if optimizer is not None:
            saved.optimizer(optimizer)
        add_foreign(saved, list(code))
        # Restored in this order. Flags come last, because reverting a technique changes them.
        return cls(saved, RandomState.capture([loader, *modules, *code, optimizer]), *also, *saved_flags())

    def restore(self) -> None:
        """Restore everything to the captured state. May be called any number of times.

        Raises:
            BaseException: the first failure, with later ones as its notes. All other parts are restored.
        """
        run_all(part.restore for part in self._parts)

    def restore_versions(self) -> None:
        """Set the tensors' version counters back after ``restore``, if nothing has been written to them since.

        Autograd then accepts a graph that saved these tensors before they were captured.
        """
        self._saved.restore_versions()

    def guarded(self) -> AbstractContextManager[None]:
        """Forbid steps of optimizers that this snapshot does not have, inside the block.

        Raises:
            RuntimeError: such an optimizer is about to step.
        """
        return self._guard.on()

    def check(self) -> None:
        """Raise the error of a guarded step again. A trial has caught it as a failure of its candidate."""
        if self._guard.error is not None:
            raise self._guard.error

    def extended(self) -> AbstractContextManager[None]:
        """Copy tensors that ``code`` can reach before an operator inside the block writes to them."""
        return copied_before_writes(self._saved)
