"""Tensors, modules and containers that training changes in place, saved with their identity and their bits."""

from __future__ import annotations

import copy
import types
import weakref
from collections.abc import Iterable, MutableMapping, MutableSequence, MutableSet
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from flatout._cleanup import run_all


def owned(tensor: Tensor) -> Tensor:
    """The elements behind a tensor: an expanded dimension, whose entries are one and the same, shrinks to one."""
    if tensor.layout is not torch.strided:
        return tensor  # sparse gradients, and moments made of them: writing to a view of one does not reach it
    view = tensor.detach()
    for dim, (size, stride) in enumerate(zip(view.shape, view.stride(), strict=True)):
        if stride == 0 and size > 1:
            view = view.narrow(dim, 0, 1)
    return view


class SavedTensor:
    """A tensor object, the memory it lay in, and a copy of its bits.

    Args:
        tensor: any tensor; an uninitialized one has no bits.
        on: the device for the copy; default: the tensor's own.
        copied: whether to copy the bits now. ``copy_bits`` copies them later, before a write.

    Attributes:
        tensor: the tensor itself.
        bits: a copy of its elements; None while there is none.
    """

    def __init__(self, tensor: Tensor, on: torch.device | None = None, *, copied: bool = True) -> None:
        self.tensor = tensor
        self._on = on
        self._kind = type(tensor)
        self._place = tensor.data  # shares the memory, and keeps its own sizes and strides
        self._layout = _layout(tensor)
        self.bits: Tensor | None = None
        self._version = None if self._layout is None or tensor.is_inference() else tensor._version
        if copied:
            self.copy_bits()

    def copy_bits(self) -> None:
        """Copy the bits that the tensor has now; nothing happens where there is a copy."""
        if self.bits is None and not is_lazy(self.tensor):
            bits = owned(self.tensor).detach()
            self.bits = bits.clone() if self._on is None else bits.to(self._on, copy=True)

    def has_changed(self) -> bool:
        """Whether ``restore`` would change anything, as far as that can be seen."""
        if self.bits is None or self._layout is None or _layout(self.tensor) != self._layout:
            return True
        return not torch.equal(owned(self.tensor), self.bits)

    def restore(self) -> None:
        """Put memory, sizes and bits back.

        Raises:
            RuntimeError: the tensor was written to, and its bits were not copied before.
        """
        if type(self.tensor) is not self._kind:  # a lazy parameter has been initialized
            self.tensor.data = self._place
            self.tensor.__class__ = self._kind
        elif self._layout is not None and _layout(self.tensor) != self._layout:
            storage, size = self._place.untyped_storage(), self._layout[1]
            if storage.nbytes() < size:  # never smaller: views that were made since may reach beyond its end
                storage.resize_(size)
            self.tensor.data = self._place
        if self.bits is not None:
            with torch.no_grad(), torch.inference_mode(self.tensor.is_inference()):
                owned(self.tensor).copy_(self.bits)
        elif self._version is not None and self.tensor._version != self._version:
            raise RuntimeError(
                f"compute_loss must write to tensors outside the model in its first call, or not at all, got a later "
                f"write to a tensor of shape {tuple(self.tensor.shape)}. Keep your own loop: "
                "`model, loader = flatout.optimize(model, loader)`"
            )


def _layout(tensor: Tensor) -> tuple[Any, ...] | None:
    """Memory, sizes and strides of a tensor; None where it has no storage of its own (sparse, or a wrapper)."""
    if is_lazy(tensor) or tensor.layout is not torch.strided:
        return None
    try:
        storage = tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None
    place = storage._cdata, storage.nbytes(), tensor.storage_offset()
    return *place, tensor.shape, tensor.stride(), tensor.dtype


class SavedGradient:
    """The gradient of a leaf, absent or an object with its bits, and ``requires_grad``."""

    def __init__(self, tensor: Tensor, on: torch.device | None) -> None:
        self._tensor = tensor
        self._requires_grad = tensor.requires_grad
        self._grad = None if tensor.grad is None else SavedTensor(tensor.grad, on)

    def restore(self) -> None:
        """Put the gradient back."""
        if self._grad is not None:
            self._grad.restore()
        self._tensor.grad = None if self._grad is None else self._grad.tensor
        if self._tensor.requires_grad != self._requires_grad:  # an inference tensor refuses even the same value
            self._tensor.requires_grad = self._requires_grad


class ModuleSlots:
    """Which parameter and buffer objects a module tree holds, and its modes; not their bits."""

    def __init__(self, module: nn.Module) -> None:
        self._slots = [(m, m.training, dict(m._parameters), dict(m._buffers)) for m in module.modules()]

    def restore(self) -> None:
        """Put the objects and the modes back."""
        for module, training, parameters, buffers in self._slots:
            module.training = training
            if not isinstance(module, torch.jit.ScriptModule):  # whose slots no Python code can change
                pairs: tuple[tuple[Any, Any], ...] = ((module._parameters, parameters), (module._buffers, buffers))
                for slots, saved in pairs:
                    slots.clear()
                    slots.update(saved)


class _SavedMapping:
    def __init__(self, mapping: MutableMapping[Any, Any]) -> None:
        self._mapping = mapping
        self._items = list(mapping.items())

    def restore(self) -> None:
        self._mapping.clear()
        self._mapping.update(self._items)


class _SavedSequence:
    def __init__(self, sequence: MutableSequence[Any]) -> None:
        self._sequence = sequence
        self._items = list(sequence)

    def restore(self) -> None:
        self._sequence.clear()
        self._sequence.extend(self._items)


class _SavedSet:
    def __init__(self, members: MutableSet[Any]) -> None:
        self._members = members
        self._items = list(members)

    def restore(self) -> None:
        self._members.clear()
        for item in self._items:
            self._members.add(item)


class _SavedArray:
    def __init__(self, array: np.ndarray) -> None:
        self._array = array
        self._bits = copy.copy(array)

    def restore(self) -> None:
        self._array[...] = self._bits


_NOT_LOOKED_INTO = (str, bytes, int, float, complex, type, types.FunctionType, types.MethodType, types.ModuleType)


def is_stateful(value: Any) -> bool:
    """Whether an object has a ``state_dict`` to save and load, as scalers, schedulers and averages of weights have.

    A loader or a dataset that has one is not meant: its place is its own concern.
    """
    kind = type(value)
    has_state = callable(getattr(kind, "state_dict", None)) and callable(getattr(kind, "load_state_dict", None))
    return has_state and hasattr(value, "__dict__") and not any(hasattr(kind, m) for m in ("__iter__", "__getitem__"))


class Saved:
    """Everything that was added to it, each object once.

    Args:
        on: the device for copies of tensors; default: where the originals are.
    """

    def __init__(self, on: torch.device | None = None) -> None:
        self._on = on
        self._parts: list[Any] = []
        self._seen: dict[int, Any] = {}  # by id; holding the object keeps its id from being used again
        self._copied: set[Any] = set()  # storages
        self._uncopied: dict[int, list[SavedTensor]] = {}  # by storage

    def __contains__(self, value: Any) -> bool:
        return id(value) in self._seen

    def module(self, module: nn.Module) -> None:
        """Add parameters, buffers, gradients, modes, and which objects the module holds."""
        for tensor in (*module.parameters(), *module.buffers()):
            self.tensor(tensor)
        self.slots(module)

    def slots(self, module: nn.Module) -> None:
        """Add the modes, and which objects the module holds, without their bits."""
        for part in module.modules():
            self._is_new(part)
        self._parts.append(ModuleSlots(module))

    def tensor(self, tensor: Tensor, *, copied: bool = True) -> None:
        """Add a tensor and its gradient. One that is not ``copied`` has its bits copied by ``before_write``."""
        if not self._is_new(tensor):
            return
        layout = _layout(tensor)
        storage: Any = None if layout is None else layout[0]
        copied = copied or storage is None or storage in self._copied  # shares memory that the job writes to
        saved = SavedTensor(tensor, self._on, copied=copied)
        self._parts.append(saved)
        if copied:
            self._copied.add(storage)
        else:
            self._uncopied.setdefault(storage, []).append(saved)
        if tensor.is_leaf:
            self._parts.append(SavedGradient(tensor, self._on))

    def gradient(self, tensor: Tensor) -> None:
        """Add the gradient of a leaf, and not its bits."""
        if self._is_new(tensor):
            self._parts.append(SavedGradient(tensor, self._on))

    @property
    def copied_bytes(self) -> int:
        """Bytes of the copies of tensors, without gradients."""
        tensors = (part.bits for part in self._parts if isinstance(part, SavedTensor))
        return sum(bits.nbytes for bits in tensors if bits is not None)

    @property
    def has_uncopied(self) -> bool:
        """Whether there are tensors whose bits are not copied yet."""
        return bool(self._uncopied)

    def before_write(self, tensor: Tensor) -> None:
        """Copy the bits that a write to this tensor would change."""
        layout = _layout(tensor)
        for saved in self._uncopied.pop(layout[0], ()) if layout is not None else ():
            saved.copy_bits()

    def optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Add parameters, state and every attribute; an optimizer that is wrapped by this one as well."""
        self._is_new(optimizer)
        self.value(optimizer.state, with_objects=True)
        self.value(vars(optimizer))

    def value(self, value: Any, *, with_objects: bool = False, copied: bool = True) -> None:
        """Add a tensor, a container with what is in it, a module, or an object with a ``state_dict`` of its own.

        Args:
            value: of any kind; one of another kind is not looked into.
            with_objects: whether to add the attributes of any other object, too.
            copied: as in ``tensor``.
        """
        if type(value) in weakref.ProxyTypes:  # which may be dead
            return
        if isinstance(value, Tensor):
            self.tensor(value, copied=copied)
        elif isinstance(value, nn.Module):
            if value not in self:
                self.module(value)
        elif isinstance(value, tuple):
            self._values(value, with_objects, copied)
        elif isinstance(value, _NOT_LOOKED_INTO) or not self._is_new(value):
            return
        elif isinstance(value, MutableMapping):
            self._parts.append(_SavedMapping(value))
            self._values(value.values(), with_objects, copied)
        elif isinstance(value, MutableSequence):
            self._parts.append(_SavedSequence(value))
            self._values(value, with_objects, copied)
        elif isinstance(value, MutableSet):
            self._parts.append(_SavedSet(value))
        elif isinstance(value, np.ndarray):
            self._parts.append(_SavedArray(value))
        elif isinstance(value, torch.optim.Optimizer):
            self.optimizer(value)
        elif is_stateful(value) or (with_objects and hasattr(value, "__dict__")):
            self.value(vars(value), with_objects=with_objects, copied=copied)

    def _values(self, values: Iterable[Any], with_objects: bool, copied: bool) -> None:
        for value in values:
            self.value(value, with_objects=with_objects, copied=copied)

    def _is_new(self, value: Any) -> bool:
        if value in self:
            return False
        self._seen[id(value)] = value
        return True

    def restore(self) -> None:
        """Put everything back, past failures.

        Raises:
            BaseException: the first failure, with the others as its notes; everything else is restored then.
        """
        run_all(part.restore for part in self._parts)
