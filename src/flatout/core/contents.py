"""Contents of a dataset: all values that Python can reach from it and that may change.

The search follows attributes, slots, elements of containers, closures, defaults, class attributes, and the globals
that the code of the user's classes and functions names. Code of libraries is not followed. Locks, loggers and random
generators are left out.
"""

from __future__ import annotations

import collections
import ctypes
import datetime
import decimal
import enum
import fractions
import functools
import io
import itertools
import logging
import operator
import os
import pathlib
import random
import re
import stat
import sys
import threading
import types
import uuid
import weakref
import zlib
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from mmap import mmap
from multiprocessing.synchronize import SemLock
from typing import Any

import numpy as np
import torch

from flatout.core.reachable import is_users, names_in

_MOST_NODES = 200_000  # objects that may change; a dataset with more of them is opaque
_NEAR = 6  # containers, tensors, globals and buffers that are compared before each batch
_SHORT = 32  # elements, or bytes, up to which one of them is compared as a whole
_SMALL = 1 << 14  # bytes up to which CRC-32 is faster than sums
_COLUMNS = 4096  # 64-bit words per row of a hashed buffer

_FIXED = (
    *(str, bytes, int, float, complex, type(None), type(...), type(NotImplemented), range, slice, type),
    *(types.ModuleType, types.BuiltinFunctionType, types.CodeType, types.MethodDescriptorType),
    *(types.WrapperDescriptorType, types.MethodWrapperType, types.GetSetDescriptorType, types.MemberDescriptorType),
    *(np.generic, np.dtype, np.ufunc, torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
    *(datetime.date, datetime.time, datetime.timedelta, datetime.tzinfo, decimal.Decimal, fractions.Fraction),
    *(uuid.UUID, pathlib.PurePath, enum.Enum, re.Pattern, property, classmethod, staticmethod),
    *(functools.cached_property, operator.itemgetter, operator.attrgetter, operator.methodcaller),
)
"""Types whose values never change."""
_LEFT_OUT = (
    *(logging.Logger, logging.LoggerAdapter, type(threading.Lock()), type(threading.RLock()), SemLock),
    *(torch.Generator, np.random.Generator, np.random.RandomState, np.random.BitGenerator, random.Random),
)
"""Types whose state does not belong to a sample."""
_LOCKS = (type(threading.Lock()), type(threading.RLock()), SemLock)
_FIXED_MODULES = ("pyarrow.", "pandas.core.indexes.")
_COPIED: dict[type, Callable[[Any], Any]] = {
    dict: dict,
    collections.OrderedDict: dict,
    collections.defaultdict: dict,
    collections.Counter: dict,
    list: list,
    set: set,
    collections.deque: collections.deque,
}
"""Exact types of containers, and functions that return a shallow copy that equals the container."""
_BUFFERS = (bytearray, memoryview, array, mmap, ctypes._SimpleCData, ctypes.Array, ctypes.Structure, ctypes.Union)
_ELEMENTS = (list, tuple, set, frozenset, collections.deque)
_KNOWN = (
    *(*_ELEMENTS, *_BUFFERS, dict, np.ndarray, weakref.ref, io.BytesIO, io.StringIO, types.MappingProxyType),
    *(types.FunctionType, types.MethodType, types.CellType, functools.partial),
)
"""Types that the search looks into, besides objects with attributes."""
_OPAQUE_MODULES = frozenset(("h5py", "lmdb", "sqlite3", "socket", "ssl", "subprocess", "asyncio", "_thread"))
_METHODS = ("__getitem__", "__getitems__", "__len__", "__call__", "__iter__", "__getattr__", "forward")
_MISSING = object()


class Contents:
    """State of all that Python can reach from some objects, to be compared later.

    Objects are compared by identity. Containers of any length are compared with shallow copies. Tensors are compared by
    version, address and hash, arrays and other buffers by hash. Open files are compared by size and time of
    modification.

    Three changes are not seen: an element that is replaced by an equal one, a CUDA tensor that is written through
    ``.data``, and changes of what ``opaque`` names.

    Args:
        roots: the objects, such as a dataset and its ``collate_fn``.
        without: objects of which only the identity is compared.

    Attributes:
        opaque: the first reachable object whose changes cannot be seen, as a clause. Empty without such an object.
        nbytes: number of bytes that ``changed`` hashes.
    """

    def __init__(self, *roots: Any, without: Sequence[Any] = ()) -> None:
        self.opaque = ""
        self._live: list[Any] = []
        self._saved: list[Any] = []
        self._labels: list[str] = []
        self._owners: list[Any] = []
        self._attributes: list[dict[str, Any]] = []
        self._lookups: list[tuple[Mapping[str, Any], str]] = []
        self._found: list[Any] = []
        self._found_labels: list[str] = []
        self._readings: list[tuple[str, Callable[[], list[Any]], list[Any]]] = []
        self._tensors: list[torch.Tensor] = []
        self._buffers: list[Any] = []
        self._buffer_labels: list[str] = []
        for node, label in nodes_in(*roots, without=without, complain=self._complain):
            self._add(node, label)
        self.nbytes = sum(map(_size, self._buffers))
        self._hashes = list(map(_hash, self._buffers))
        self._states = list(map(_tensor_state, self._tensors))
        self._choose_near()

    def _complain(self, why: str) -> None:
        self.opaque = self.opaque or why

    def _add(self, node: Any, label: str) -> None:
        if (copied := _COPIED.get(type(node))) is not None:
            self._live.append(node)
            self._saved.append(copied(node))
            self._labels.append(label)
        elif (buffer := _buffer_of(node)) is not None:
            self._buffers.append(buffer)
            self._buffer_labels.append(label)
        elif (read := _reader_of(node)) is not None:
            self._readings.append((label, read, read()))
        if isinstance(node, torch.Tensor):
            self._tensors.append(node)
        elif (attributes := _attributes_of(node)) is not None:
            self._owners.append(node)
            self._attributes.append(attributes)
        for mapping, name, text in _lookups_of(node):
            self._lookups.append((mapping, name))
            self._found.append(mapping[name])
            self._found_labels.append(text)

    def _choose_near(self) -> None:
        """Choose the values that are compared before each batch, those next to the roots."""
        short = [i for i, saved in enumerate(self._saved) if len(saved) <= _SHORT][:_NEAR]
        long = [i for i, saved in enumerate(self._saved) if len(saved) > _SHORT][:_NEAR]
        self._near, self._near_saved = [self._live[i] for i in short], [self._saved[i] for i in short]
        self._long, self._lengths = [self._live[i] for i in long], [len(self._saved[i]) for i in long]
        self._near_tensors = [tensor for tensor in self._tensors[:_NEAR] if not tensor.is_inference()]
        self._versions = [tensor._version for tensor in self._near_tensors]
        data = [i for i, value in enumerate(self._found) if not callable(value) and not _is_module(value)][:_NEAR]
        self._near_lookups, self._near_found = [self._lookups[i] for i in data], [self._found[i] for i in data]
        raw = [i for i, each in enumerate(self._buffers) if not isinstance(each, np.ndarray) and _size(each) <= _SHORT]
        self._near_buffers, self._crcs = [self._buffers[i] for i in raw[:_NEAR]], [self._hashes[i] for i in raw[:_NEAR]]

    def changed_nearby(self) -> str:
        """Return a difference that takes about 2 microseconds to see, as ``changed`` does.

        Compared are attributes, short containers, globals, shared numbers and versions of tensors next to the roots,
        and lengths of long containers.
        """
        try:
            if (
                self._near == self._near_saved
                and (not self._long or list(map(len, self._long)) == self._lengths)
                and (not self._versions or [tensor._version for tensor in self._near_tensors] == self._versions)
                and (not self._crcs or list(map(zlib.crc32, self._near_buffers)) == self._crcs)
                and (
                    not self._near_found
                    or [mapping.get(name) for mapping, name in self._near_lookups] == self._near_found
                )
            ):
                return ""
        except Exception:  # of an element that cannot be compared with the one in its place
            pass
        return self.changed() or "an attribute has changed"

    def changed(self) -> str:
        """Return the first difference between now and the capture, such as "attribute 'epoch' of a Graded has changed".

        Empty if there is no difference.
        """
        return next((text for text, _, _ in self.differences()), "")

    def ignore_changes(self) -> None:
        """Leave out of later comparisons what differs now, such as counters and caches that reading has changed."""
        for place, (live, saved) in enumerate(zip(self._live, self._saved, strict=True)):
            if not _are_equal(live, saved):
                self._saved[place] = _Without(live, saved)
        kept = [_are_equal(_tried(read), saved) for _, read, saved in self._readings]
        self._readings = list(itertools.compress(self._readings, kept))
        kept = [_hash(buffer) == before for buffer, before in zip(self._buffers, self._hashes, strict=True)]
        self._buffers, self._hashes, self._buffer_labels = (
            list(itertools.compress(each, kept)) for each in (self._buffers, self._hashes, self._buffer_labels)
        )
        kept = [_tensor_state(tensor) == before for tensor, before in zip(self._tensors, self._states, strict=True)]
        self._tensors = list(itertools.compress(self._tensors, kept))
        self._states = list(itertools.compress(self._states, kept))
        found = [mapping.get(name, _MISSING) for mapping, name in self._lookups]
        kept = [_are_equal([now], [before]) for now, before in zip(found, self._found, strict=True)]
        self._lookups, self._found, self._found_labels = (
            list(itertools.compress(each, kept)) for each in (self._lookups, self._found, self._found_labels)
        )
        self._choose_near()

    def differences(self) -> Iterator[tuple[str, Any, Any]]:
        """Yield a clause, the old value and the new value for each difference between now and the capture."""
        if not _are_equal(self._live, self._saved):
            for live, saved, label in zip(self._live, self._saved, self._labels, strict=True):
                yield from _differences(label, live, saved)
        if not all(map(operator.is_, map(_attributes_of, self._owners), self._attributes)):
            yield "the attributes of an object have been replaced", None, None
        found = [mapping.get(name, _MISSING) for mapping, name in self._lookups]
        if not _are_equal(found, self._found):
            for label, before, now in zip(self._found_labels, self._found, found, strict=True):
                if not _are_equal([now], [before]):
                    yield f"{label} has changed", before, now
        for label, read, saved in self._readings:
            if not _are_equal(now := _tried(read), saved):
                yield f"{label} has changed", saved, now
        hashes = list(map(_hash, self._buffers))
        if hashes != self._hashes:
            for label, before, now, buffer in zip(
                self._buffer_labels, self._hashes, hashes, self._buffers, strict=True
            ):
                if before != now:
                    is_shared = not isinstance(buffer, np.ndarray)  # a number that processes share, or an array of such
                    yield f"{label} was written in place", *((before, now) if is_shared else (None, None))
        if list(map(_tensor_state, self._tensors)) != self._states:
            yield "a tensor was written in place", None, None


class _Without:
    """Saved copy of a container that equals the container in any state of the elements that have changed."""

    def __init__(self, live: Any, saved: Any) -> None:
        self._own = None
        if isinstance(saved, dict):
            names = [n for n in {**saved, **live} if not _are_equal([live.get(n, _MISSING)], [saved.get(n, _MISSING)])]
            self._own = {name: value for name, value in saved.items() if name not in names}
            self._names = frozenset(names)

    def __len__(self) -> int:
        return 0

    def __eq__(self, live: object) -> bool:
        if self._own is None:
            return True
        assert isinstance(live, dict)
        return {name: value for name, value in live.items() if name not in self._names} == self._own

    __hash__ = None  # type: ignore[assignment]

    def differences(self, label: str, live: Any) -> Iterator[tuple[str, Any, Any]]:
        own = {name: value for name, value in live.items() if name not in self._names}
        yield from _differences(label, own, self._own)


def nodes_in(
    *roots: Any,
    without: Sequence[Any] = (),
    with_locks: bool = False,
    complain: Callable[[str], object] = lambda why: None,
) -> Iterator[tuple[Any, str]]:
    """Yield the objects that may change and are reachable from ``roots``, nearest first, each with a description.

    Args:
        roots: the first objects.
        without: objects that are left out.
        with_locks: include locks, which are left out otherwise.
        complain: called with a clause for each object whose changes cannot be seen.
    """
    level: list[tuple[Any, str]] = [(root, f"a {type(root).__name__}") for root in roots]
    kinds: set[type] = {_Code}
    seen: dict[int, Any] = {
        id(each): each for each in without
    }  # holds the objects, because a new one may get the identity of a dead one
    while level:
        below: list[tuple[Any, str]] = []
        for node, label in level:
            if id(node) in seen or not (_may_change(node) or (with_locks and isinstance(node, _LOCKS))):
                continue
            seen[id(node)] = node
            if len(seen) > _MOST_NODES:
                complain(f"it has more than {_MOST_NODES:,} objects")
                return
            if why := _why_opaque(node):
                complain(f"{label} is {why}, whose changes cannot be seen")
            yield node, label
            if not why:
                below += [e for e in _children(node, label) if _may_change(e[0]) or isinstance(e[0], _LOCKS)]
                if (kind := type(node)) not in kinds and is_users(kind.__module__):
                    kinds.add(kind)
                    below.append((_Code.of(kind), label))
        level = below


def _may_change(node: Any) -> bool:
    kind: Any = type(node)
    if _is_fixed(kind) or (isinstance(node, types.FunctionType) and not is_users(node.__module__)):
        return False
    return not (isinstance(node, (tuple, frozenset)) and _are_plain(node))


@functools.lru_cache(1024)  # a list may have a million elements
def _is_fixed(kind: Any) -> bool:
    return issubclass(kind, (*_FIXED, *_LEFT_OUT)) or kind.__module__.startswith(_FIXED_MODULES)


def _why_opaque(node: Any) -> str:
    """Return the kind of an object whose changes cannot be seen; empty if they can."""
    kind = type(node)
    name = f"a {kind.__qualname__}" if kind.__module__ == "builtins" else f"a {kind.__module__}.{kind.__qualname__}"
    if isinstance(node, io.IOBase) and not isinstance(node, (io.BytesIO, io.StringIO)):
        return "" if _is_standard(node) or _file_state(node) is not None else name
    if isinstance(node, torch.Tensor):
        return "" if node.layout is torch.strided and not node.is_quantized else f"a tensor of layout {node.layout}"
    if kind.__module__.partition(".")[0] in _OPAQUE_MODULES or kind.__module__ == "multiprocessing.managers":
        return name
    is_known = isinstance(node, (_Code, *_KNOWN)) or _attributes_of(node) is not None or _slots(kind) is not None
    return "" if is_known and not isinstance(node, threading.Thread) else name


def _children(node: Any, label: str) -> list[tuple[Any, str]]:
    """Return the objects that an object holds, each with its description."""
    kind = type(node)
    if isinstance(node, torch.Tensor) or _buffer_of(node) is not None:
        return []
    if isinstance(node, _Code):
        held = [(vars(owner)[name], text) for owner, name, text in node.members]
        return held + [(function, text) for member, text in held for function in _functions_of(member)]
    found: list[tuple[Any, str]] = []
    if isinstance(node, (dict, types.MappingProxyType)):
        found += [] if _are_plain(node.values()) else [(value, label) for value in node.values()]
    elif isinstance(node, _ELEMENTS):
        found += [] if _are_plain(node) else [(each, label) for each in node]
    elif (read := _reader_of(node)) is not None:
        found += [(value, label) for value in read()]
    found += [(mapping[name], text) for mapping, name, text in _lookups_of(node)]
    if (attributes := _attributes_of(node)) is not None:
        is_own = is_users(kind.__module__) or label == f"a {kind.__name__}"
        place = f"of a {kind.__name__}"
        found.append((attributes, f"a {kind.__name__}" if is_own else label))
        found += [(value, f"attribute {name!r} {place}" if is_own else label) for name, value in attributes.items()]
    return found


def _attributes_of(node: Any) -> dict[str, Any] | None:
    """Return the ``__dict__`` of an object; None if it has none, or if its values are not its attributes."""
    if isinstance(node, (types.FunctionType, types.MethodType, functools.partial, _Code)) or _is_frame(node):
        return None
    attributes = getattr(node, "__dict__", None)
    return attributes if type(attributes) is dict else None


def _reader_of(node: Any) -> Callable[[], list[Any]] | None:
    """Return a function that reads what an object holds besides attributes and globals; None if it holds no more."""
    if isinstance(node, types.FunctionType):
        return lambda: [node.__code__, node.__defaults__, node.__kwdefaults__, *(node.__closure__ or ())]
    if isinstance(node, types.MethodType):
        return lambda: [node.__self__, node.__func__]
    if isinstance(node, functools.partial):
        return lambda: [node.func, *node.args, *node.keywords.values()]
    if isinstance(node, types.CellType):
        return lambda: [_contents_of_cell(node)]
    if isinstance(node, weakref.ref):
        return lambda: [node()]
    if isinstance(node, (io.BytesIO, io.StringIO)):
        return lambda: [node.getvalue()]
    if isinstance(node, io.IOBase):
        return lambda: [_file_state(node)]
    if isinstance(node, np.ndarray):
        return lambda: node.ravel().tolist()  # of objects
    if _is_frame(node):
        return lambda: [*node._mgr.arrays, *node._mgr.axes]
    if isinstance(node, dict):
        return lambda: [*dict.keys(node), *dict.values(node)]
    for kind in (list, set, collections.deque):
        if isinstance(node, kind):
            return functools.partial(_elements, kind, node)
    if slots := _slots(type(node)):
        return lambda: [getattr(node, name, _MISSING) for name in slots]
    return None


def _elements(kind: Any, node: Any) -> list[Any]:
    return list(kind.__iter__(node))


# Code


@dataclass(frozen=True)
class _Code:
    """Members of a user's class that its methods for samples use: (class, name, description)."""

    members: tuple[tuple[type, str, str], ...]

    @classmethod
    def of(cls, kind: type) -> _Code:
        owners = [owner for owner in kind.__mro__ if is_users(owner.__module__)]
        names, new = set(_METHODS), list(_METHODS)
        while new:
            members = [vars(owner).get(name) for name in [new.pop()] for owner in owners]
            used = {
                name for member in members for function in _functions_of(member) for name in names_in(function.__code__)
            }
            new += used - names
            names |= used
        return cls(
            tuple(
                (owner, name, f"attribute {name!r} of class {owner.__name__}")
                for owner in owners
                for name in sorted(names & vars(owner).keys())
            )
        )


def _functions_of(member: Any) -> list[types.FunctionType]:
    """Return the functions of a member of a class: a method, a property, or a wrapper of one."""
    found = [member, *(getattr(member, name, None) for name in ("__func__", "fget", "func", "__wrapped__"))]
    return [function for function in found if isinstance(function, types.FunctionType)]


def _lookups_of(node: Any) -> list[tuple[Mapping[str, Any], str, str]]:
    """Return the names that code looks up: (mapping, name, description).

    These are globals, attributes of the user's modules and classes among the globals, and members of classes.
    """
    if isinstance(node, _Code):
        return [(vars(owner), name, text) for owner, name, text in node.members]
    if not isinstance(node, types.FunctionType):
        return []
    names, scope = sorted(set(names_in(node.__code__))), node.__globals__
    found: list[tuple[Mapping[str, Any], str, str]] = [(scope, n, f"global {n!r}") for n in names if n in scope]
    for owner in [scope[name] for name in names if name in scope]:
        module = owner.__name__ if _is_module(owner) else owner.__module__ if isinstance(owner, type) else ""
        if module and is_users(module):
            held = vars(owner)
            found += [(held, name, f"attribute {name!r} of {owner.__name__}") for name in names if name in held]
    return found


def named_values(kind: type, method: str) -> tuple[dict[str, Any], frozenset[str]]:
    """Return what a method of a class and the members that it uses can read.

    Returns:
        Values of class attributes, globals and closures by their descriptions, and all names in the code. No names if
        the method is not one of Python.
    """
    values: dict[str, Any] = {}
    used: set[str] = set()
    for owner, name, text in (
        _Code.of(kind).members if isinstance(getattr(kind, method, None), types.FunctionType) else ()
    ):
        values[text] = vars(owner)[name]
        for function in _functions_of(vars(owner)[name]):
            used.update(names_in(function.__code__))
            values |= {description: mapping[each] for mapping, each, description in _lookups_of(function)}
            cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
            values |= {f"{each!r} of a closure": _contents_of_cell(cell) for each, cell in cells}
    return values, frozenset(used)


def functions_of(kind: type) -> list[types.FunctionType]:
    """Return the methods of a user's class that make samples or indices, and the functions that these methods use."""
    return [f for owner, name, _ in _Code.of(kind).members for f in _functions_of(vars(owner)[name])]


def is_closed_module(module: str) -> bool:
    """Return True for modules whose objects hold handles of the process, such as databases."""
    return module.partition(".")[0] in _OPAQUE_MODULES - {"_thread"}


def _contents_of_cell(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not bound yet
        return _MISSING


def _is_module(value: Any) -> bool:
    return isinstance(value, types.ModuleType)


# Values


def _slots(kind: type) -> tuple[str, ...] | None:
    """Return the slots of a class and its bases; None if no class defines any."""
    found: list[str] | None = None
    for owner in kind.__mro__:
        slots = vars(owner).get("__slots__")
        if slots is not None:
            names = (slots,) if isinstance(slots, str) else tuple(slots)
            found = (found or []) + [_mangled(owner, n) for n in names if n not in ("__dict__", "__weakref__")]
    return None if found is None else tuple(found)


def _mangled(owner: type, name: str) -> str:
    return f"_{owner.__name__.lstrip('_')}{name}" if name.startswith("__") and not name.endswith("__") else name


def _is_frame(node: Any) -> bool:
    """Return True for a ``DataFrame`` or a ``Series`` of pandas, whose arrays are not attributes."""
    kind = type(node)
    return kind.__module__.startswith("pandas.core.") and hasattr(kind, "iloc") and hasattr(node, "_mgr")


def _are_plain(values: Any) -> bool:
    return all(issubclass(kind, (str, bytes, int, float, np.generic, type(None))) for kind in set(map(type, values)))


def _buffer_of(node: Any) -> Any:
    """Return an object with the bytes of ``node``; None if there is none."""
    if isinstance(node, torch.Tensor):
        return _array_of(node)
    is_buffer = isinstance(node, _BUFFERS) or (isinstance(node, np.ndarray) and not node.dtype.hasobject)
    return node if is_buffer else None


def _array_of(tensor: torch.Tensor) -> np.ndarray | None:
    """Return a view of a tensor's memory; None if NumPy cannot read the memory."""
    try:
        tensor = tensor.detach()
        return (tensor.view(_SAME_SIZE[tensor.dtype]) if tensor.dtype in _SAME_SIZE else tensor).numpy()
    except (TypeError, RuntimeError):
        return None


_SAME_SIZE = {torch.bfloat16: torch.int16, torch.float8_e4m3fn: torch.uint8, torch.float8_e5m2: torch.uint8}
"""Types that NumPy does not know, and types of the same size that NumPy knows."""


def _tensor_state(tensor: torch.Tensor) -> tuple[int, int]:
    try:
        return -1 if tensor.is_inference() else tensor._version, tensor.data_ptr()
    except RuntimeError:  # of a tensor without memory
        return 0, 0


def _is_standard(file: Any) -> bool:
    streams = (sys.stdin, sys.stdout, sys.stderr, sys.__stdin__, sys.__stdout__, sys.__stderr__)
    return any(file is stream for stream in streams)


def _file_state(file: Any) -> tuple[int, ...] | None:
    """Return identity, size and time of modification of an open file; None unless it is a regular file."""
    try:
        if file.closed:
            return ()
        found = os.fstat(file.fileno())
    except (OSError, ValueError, AttributeError):
        return None
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns) if stat.S_ISREG(found.st_mode) else None


def _size(buffer: Any) -> int:
    try:
        return buffer.nbytes if isinstance(buffer, np.ndarray) else memoryview(buffer).nbytes
    except (ValueError, TypeError):  # of a closed map
        return 0


def _hash(buffer: Any) -> int:
    """Return a hash of a buffer's bytes.

    A long buffer is hashed by the sums of its rows and columns, so that exchanged elements are seen. This takes about
    as long as reading the memory.
    """
    try:
        if isinstance(buffer, np.ndarray) and not buffer.flags.c_contiguous:
            buffer = np.ascontiguousarray(buffer)
        if _size(buffer) <= _SMALL:
            return zlib.crc32(buffer)
        data = buffer.reshape(-1).view(np.uint8) if isinstance(buffer, np.ndarray) else np.frombuffer(buffer, np.uint8)
    except (ValueError, TypeError):  # of a closed map
        return 0
    words = data[: data.size // 8 * 8].view(np.uint64)
    rows = words[: words.size // _COLUMNS * _COLUMNS].reshape(-1, _COLUMNS)
    rest = data[8 * rows.size :]
    return hash((rows.sum(0).tobytes(), rows.sum(1).tobytes(), rest.tobytes()))


def _tried(read: Callable[[], list[Any]]) -> list[Any]:
    try:
        return read()
    except Exception:  # of an object that was closed or taken apart
        return [_MISSING]


def _are_equal(live: Sequence[Any], saved: Sequence[Any]) -> bool:
    """Return True if all pairs are the same object or equal. Python compares nested containers likewise."""
    try:
        return bool(live == saved)
    except Exception:  # of a comparison of two different arrays
        return False


def _differences(label: str, live: Any, saved: Any) -> Iterator[tuple[str, Any, Any]]:
    if _are_equal(live, saved):
        return
    if isinstance(saved, _Without):
        yield from saved.differences(label, live)
        return
    if not isinstance(saved, dict) or not label.startswith("a "):
        yield f"{label} has changed", saved, live
        return
    for name in dict.fromkeys([*saved, *live]):
        before, now = saved.get(name, _MISSING), live.get(name, _MISSING)
        if not _are_equal([now], [before]):
            yield f"attribute {name!r} of {label} has changed", before, now
