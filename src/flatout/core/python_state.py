"""Python state of objects: attributes, elements of containers, closures, globals, class attributes and buffers.

Each part holds one object and a shallow copy of its state. ``changed`` compares by identity, and ``restore`` writes the
copy back in place. Tensors are not part of it, see ``core/saved.py``.
"""

from __future__ import annotations

import array
import collections
import copy
import ctypes
import io
import mmap
import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import nn

from flatout.core.reachable import attributes_of, cell_contents, is_users, module_of, named_by

_BUFFERS = (bytearray, array.array, ctypes._SimpleCData.__mro__[1])
_UNSET = object()


class Part(ABC):
    """State of one object."""

    @abstractmethod
    def changed(self) -> str:
        """Return what differs from the saved state, such as "attribute 'calls' of a Net"; empty if nothing does."""

    @abstractmethod
    def restore(self) -> None:
        """Write the saved state back."""


class _Names(Part):
    """Named values: attributes of an object or a class, globals, or the content of a cell.

    Args:
        what: description of a name for messages, such as "attribute {!r} of a Net".
        read: returns the present values.
        write: sets a name.
        delete: removes a name.
    """

    def __init__(
        self,
        what: str,
        read: Callable[[], Mapping[str, Any]],
        write: Callable[[str, Any], object],
        delete: Callable[[str], object],
    ) -> None:
        self._what, self._read, self._write, self._delete = what, read, write, delete
        self._saved = dict(read())

    def _differing(self) -> Iterator[tuple[str, Any, Any]]:
        now, saved = self._read(), self._saved
        if len(now) == len(saved) and all(map(is_, now.values(), saved.values())) and now.keys() == saved.keys():
            return
        for name in {**saved, **now}:
            old, new = saved.get(name, _UNSET), now.get(name, _UNSET)
            if old is not new:
                yield name, old, new

    def changed(self) -> str:
        for name, old, new in self._differing():
            # A step that keeps its latest tensor in an attribute is no concern: compiled code keeps it as well.
            if not (isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor)):
                return self._what.format(name)
        return ""

    def restore(self) -> None:
        for name, old, _ in list(self._differing()):
            if old is _UNSET:
                self._delete(name)
            else:
                self._write(name, old)


class _Elements(Part):
    """Elements of a dict, list, set or deque.

    Args:
        container: the container.
        kind: its built-in class, whose methods are used, because a subclass may override them.
    """

    def __init__(self, container: Any, kind: Any) -> None:
        self._container, self._kind = container, kind
        self._saved: list[Any] = self._now()

    def _now(self) -> list[Any]:
        kind = self._kind
        return list(kind.items(self._container) if issubclass(kind, dict) else kind.__iter__(self._container))

    def changed(self) -> str:
        now, saved = self._now(), self._saved
        if issubclass(self._kind, dict):
            now, saved = [each for item in now for each in item], [each for item in saved for each in item]
        is_same = len(now) == len(saved) and all(map(is_, now, saved))
        return "" if is_same else f"the elements of a {type(self._container).__name__}"

    def restore(self) -> None:
        if self.changed():
            kind = self._kind
            fill = kind.extend if kind in (list, collections.deque) else kind.update
            kind.clear(self._container)
            fill(self._container, self._saved)


class _Array(Part):
    """Elements of a NumPy array."""

    def __init__(self, held: np.ndarray) -> None:
        self._held, self._saved = held, copy.copy(held)

    def changed(self) -> str:
        held, saved = self._held, self._saved
        is_same = held.shape == saved.shape and held.tobytes() == saved.tobytes()
        return "" if is_same else f"the elements of a {type(held).__name__}"

    def restore(self) -> None:
        if self.changed():
            self._held[...] = self._saved


class _Buffer(Part):
    """Elements of a bytearray, an ``array.array`` or a ctypes object."""

    def __init__(self, held: Any) -> None:
        self._held = held
        self._saved = bytes(memoryview(held).cast("B"))

    def changed(self) -> str:
        is_same = bytes(memoryview(self._held).cast("B")) == self._saved
        return "" if is_same else f"the elements of a {type(self._held).__name__}"

    def restore(self) -> None:
        if not self.changed():
            return
        if isinstance(self._held, bytearray):
            self._held[:] = self._saved
        elif isinstance(self._held, array.array):
            del self._held[:]
            self._held.frombytes(self._saved)
        else:
            memoryview(self._held).cast("B")[:] = self._saved


class _Position(Part):
    """Position in an open file or a memory map, which reading moves."""

    def __init__(self, file: Any) -> None:
        self._file, self._saved = file, file.tell()

    def changed(self) -> str:
        try:
            is_same = self._file.closed or self._file.tell() == self._saved
        except OSError:  # of a text file that is being iterated
            is_same = False
        return "" if is_same else f"the position of a {type(self._file).__name__}"

    def restore(self) -> None:
        if self.changed():
            self._file.seek(self._saved)


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


class _LazyClass(Part):
    """Class of a lazy module, which changes in its first forward."""

    def __init__(self, module: nn.Module) -> None:
        self._module, self._saved = module, type(module)

    def changed(self) -> str:
        return "" if type(self._module) is self._saved else f"the class of a {self._saved.__name__}"

    def restore(self) -> None:
        if type(self._module) is not self._saved:
            self._module.__class__ = self._saved


_CONTAINERS: Sequence[type] = (collections.OrderedDict, dict, list, set, collections.deque)


def parts_of(node: Any, most_bytes: int) -> Iterator[Part]:
    """Yield the parts of an object's own state, without the state of the objects that it refers to.

    Args:
        node: the object.
        most_bytes: size of an array above which its elements are not copied, because larger arrays are data.
    """
    kind = type(node)
    if isinstance(node, np.ndarray):
        if node.nbytes <= most_bytes and node.flags.writeable:
            yield _Array(node)
    elif isinstance(node, (io.IOBase, mmap.mmap)):
        if has_position(node) and not node.closed:
            yield _Position(node)
    elif isinstance(node, _BUFFERS):
        if memoryview(node).nbytes <= most_bytes:  # type: ignore[arg-type]
            yield _Buffer(node)
    elif isinstance(node, types.FunctionType):
        yield from _parts_of_function(node)
    elif isinstance(node, type):
        set_of_class, delete_of_class = _setter(node), _deleter(node)
        yield _Names(
            f"attribute {{!r}} of the class {node.__name__}", lambda: _data_of(node), set_of_class, delete_of_class
        )
    elif isinstance(node, (torch.Tensor, torch.jit.ScriptModule, types.MethodType)):
        return
    else:
        container = next((each for each in _CONTAINERS if isinstance(node, each)), None)
        if container is not None:
            yield _Elements(node, container)
        if isinstance(getattr(node, "__dict__", None), dict) or any("__slots__" in vars(each) for each in kind.__mro__):
            yield _Names(
                f"attribute {{!r}} of a {kind.__name__}", lambda: _attributes(node), _setter(node), _deleter(node)
            )
        if isinstance(node, nn.modules.lazy.LazyModuleMixin):
            yield _LazyClass(node)  # type: ignore[arg-type]
        if isinstance(node, nn.Module):
            for slots in (node._parameters, node._buffers, node._modules):
                yield _Elements(slots, dict)


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


def _parts_of_function(function: types.FunctionType) -> Iterator[Part]:
    """Yield a function's closure, attributes, and the globals that its code may bind to other objects."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        yield _Names(
            f"variable {{!r}} of the closure of {function.__name__}",
            lambda name=name, cell=cell: {name: cell_contents(cell)},  # type: ignore[misc]
            lambda _, value, cell=cell: setattr(cell, "cell_contents", value),  # type: ignore[misc]
            lambda _: None,
        )
    if vars(function):
        yield _Elements(vars(function), dict)
    if not is_users(module_of(function)):
        return
    for bindings, owner in named_by(function):
        names = tuple(bindings)
        yield _Names(
            "global {!r}",
            lambda owner=owner, names=names: {name: owner[name] for name in names if name in owner},  # type: ignore[misc]
            owner.__setitem__,
            owner.__delitem__,
        )
