"""Parts of a snapshot: tensors, gradients, module slots, containers, attributes, arrays and other Python state.

Each part holds a shallow copy of the state of one object, and writes the copy back in place. Restoring is bit-exact.
"""

from __future__ import annotations

import array
import collections
import ctypes
import io
import mmap
import types
from collections.abc import Callable, Iterator, Mapping, MutableMapping, MutableSequence
from functools import partial
from itertools import chain
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from flatout.core.reachable import attributes_of, cell_contents, is_users, module_of, named_by
from flatout.core.step_hooks import is_hook_table, set_users_hooks, users_hooks

_BUFFERS = (bytearray, array.array, ctypes._SimpleCData.__mro__[1])
_UNSET = object()


class Saved:
    """Part of a snapshot: a value, with the functions that read and write it.

    Args:
        read: returns the present value, as an object that later changes leave alone.
        write: sets the value.
        is_same: compares two values. ``restore`` then writes only a value that has changed.
        what: the value in messages, such as "the elements of a list". Empty if a change is no change of Python state.
    """

    def __init__(
        self,
        read: Callable[[], Any],
        write: Callable[..., object],
        is_same: Callable[[Any, Any], bool] | None = None,
        what: str = "",
    ) -> None:
        self.read, self.write, self.what = read, write, what
        self._is_same = is_same
        self.value = read()

    def changed(self) -> str:
        """Return what differs from the saved state, such as "attribute 'calls' of a Net"; empty if nothing does."""
        return self.what if self.what and self._has_changed() else ""

    def restore(self) -> None:
        """Write the saved value back."""
        if self._has_changed():
            self.write(self.value)

    def _has_changed(self) -> bool:
        return self._is_same is None or not self._is_same(self.read(), self.value)


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
        self._layout = layout_of(tensor)
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
        if self.bits is None or self._layout is None or layout_of(self.tensor) != self._layout:
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
        elif self._layout is not None and layout_of(self.tensor) != self._layout:
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


def layout_of(tensor: Tensor) -> tuple[Any, ...] | None:
    """Return storage, sizes, strides and dtype of a tensor, or None without a storage (sparse, wrapper, lazy)."""
    if is_lazy(tensor) or tensor.layout is not torch.strided:
        return None
    try:
        storage = tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None
    place = storage._cdata, storage.nbytes(), tensor.storage_offset()
    return *place, tensor.shape, tensor.stride(), tensor.dtype


class _SavedNames(Saved):
    """Named values: attributes of an object or a class, globals, or the content of a cell.

    Args:
        what: description of a name for messages, such as "attribute {!r} of a Net".
        read: returns the present values.
        set_name: sets a name.
        delete: removes a name.
    """

    def __init__(
        self,
        what: str,
        read: Callable[[], Mapping[str, Any]],
        set_name: Callable[[str, Any], object],
        delete: Callable[[str], object],
    ) -> None:
        super().__init__(lambda: dict(read()), set_name, what=what)
        self._delete = delete

    def _differing(self) -> Iterator[tuple[str, Any, Any]]:
        now, saved = self.read(), self.value
        if len(now) == len(saved) and all(map(is_, now.values(), saved.values())) and now.keys() == saved.keys():
            return
        for name in {**saved, **now}:
            old, new = saved.get(name, _UNSET), now.get(name, _UNSET)
            if old is not new:
                yield name, old, new

    def changed(self) -> str:
        for name, old, new in self._differing():
            # A step that keeps its latest tensor in an attribute is no concern: compiled code keeps it as well.
            if not (isinstance(old, Tensor) and isinstance(new, Tensor)):
                return self.what.format(name)
        return ""

    def restore(self) -> None:
        for name, old, _ in list(self._differing()):
            if old is _UNSET:
                self._delete(name)
            else:
                self.write(name, old)


def saved_gradient(tensor: Tensor, on: torch.device | None) -> Iterator[Saved | SavedTensor]:
    """Yield the parts for the gradient of a leaf, and for the leaf's ``requires_grad``."""
    if tensor.grad is not None:
        yield SavedTensor(tensor.grad, on)

    def write(value: tuple[Tensor | None, bool]) -> None:
        tensor.grad, requires_grad = value
        if tensor.requires_grad != requires_grad:  # an inference tensor rejects even the same value
            tensor.requires_grad = requires_grad

    yield Saved(lambda: (tensor.grad, tensor.requires_grad), write)


def saved_slots(module: nn.Module) -> Iterator[Saved]:
    """Yield the parts for the parameter and buffer objects of a module tree, and for its train/eval modes."""
    for part in module.modules():
        yield Saved(partial(getattr, part, "training"), partial(setattr, part, "training"))
        if not isinstance(part, torch.jit.ScriptModule):  # Python code cannot change its slots
            yield from (saved_elements(slots, dict) for slots in (part._parameters, part._buffers))


def saved_elements(container: Any, kind: Any = None, what: str = "") -> Saved:
    """Return the part for the elements of a mapping, a sequence or a set.

    Args:
        container: the container.
        kind: class whose methods are used. A subclass of a built-in class may override them. None means its own class.
        what: see ``Saved``.
    """
    kind = kind or type(container)
    if issubclass(kind, MutableMapping):
        return Saved(lambda: list(kind.items(container)), partial(_fill, kind, container), _has_same_items, what)
    return Saved(lambda: list(kind.__iter__(container)), partial(_fill, kind, container), _has_same_elements, what)


def _fill(kind: Any, container: Any, elements: list[Any]) -> None:
    kind.clear(container)
    if issubclass(kind, MutableMapping):
        kind.update(container, elements)
    elif issubclass(kind, MutableSequence):
        kind.extend(container, elements)
    else:
        for element in elements:
            kind.add(container, element)


def _has_same_elements(now: list[Any], saved: list[Any]) -> bool:
    return len(now) == len(saved) and all(map(is_, now, saved))


def _has_same_items(now: list[Any], saved: list[Any]) -> bool:
    return len(now) == len(saved) and all(map(is_, chain.from_iterable(now), chain.from_iterable(saved)))


def is_stateful(value: Any) -> bool:
    """Return True if an object has ``state_dict`` and ``load_state_dict``, as scalers and schedulers have.

    The result is False for loaders and datasets, because their position is not part of the saved state.
    """
    kind = type(value)
    has_state = callable(getattr(kind, "state_dict", None)) and callable(getattr(kind, "load_state_dict", None))
    return has_state and hasattr(value, "__dict__") and not any(hasattr(kind, m) for m in ("__iter__", "__getitem__"))


def has_position(file: Any) -> bool:
    """Return True if a file is closed, or has a position that can be restored. Compressed files and sockets do not."""
    inner = file
    try:
        while (below := getattr(inner, "buffer", None) or getattr(inner, "raw", None)) is not None:
            inner = below
        is_known = type(inner) in (io.FileIO, io.BytesIO, io.StringIO, mmap.mmap)
        return file.closed or (is_known and file.tell() >= 0)
    except (OSError, ValueError):  # of a pipe, or of a text file that is being iterated
        return False


def _saved_array(held: np.ndarray) -> Saved:
    def is_same(now: np.ndarray, saved: np.ndarray) -> bool:
        return now.shape == saved.shape and now.tobytes() == saved.tobytes()

    return Saved(lambda: held.copy(), partial(held.__setitem__, ...), is_same, _elements_of(held))


def _saved_buffer(held: Any) -> Saved:
    """Return the part for the elements of a bytearray, an ``array.array`` or a ctypes object."""

    def write(elements: bytes) -> None:
        if isinstance(held, bytearray):
            held[:] = elements
        elif isinstance(held, array.array):
            del held[:]
            held.frombytes(elements)
        else:
            memoryview(held).cast("B")[:] = elements

    return Saved(lambda: bytes(memoryview(held).cast("B")), write, bytes.__eq__, _elements_of(held))


def _saved_position(file: Any) -> Saved:
    """Return the part for the position in an open file or a memory map, which reading moves."""

    def read() -> int | None:
        try:
            return None if file.closed else file.tell()
        except OSError:  # of a text file that is being iterated
            return -1

    def write(position: int) -> None:
        if not file.closed:
            file.seek(position)

    return Saved(read, write, lambda now, saved: now in (None, saved), f"the position of a {type(file).__name__}")


_CONTAINERS = (collections.OrderedDict, dict, list, set, collections.deque)


def parts_of(node: Any, most_bytes: int) -> Iterator[Saved]:
    """Yield the parts of an object's own state, without the state of the objects that it refers to.

    Args:
        node: the object.
        most_bytes: size of an array above which its elements are not copied, because larger arrays are data.
    """
    kind = type(node)
    if isinstance(node, np.ndarray):
        if node.nbytes <= most_bytes and node.flags.writeable:
            yield _saved_array(node)
    elif isinstance(node, (io.IOBase, mmap.mmap)):
        if has_position(node) and not node.closed:
            yield _saved_position(node)
    elif isinstance(node, _BUFFERS):
        if memoryview(node).nbytes <= most_bytes:  # type: ignore[arg-type]
            yield _saved_buffer(node)
    elif isinstance(node, types.FunctionType):
        yield from _parts_of_function(node)
    elif isinstance(node, type):
        set_of_class, delete_of_class = _setter(node), _deleter(node)
        yield _SavedNames(
            f"attribute {{!r}} of the class {node.__name__}", lambda: _data_of(node), set_of_class, delete_of_class
        )
    elif isinstance(node, (torch.Tensor, torch.jit.ScriptModule, types.MethodType)):
        return
    else:
        container = next((each for each in _CONTAINERS if isinstance(node, each)), None)
        if is_hook_table(node):
            yield Saved(partial(users_hooks, node), partial(set_users_hooks, node), _has_same_items, _elements_of(node))
        elif container is not None:
            yield saved_elements(node, container, _elements_of(node))
        if isinstance(getattr(node, "__dict__", None), dict) or any("__slots__" in vars(each) for each in kind.__mro__):
            yield _SavedNames(
                f"attribute {{!r}} of a {kind.__name__}", lambda: _attributes(node), _setter(node), _deleter(node)
            )
        if isinstance(node, nn.modules.lazy.LazyModuleMixin):
            write = partial(setattr, node, "__class__")  # which the first forward changes
            yield Saved(lambda: type(node), write, is_, f"the class of a {kind.__name__}")
        if isinstance(node, nn.Module):
            for slots in (node._parameters, node._buffers, node._modules):
                yield saved_elements(slots, dict, _elements_of(slots))


def _elements_of(container: Any) -> str:
    return f"the elements of a {type(container).__name__}"


def _attributes(node: Any) -> Mapping[str, Any]:
    return attributes_of(node) if any("__slots__" in vars(kind) for kind in type(node).__mro__) else vars(node)


def _data_of(cls: type) -> dict[str, Any]:
    """Return the attributes of a class, without what Python and ``abc`` keep there."""
    return {name: value for name, value in vars(cls).items() if not name.startswith(("__", "_abc_"))}


def _setter(owner: Any) -> Callable[[str, Any], None]:
    if isinstance(owner, type):
        return lambda name, value: type.__setattr__(owner, name, value)

    def write(name: str, value: Any) -> None:
        attributes = getattr(owner, "__dict__", None)
        if isinstance(attributes, dict) and not isinstance(vars(type(owner)).get(name), types.MemberDescriptorType):
            attributes[name] = value  # without a `__setattr__` of the user's own
        else:
            object.__setattr__(owner, name, value)

    return write


def _deleter(owner: Any) -> Callable[[str], None]:
    if isinstance(owner, type):
        return lambda name: type.__delattr__(owner, name)

    def delete(name: str) -> None:
        attributes = getattr(owner, "__dict__", {})
        if name in attributes:
            del attributes[name]
        else:
            object.__delattr__(owner, name)

    return delete


def _parts_of_function(function: types.FunctionType) -> Iterator[Saved]:
    """Yield a function's closure, attributes, and the globals that its code may bind to other objects."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        yield _SavedNames(
            f"variable {{!r}} of the closure of {function.__name__}",
            lambda name=name, cell=cell: {name: cell_contents(cell)},  # type: ignore[misc]
            lambda _, value, cell=cell: setattr(cell, "cell_contents", value),  # type: ignore[misc]
            lambda _: None,
        )
    if vars(function):
        yield saved_elements(vars(function), dict, "the elements of a dict")
    if not is_users(module_of(function)):
        return
    for bindings, owner in named_by(function):
        names = tuple(bindings)
        yield _SavedNames(
            "global {!r}",
            lambda owner=owner, names=names: {name: owner[name] for name in names if name in owner},  # type: ignore[misc]
            owner.__setitem__,
            owner.__delitem__,
        )
