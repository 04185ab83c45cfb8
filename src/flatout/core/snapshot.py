"""Snapshot of everything that training changes, restored bit for bit.

Trials, undo and recovery use the same ``Snapshot``. It contains what the step and the dataset can reach in Python, too:
attributes, containers, closures, globals and arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from flatout.core.effects import Containment, Unrepeatable
from flatout.core.errors import run_all
from flatout.core.foreign import StepGuard, add_data, add_foreign, copied_before_writes
from flatout.core.installed import installed, without_modes, without_profilers
from flatout.core.random_state import RandomState
from flatout.core.saved import Saved


class Snapshot:
    """Snapshot of a training job, which ``Snapshot.capture(...)`` makes and ``restore()`` restores at any time.

    Restoring is bit-exact and in place. Parameters, buffers and optimizer state keep their objects and their memory, so
    views, tied weights and other references stay valid. A snapshot takes the memory of one copy of the model, its
    gradients and the optimizer's state.

    Attributes:
        why_not_repeated: why ``code`` cannot be repeated without a trace; empty if no reason is seen.
    """

    why_not_repeated: str = ""

    def __init__(self, saved: Saved, *parts: Restorable) -> None:
        self._saved = saved
        self._parts = (saved, *parts)
        self._guard = StepGuard(saved)
        self._containment = Containment()

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
            loader: the loader, whose random generators are captured, with the generators of its samplers and dataset,
                and with the Python state of these.
            code: callables of the step, such as the loss. The snapshot has the random generators that they use, and
                everything that they can reach. Hooks and patches that others have installed in torch count as well.
            also: other objects that are restored together with this one, for example the loader's position.
            on: the device for the copies. None means the device of each original.
        """
        modules, code = list(modules), [*code, *installed(optimizer)]
        with without_modes():
            saved = Saved(on)
            for module in modules:
                saved.module(module)
            if optimizer is not None:
                saved.optimizer(optimizer)
            why_not_repeated = add_foreign(saved, code)
            for part in ("dataset", "batch_sampler", "sampler", "collate_fn"):
                add_data(saved, getattr(loader, part, None))
            # Restored in this order. Flags come last, because reverting a technique changes them.
            made = cls(saved, RandomState.capture([loader, *modules, *code, optimizer]), *also, *saved_flags())
        made.why_not_repeated = why_not_repeated
        return made

    def restore(self) -> None:
        """Restore everything to the captured state. May be called any number of times.

        Raises:
            BaseException: the first failure, with later ones as its notes. All other parts are restored.
        """
        with without_modes():
            run_all(part.restore for part in self._parts)

    def changed(self) -> str:
        """Return the first change of Python state, such as "attribute 'calls' of a Net"; empty without a change."""
        return self._saved.changed()

    def restore_versions(self) -> None:
        """Set the tensors' version counters back after ``restore``, if nothing has been written to them since.

        Autograd then accepts a graph that saved these tensors before they were captured.
        """
        self._saved.restore_versions()

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Forbid effects that this snapshot cannot restore, inside the block. Drop what user code prints and logs.

        Profilers and tracers of Python code are off inside the block.

        Raises:
            Unrepeatable: the code cannot be repeated without a trace. The block is not entered.
            RuntimeError: an optimizer that this snapshot does not have is about to step.
            Unrepeatable: user code is about to write a file, or to reach another process.
        """
        if self.why_not_repeated:
            raise Unrepeatable(self.why_not_repeated)
        with without_profilers(), self._containment.on(), self._guard.on():
            yield

    @contextmanager
    def repeatable(self) -> Iterator[None]:
        """Guard the block like ``guarded``, and restore everything after it.

        What must not be repeated is not restored either. For example, a thread may wait for it meanwhile.
        """
        with self.guarded():
            try:
                yield
            finally:
                self.restore()

    def check(self) -> None:
        """Raise the error of a forbidden effect again. A trial has caught it as a failure of its candidate."""
        for error in (self._containment.error, self._guard.error):
            if error is not None:
                raise error

    def extended(self) -> AbstractContextManager[None]:
        """Copy tensors that ``code`` can reach before an operator inside the block writes to them."""
        return copied_before_writes(self._saved)


class Restorable(Protocol):
    """State that can be restored any number of times."""

    def restore(self) -> None:
        """Restore the captured state."""


FlagT = TypeVar("FlagT", bound=Callable[[], Restorable])

_declared: list[Callable[[], Restorable]] = []


def process_flag(flag: FlagT) -> FlagT:
    """Declare a flag: a class whose objects hold the flag's present value and can restore it."""
    _declared.append(flag)
    return flag


def saved_flags() -> list[Restorable]:
    """Return the present values of all declared flags."""
    return [flag() for flag in _declared]


@process_flag
class TorchModes:
    """Grad mode and default dtype of torch, which the user's code may change."""

    def __init__(self) -> None:
        self._grad_enabled = torch.is_grad_enabled()
        self._dtype = torch.get_default_dtype()

    def restore(self) -> None:
        """Restore both modes."""
        torch.set_grad_enabled(self._grad_enabled)
        torch.set_default_dtype(self._dtype)
