"""Copies of tensors, modules and containers that training changes in place. Restoring is bit-exact and in place."""

from __future__ import annotations

import types
import weakref
from collections.abc import Iterable, MutableMapping, MutableSequence, MutableSet
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from flatout.core.errors import run_all
from flatout.core.python_state import Part, parts_of


def owned(tensor: Tensor) -> Tensor:
    """Return a view in which each element in memory occurs once. Expanded dimensions shrink to size 1."""
    if tensor.layout is not torch.strided:
        return tensor  # writing to a view of a sparse gradient or moment would not change the tensor
    view = tensor.detach()
    for dim, (size, stride) in enumerate(zip(view.shape, view.stride(), strict=True)):
        if stride == 0 and size > 1:
            view = view.narrow(dim, 0, 1)
    return view


def nbytes_of(tensor: Tensor) -> int:
    """Return the bytes of a tensor's elements. For a sparse or nested tensor, only its own storage counts, if any."""
    try:
        return tensor.nbytes
    except (NotImplementedError, RuntimeError):
        return 0


class SavedTensor:
    """Tensor with its memory and a copy of its bits.

    Args:
        tensor: any tensor. An uninitialized tensor has no bits.
        on: the device for the copy. None means the tensor's device.
        copied: True to copy the bits now. Otherwise ``copy_bits`` copies them later, before a write.
        compared: True to restore the bits only if they have changed.

    Attributes:
        tensor: the tensor itself.
        bits: a copy of the elements, or None until they are copied.
    """

    def __init__(
        self, tensor: Tensor, on: torch.device | None = None, *, copied: bool = True, compared: bool = False
    ) -> None:
        self.tensor = tensor
        self._compared = compared
        self._on = on
        self._kind = type(tensor)
        self._place = tensor.data  # shares the memory, and keeps its own sizes and strides
        self._layout = _layout(tensor)
        self.bits: Tensor | None = None
        self._version = None if self._layout is None or tensor.is_inference() else tensor._version
        if copied:
            self.copy_bits()

    def copy_bits(self) -> None:
        """Copy the tensor's bits, unless they are copied already."""
        if self.bits is None and not is_lazy(self.tensor):
            bits = owned(self.tensor).detach()
            self.bits = bits.clone() if self._on is None else bits.to(self._on, copy=True)

    def has_changed(self) -> bool:
        """Return True if ``restore`` would change the tensor, or if the tensor cannot be compared."""
        if self.bits is None or self._layout is None or _layout(self.tensor) != self._layout:
            return True
        return not torch.equal(owned(self.tensor), self.bits)

    def restore(self) -> None:
        """Restore memory, sizes and bits.

        Raises:
            RuntimeError: the tensor was written to before its bits were copied.
        """
        if type(self.tensor) is not self._kind:  # a lazy parameter has been initialized
            self.tensor.data = self._place
            self.tensor.__class__ = self._kind
        elif self._layout is not None and _layout(self.tensor) != self._layout:
            storage, size = self._place.untyped_storage(), self._layout[1]
            if storage.nbytes() < size:  # do not shrink, because newer views may use memory beyond the old size
                storage.resize_(size)
            self.tensor.data = self._place
        if self.bits is not None:
            if not self._compared or self._on is not None or self.has_changed():
                with torch.no_grad(), torch.inference_mode(self.tensor.is_inference()):
                    owned(self.tensor).copy_(self.bits)
        elif self._version is not None and self.tensor._version != self._version:
            raise RuntimeError(
                f"compute_loss must write to tensors outside the model in its first call, or not at all, got a later "
                f"write to a tensor of shape {tuple(self.tensor.shape)}. Keep your own loop: "
                "`model, loader = flatout.optimize(model, loader)`"
            )

    def restore_version(self) -> None:
        """Set the version counter back, so that autograd accepts a tensor whose bits are restored."""
        if self._version is not None:
            torch._C._autograd._unsafe_set_version_counter((self.tensor,), (self._version,))


def _layout(tensor: Tensor) -> tuple[Any, ...] | None:
    """Return storage, sizes, strides and dtype of a tensor, or None without a storage (sparse, wrapper, lazy)."""
    if is_lazy(tensor) or tensor.layout is not torch.strided:
        return None
    try:
        storage = tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None
    place = storage._cdata, storage.nbytes(), tensor.storage_offset()
    return *place, tensor.shape, tensor.stride(), tensor.dtype


class SavedGradient:
    """Gradient of a leaf with its bits, and the leaf's ``requires_grad``."""

    def __init__(self, tensor: Tensor, on: torch.device | None) -> None:
        self._tensor = tensor
        self._requires_grad = tensor.requires_grad
        self._grad = None if tensor.grad is None else SavedTensor(tensor.grad, on)

    def restore(self) -> None:
        """Restore the gradient and ``requires_grad``."""
        if self._grad is not None:
            self._grad.restore()
        self._tensor.grad = None if self._grad is None else self._grad.tensor
        if self._tensor.requires_grad != self._requires_grad:  # an inference tensor rejects even the same value
            self._tensor.requires_grad = self._requires_grad


class ModuleSlots:
    """Parameter and buffer objects of a module tree, and its train/eval modes. Bits are not copied."""

    def __init__(self, module: nn.Module) -> None:
        self._slots = [(m, m.training, dict(m._parameters), dict(m._buffers)) for m in module.modules()]

    def restore(self) -> None:
        """Restore the objects and the modes."""
        for module, training, parameters, buffers in self._slots:
            module.training = training
            if not isinstance(module, torch.jit.ScriptModule):  # Python code cannot change its slots
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


_NOT_LOOKED_INTO = (str, bytes, int, float, complex, type, types.FunctionType, types.MethodType, types.ModuleType)


def is_stateful(value: Any) -> bool:
    """Return True if an object has ``state_dict`` and ``load_state_dict``, as scalers and schedulers have.

    The result is False for loaders and datasets, because their position is not part of the saved state.
    """
    kind = type(value)
    has_state = callable(getattr(kind, "state_dict", None)) and callable(getattr(kind, "load_state_dict", None))
    return has_state and hasattr(value, "__dict__") and not any(hasattr(kind, m) for m in ("__iter__", "__getitem__"))


class Saved:
    """Collection of saved objects. An object that is added twice is saved once.

    Args:
        on: the device for copies of tensors. None means the device of each tensor.
    """

    def __init__(self, on: torch.device | None = None) -> None:
        self._on = on
        self._parts: list[Any] = []
        self._seen: dict[int, Any] = {}  # by id. The reference prevents reuse of the id
        self._copied: set[Any] = set()  # storages
        self._uncopied: dict[int, list[SavedTensor]] = {}  # by storage

    def __contains__(self, value: Any) -> bool:
        return id(value) in self._seen

    def module(self, module: nn.Module) -> None:
        """Add a module's parameters, buffers, gradients and modes, and the identity of its parameters and buffers."""
        for tensor in (*module.parameters(), *module.buffers()):
            self.tensor(tensor)
        self.slots(module)

    def slots(self, module: nn.Module) -> None:
        """Add the modes of a module and the identity of its parameters and buffers, but not their bits."""
        for part in module.modules():
            self._is_new(part)
        self._parts.append(ModuleSlots(module))

    def tensor(self, tensor: Tensor, *, copied: bool = True, compared: bool = False) -> None:
        """Add a tensor and its gradient.

        Args:
            tensor: any tensor.
            copied: False to let ``before_write`` copy the bits later.
            compared: True to restore the bits only if they have changed. A write would change the version counter.
        """
        if not self._is_new(tensor):
            return
        layout = _layout(tensor)
        storage: Any = None if layout is None else layout[0]
        copied = copied or storage is None or storage in self._copied  # a copied tensor shares this memory
        saved = SavedTensor(tensor, self._on, copied=copied, compared=compared)
        self._parts.append(saved)
        if copied:
            self._copied.add(storage)
        else:
            self._uncopied.setdefault(storage, []).append(saved)
        if tensor.is_leaf:
            self._parts.append(SavedGradient(tensor, self._on))

    def gradient(self, tensor: Tensor) -> None:
        """Add the gradient of a leaf, but not the leaf's bits."""
        if self._is_new(tensor):
            self._parts.append(SavedGradient(tensor, self._on))

    def restore_versions(self) -> None:
        """Set the version counters of all tensors back. Call this after ``restore``."""
        for part in self._parts:
            if isinstance(part, SavedTensor):
                part.restore_version()

    @property
    def has_uncopied(self) -> bool:
        """True while there are tensors whose bits are not copied."""
        return bool(self._uncopied)

    def before_write(self, tensor: Tensor) -> None:
        """Copy the bits of all added tensors that share memory with ``tensor``, before a write to it."""
        layout = _layout(tensor)
        for saved in self._uncopied.pop(layout[0], ()) if layout is not None else ():
            saved.copy_bits()

    def optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Add parameters, state and every attribute, including an optimizer that this one wraps."""
        self._is_new(optimizer)
        self.value(optimizer.state, with_objects=True)
        self.value(vars(optimizer))

    def value(self, value: Any, *, with_objects: bool = False, copied: bool = True) -> None:
        """Add a tensor, an array, a module, an optimizer, an object with a ``state_dict``, or a container of these.

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
            self._parts += parts_of(value, value.nbytes)
        elif isinstance(value, torch.optim.Optimizer):
            self.optimizer(value)
        elif is_stateful(value) or (with_objects and hasattr(value, "__dict__")):
            self.value(vars(value), with_objects=with_objects, copied=copied)

    def python(self, node: Any, most_bytes: int) -> None:
        """Add an object's own Python state, but not the state of objects that it refers to."""
        self._parts += parts_of(node, most_bytes)

    def _values(self, values: Iterable[Any], with_objects: bool, copied: bool) -> None:
        for value in values:
            self.value(value, with_objects=with_objects, copied=copied)

    def _is_new(self, value: Any) -> bool:
        if value in self:
            return False
        self._seen[id(value)] = value
        return True

    def changed(self) -> str:
        """Return the first change of Python state, such as "attribute 'calls' of a Net"; empty without a change."""
        return next(filter(None, (part.changed() for part in self._parts if isinstance(part, Part))), "")

    def restore(self) -> None:
        """Restore all objects, even after a failure.

        Raises:
            BaseException: the first failure, with later ones as its notes. All other objects are restored.
        """
        run_all(part.restore for part in self._parts)
