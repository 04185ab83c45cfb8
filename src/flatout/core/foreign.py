"""Objects that a loss can reach besides the model, such as other modules, optimizers and loss scalers."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from flatout.core.effects import why_not_repeated
from flatout.core.reachable import reachable
from flatout.core.saved import Saved, is_stateful, nbytes_of
from flatout.core.step_hooks import before_steps

_SMALL = (torch.amp.GradScaler, torch.optim.lr_scheduler.LRScheduler)
"""Types of objects whose tensors are copied at once because they are small."""

MOST_BYTES_OF_CODE, MOST_BYTES_OF_DATA = 1 << 28, 1 << 20
"""Sizes above which tensors and arrays are not copied: of all that a step can reach, and of each in a dataset."""


def add_data(saved: Saved, data: Any) -> None:
    """Add the Python state that an object can reach, such as a dataset, with small tensors and arrays."""
    for node in reachable(data):
        if node in saved:
            continue
        if isinstance(node, Tensor) and node.is_leaf and nbytes_of(node) <= MOST_BYTES_OF_DATA:
            saved.tensor(node, compared=True)
        saved.python(node, MOST_BYTES_OF_DATA)


def add_foreign(saved: Saved, code: Any) -> str:
    """Add everything that code can reach.

    Python state, optimizers with their parameters and state, loss scalers, learning-rate schedulers, and buffers of
    modules in train mode are copied at once, and so are tensors outside of modules. Other tensors of these objects,
    such as the weights of a frozen teacher, are copied before their first write under ``copied_before_writes``. So are
    tensors outside of modules if they are larger than ``MOST_BYTES_OF_CODE`` together.

    Args:
        saved: receives the objects, and already holds the job's modules and optimizer.
        code: functions and modules of the step.

    Returns:
        The reason why the code cannot be repeated without a trace; empty if no reason is seen.
    """
    found = list(reachable(code))
    for node in found:
        if isinstance(node, torch.optim.Optimizer):
            saved.value(node)
    for node in found:
        if isinstance(node, nn.Module) and node not in saved:
            _add_module(saved, node)
    for node in found:
        if not isinstance(node, nn.Module) and is_stateful(node):
            saved.value(node, copied=isinstance(node, _SMALL))
    left = MOST_BYTES_OF_CODE
    for node in found:
        if isinstance(node, Tensor) and node.is_leaf and node not in saved:
            left -= nbytes_of(node)
            saved.tensor(node, copied=left >= 0, compared=True)
        saved.python(node, MOST_BYTES_OF_CODE)
    return why_not_repeated(reachable(code, with_loops=False))


def _add_module(saved: Saved, root: nn.Module) -> None:
    for module in root.modules():
        for buffer in module._buffers.values():
            if buffer is not None and module.training:
                saved.tensor(buffer)
    for tensor in (*root.parameters(), *root.buffers()):
        saved.tensor(tensor, copied=False)
    saved.slots(root)


@contextlib.contextmanager
def copied_before_writes(saved: Saved) -> Iterator[None]:
    """Copy each tensor of ``saved`` that has no copy before an operator inside the block writes to it."""
    if not saved.has_uncopied:
        yield
        return
    with _CopyBeforeWrite(saved):
        yield


class _CopyBeforeWrite(TorchDispatchMode):
    """Dispatch mode that copies tensors before an operator writes to them, according to the operator's schema."""

    def __init__(self, saved: Saved) -> None:
        super().__init__()
        self._saved = saved

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for i, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                given = args[i] if i < len(args) else kwargs.get(argument.name)
                for tensor in given if isinstance(given, (list, tuple)) else (given,):
                    if isinstance(tensor, Tensor):
                        self._saved.before_write(tensor)
        return func(*args, **kwargs)


class StepGuard:
    """Guard that raises an error before the step of an optimizer that is not saved, and so cannot be restored.

    An optimizer that is made while the guard is on may step, because the training step made it.

    Args:
        saved: holds the optimizers that may step.

    Attributes:
        error: the error that was raised, or None. A trial would otherwise count the error as a failure of its
            candidate.
    """

    def __init__(self, saved: Saved) -> None:
        self.error: RuntimeError | None = None
        self._saved = saved
        self._made: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        """Check every optimizer step inside the block."""
        optimizer_class: Any = torch.optim.Optimizer
        note, made = optimizer_class._patch_step_function, self._made

        def noting(optimizer: torch.optim.Optimizer) -> None:
            made.add(optimizer)
            note(optimizer)

        optimizer_class._patch_step_function = noting  # called by constructors and copies alike
        try:
            with before_steps(self._check):
                yield
        finally:
            optimizer_class._patch_step_function = note

    def _check(self, optimizer: torch.optim.Optimizer) -> None:
        if optimizer in self._saved or optimizer in self._made:
            return
        name = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
        self.error = RuntimeError(
            f"compute_loss must step only optimizers that trials can restore, got a step of a {name} that was not "
            "found. Let compute_loss reach it by a closure, an attribute or a global. Or keep your own loop: "
            "`model, loader = flatout.optimize(model, loader)` and `flatout.optim.fuse(optimizer)`"
        )
        raise self.error
