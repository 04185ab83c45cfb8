"""Snapshot of everything that training changes, restored bit for bit.

Trials, undo, recovery and checkpoints use the same ``Snapshot``. It contains what the step and the dataset can reach in
Python, too: attributes, containers, closures, globals and arrays.
"""

from __future__ import annotations

import contextlib
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, MutableMapping, MutableSequence, MutableSet, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from flatout.core.effects import Containment, Unrepeatable, why_not_repeated
from flatout.core.errors import run_all
from flatout.core.installed import installed, without_modes, without_profilers
from flatout.core.random_state import RandomState
from flatout.core.reachable import reachable
from flatout.core.saved import (
    Saved,
    SavedTensor,
    is_stateful,
    layout_of,
    nbytes_of,
    parts_of,
    saved_elements,
    saved_gradient,
    saved_slots,
)
from flatout.core.step_hooks import before_steps

_NOT_LOOKED_INTO = (str, bytes, int, float, complex, type, types.FunctionType, types.MethodType, types.ModuleType)

_SMALL = (torch.amp.GradScaler, torch.optim.lr_scheduler.LRScheduler)
"""Types of objects whose tensors are copied at once because they are small."""

MOST_BYTES_OF_CODE, MOST_BYTES_OF_DATA = 1 << 28, 1 << 20
"""Sizes above which tensors and arrays are not copied: of all that a step can reach, and of each in a dataset."""


class Snapshot:
    """List of parts, such as ``Saved``, that ``restore`` restores at any time, in the order in which they were added.

    ``Snapshot.capture(...)`` makes the snapshot of a training job. It takes the memory of one copy of the model, its
    gradients and the optimizer's state.

    Restoring is bit-exact and in place. Parameters, buffers and optimizer state keep their objects and their memory, so
    views, tied weights and other references stay valid. An object that is added twice is saved once.

    Args:
        on: the device for copies of tensors. None means the device of each tensor.

    Attributes:
        why_not_repeated: why the code of the job cannot be repeated without a trace; empty if no reason is seen.
    """

    def __init__(self, on: torch.device | None = None) -> None:
        self.why_not_repeated = ""
        self._on = on
        self._parts: list[Any] = []
        self._seen: dict[int, Any] = {}  # by id. The reference prevents reuse of the id
        self._copied: set[Any] = set()  # storages
        self._uncopied: dict[int, list[SavedTensor]] = {}  # by storage
        self._made: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()  # while `guarded`
        self._step_error: RuntimeError | None = None
        self._containment = Containment()

    @classmethod
    def capture(
        cls,
        modules: Iterable[nn.Module],
        optimizer: torch.optim.Optimizer | None = None,
        loader: Any = None,
        code: Sequence[Any] = (),
        *,
        also: Sequence[Any] = (),
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
            also: other parts, for example the loader's position.
            on: the device for the copies. None means the device of each original.
        """
        modules, code = list(modules), [*code, *installed(optimizer)]
        made = cls(on)
        with without_modes():
            for module in modules:
                made.value(module)
            if optimizer is not None:
                made.value(optimizer)
            made.add_code(code)
            for part in ("dataset", "batch_sampler", "sampler", "collate_fn"):
                made.add_data(getattr(loader, part, None))
            # Flags come last, because reverting a technique changes them.
            made._parts += [RandomState.capture([loader, *modules, *code, optimizer]), *also, *saved_flags()]
        return made

    def __contains__(self, value: Any) -> bool:
        return id(value) in self._seen

    def _is_new(self, value: Any) -> bool:
        if value in self:
            return False
        self._seen[id(value)] = value
        return True

    # -- parts -----------------------------------------------------------------------------------------------

    def tensor(self, tensor: Tensor, *, copied: bool = True, compared: bool = False) -> None:
        """Add a tensor and its gradient.

        Args:
            tensor: any tensor.
            copied: False to let ``extended`` copy the bits before the first write.
            compared: True to restore the bits only if they have changed. A write would change the version counter.
        """
        if not self._is_new(tensor):
            return
        layout = layout_of(tensor)
        storage: Any = None if layout is None else layout[0]
        copied = copied or storage is None or storage in self._copied  # a copied tensor shares this memory
        saved = SavedTensor(tensor, self._on, copied=copied, compared=compared)
        self._parts.append(saved)
        if copied:
            self._copied.add(storage)
        else:
            self._uncopied.setdefault(storage, []).append(saved)
        if tensor.is_leaf:
            self._parts += saved_gradient(tensor, self._on)

    def slots(self, module: nn.Module) -> None:
        """Add the modes of a module and the identity of its parameters and buffers, but not their bits."""
        for part in module.modules():
            self._is_new(part)
        self._parts += saved_slots(module)

    def value(self, value: Any, *, with_objects: bool = False, copied: bool = True) -> None:
        """Add a tensor, an array, a module, an optimizer, an object with a ``state_dict``, or a container of these.

        Of a module, parameters, buffers, gradients and modes are added, and the identity of parameters and buffers. Of
        an optimizer, every attribute is added, including an optimizer that this one wraps.

        Args:
            value: any object. Objects of other types are ignored.
            with_objects: True to add the attributes of objects of other types, too.
            copied: see ``tensor``.
        """
        if type(value) in weakref.ProxyTypes:  # a dead proxy raises at any access
            return
        if isinstance(value, Tensor):
            self.tensor(value, copied=copied)
        elif isinstance(value, nn.Module):
            if value not in self:
                for tensor in (*value.parameters(), *value.buffers()):
                    self.tensor(tensor)
                self.slots(value)
        elif isinstance(value, tuple):
            self._values(value, with_objects, copied)
        elif isinstance(value, _NOT_LOOKED_INTO) or not self._is_new(value):
            return
        elif isinstance(value, (MutableMapping, MutableSequence)):
            self._parts.append(saved_elements(value))
            self._values(value.values() if isinstance(value, MutableMapping) else value, with_objects, copied)
        elif isinstance(value, MutableSet):
            self._parts.append(saved_elements(value))
        elif isinstance(value, np.ndarray):
            self._parts += parts_of(value, value.nbytes)
        elif isinstance(value, torch.optim.Optimizer):
            self.value(value.state, with_objects=True)
            self.value(vars(value))
        elif is_stateful(value) or (with_objects and hasattr(value, "__dict__")):
            self.value(vars(value), with_objects=with_objects, copied=copied)

    def _values(self, values: Iterable[Any], with_objects: bool, copied: bool) -> None:
        for value in values:
            self.value(value, with_objects=with_objects, copied=copied)

    def add_data(self, data: Any) -> None:
        """Add the Python state that an object can reach, such as a dataset, with small tensors and arrays."""
        for node in reachable(data):
            if node in self:
                continue
            if isinstance(node, Tensor) and node.is_leaf and nbytes_of(node) <= MOST_BYTES_OF_DATA:
                self.tensor(node, compared=True)
            self._parts += parts_of(node, MOST_BYTES_OF_DATA)

    def add_code(self, code: Any) -> None:
        """Add everything that code can reach, after the job's modules and optimizer, and set ``why_not_repeated``.

        Python state, optimizers with their parameters and state, loss scalers, learning-rate schedulers, and buffers of
        modules in train mode are copied at once, and so are tensors outside of modules. Other tensors of these objects,
        such as the weights of a frozen teacher, are copied before their first write under ``extended``. So are tensors
        outside of modules if they are larger than ``MOST_BYTES_OF_CODE`` together.

        Args:
            code: functions and modules of the step.
        """
        found = list(reachable(code))
        for node in found:
            if isinstance(node, torch.optim.Optimizer):
                self.value(node)
        for node in found:
            if isinstance(node, nn.Module) and node not in self:
                self._add_other_module(node)
        for node in found:
            if not isinstance(node, nn.Module) and is_stateful(node):
                self.value(node, copied=isinstance(node, _SMALL))
        left = MOST_BYTES_OF_CODE
        for node in found:
            if isinstance(node, Tensor) and node.is_leaf and node not in self:
                left -= nbytes_of(node)
                self.tensor(node, copied=left >= 0, compared=True)
            self._parts += parts_of(node, MOST_BYTES_OF_CODE)
        self.why_not_repeated = why_not_repeated(reachable(code, with_loops=False))

    def _add_other_module(self, root: nn.Module) -> None:
        for module in root.modules():
            for buffer in module._buffers.values():
                if buffer is not None and module.training:
                    self.tensor(buffer)
        for tensor in (*root.parameters(), *root.buffers()):
            self.tensor(tensor, copied=False)
        self.slots(root)

    # -- restoring -------------------------------------------------------------------------------------------

    def restore(self) -> None:
        """Restore everything to the captured state. May be called any number of times.

        Raises:
            BaseException: the first failure, with later ones as its notes. All other parts are restored.
        """
        with without_modes():
            run_all(part.restore for part in self._parts)

    def restore_versions(self) -> None:
        """Set the tensors' version counters back after ``restore``, if nothing has been written to them since.

        Autograd then accepts a graph that saved these tensors before they were captured.
        """
        for part in self._parts:
            if isinstance(part, SavedTensor):
                part.restore_version()

    def changed(self) -> str:
        """Return the first change of Python state, such as "attribute 'calls' of a Net"; empty without a change."""
        return next(filter(None, (part.changed() for part in self._parts if isinstance(part, Saved))), "")

    @contextlib.contextmanager
    def extended(self) -> Iterator[None]:
        """Copy tensors that ``code`` can reach before an operator inside the block writes to them."""
        if not self._uncopied:
            yield
            return
        with _CopyBeforeWrite(self):
            yield

    def before_write(self, tensor: Tensor) -> None:
        """Copy the bits of all added tensors that share memory with ``tensor``, before a write to it."""
        layout = layout_of(tensor)
        for saved in self._uncopied.pop(layout[0], ()) if layout is not None else ():
            saved.copy_bits()

    # -- guards ----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """Forbid effects that this snapshot cannot restore, inside the block. Drop what user code prints and logs.

        Profilers and tracers of Python code are off inside the block. An optimizer that is made inside the block may
        step, because the training step made it.

        Raises:
            Unrepeatable: the code cannot be repeated without a trace. The block is not entered.
            RuntimeError: an optimizer that this snapshot does not have is about to step.
            Unrepeatable: user code is about to write a file, or to reach another process.
        """
        if self.why_not_repeated:
            raise Unrepeatable(self.why_not_repeated)
        optimizer_class: Any = torch.optim.Optimizer
        note, made = optimizer_class._patch_step_function, self._made

        def noting(optimizer: torch.optim.Optimizer) -> None:
            made.add(optimizer)
            note(optimizer)

        with without_profilers(), self._containment.on():
            optimizer_class._patch_step_function = noting  # called by constructors and copies alike
            try:
                with before_steps(self._check_step):
                    yield
            finally:
                optimizer_class._patch_step_function = note

    def _check_step(self, optimizer: torch.optim.Optimizer) -> None:
        if optimizer in self or optimizer in self._made:
            return
        name = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
        self._step_error = RuntimeError(
            f"compute_loss must step only optimizers that trials can restore, got a step of a {name} that was not "
            "found. Let compute_loss reach it by a closure, an attribute or a global. Or keep your own loop: "
            "`model, loader = flatout.optimize(model, loader)` and `flatout.optim.fuse(optimizer)`"
        )
        raise self._step_error

    @contextlib.contextmanager
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
        for error in (self._containment.error, self._step_error):
            if error is not None:
                raise error


class _CopyBeforeWrite(TorchDispatchMode):
    """Dispatch mode that copies tensors before an operator writes to them, according to the operator's schema."""

    def __init__(self, snapshot: Snapshot) -> None:
        super().__init__()
        self._snapshot = snapshot

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for i, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                given = args[i] if i < len(args) else kwargs.get(argument.name)
                for tensor in given if isinstance(given, (list, tuple)) else (given,):
                    if isinstance(tensor, Tensor):
                        self._snapshot.before_write(tensor)
        return func(*args, **kwargs)


FlagT = TypeVar("FlagT", bound=Callable[[], Saved])

_declared: list[Callable[[], Saved]] = []


def process_flag(flag: FlagT) -> FlagT:
    """Declare a flag of the process: a function that returns the part for the flag's present value."""
    _declared.append(flag)
    return flag


def saved_flags() -> list[Saved]:
    """Return the present values of all declared flags."""
    return [flag() for flag in _declared]


@process_flag
def torch_modes() -> Saved:
    """Return grad mode and default dtype of torch, which the user's code may change."""

    def write(modes: tuple[bool, torch.dtype]) -> None:
        torch.set_grad_enabled(modes[0])
        torch.set_default_dtype(modes[1])

    return Saved(lambda: (torch.is_grad_enabled(), torch.get_default_dtype()), write)
