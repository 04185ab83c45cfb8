"""Subclasses and wrappers of ``DataLoader``, classified by the members that they override."""

from __future__ import annotations

import copy
import inspect
import itertools
from collections import deque
from collections.abc import Iterator
from typing import Any, TypeGuard

from torch.utils.data import DataLoader

_BATCHES = frozenset(("__getattribute__", "__iter__", "_auto_collation", "_get_iterator", "_index_sampler"))
_SETTINGS = frozenset(inspect.signature(DataLoader.__init__).parameters) - {"self"}
_CONTAINERS = (list, dict, set, deque)
GET_ITERATOR = "_get_iterator"
"""Attribute of a loader with watched workers (``workers_watch.py``): makes its iterators in place of torch's method."""


def overridden(kind: type) -> list[str]:
    """Return the overridden members of ``DataLoader`` that determine the batches.

    The constructor, the length and additional attributes do not count.
    """
    own = itertools.takewhile(lambda each: each is not DataLoader, kind.__mro__)
    return sorted({name for each in own for name in vars(each)} & (_BATCHES | _SETTINGS))


def is_plain(loader: Any) -> TypeGuard[DataLoader[Any]]:
    """Return True for a ``DataLoader`` without :func:`overridden` members, which every technique may replace."""
    return issubclass(type(loader), DataLoader) and not overridden(type(loader))


def why_not_plain(loader: Any) -> str:
    """Return why ``is_plain`` is False; empty if it is True."""
    kind = type(loader)
    if not issubclass(kind, DataLoader):
        return f"the loader is a {kind.__name__}, not a DataLoader"
    names = overridden(kind)
    return f"the loader is a {kind.__name__}, which overrides {', '.join(names)} of DataLoader" if names else ""


def base_of(loader: Any) -> DataLoader | None:
    """Return the plain ``DataLoader`` whose batches a loader yields; None if that is unknown.

    A plain loader is its own base. A loader of another class has a base under three conditions:

    - Its ``__iter__`` is a generator function, so that every call starts over.
    - ``__iter__`` iterates ``DataLoader.__iter__``, or the only attribute that is a loader with a base.
    - No attribute is an iterator, which may have started, or an output stream, as a progress bar has.

    Such a class may change each batch, as ``DataLoaderShard`` of accelerate and ``PrefetchLoader`` of timm do.
    """
    kind = type(loader)
    if is_plain(loader):
        return loader
    if not inspect.isgeneratorfunction(getattr(kind, "__iter__", None)) or _holds_stream(loader):
        return None
    if not issubclass(kind, DataLoader):
        name = _inner_of(loader)
        return None if name is None else base_of(vars(loader)[name])
    if overridden(kind) != ["__iter__"] or "__iter__" not in kind.__iter__.__code__.co_names:
        return None
    base = DataLoader.__new__(DataLoader)
    vars(base).update(vars(loader))
    return base


def with_base(loader: Any, base: DataLoader) -> Any:
    """Return a copy of a loader with another base. The copy shares no list, dict, set or deque with the loader.

    Args:
        loader: a loader with a base, which does not change.
        base: a loader from ``DataLoader``'s constructor.
    """
    attributes = dict(vars(loader))
    if not is_plain(loader):
        attributes = {n: copy.copy(value) if type(value) in _CONTAINERS else value for n, value in attributes.items()}
    if issubclass(type(loader), DataLoader):
        attributes |= vars(base)
    else:
        name = _inner_of(loader)
        assert name is not None
        attributes[name] = with_base(attributes[name], base)
    copied = object.__new__(type(loader))
    vars(copied).update(attributes)
    share_iterators(base, copied)
    return copied


def share_iterators(loader: Any, clone: Any) -> None:
    """Watch the workers of a clone like the workers of its loader."""
    watched = getattr(loader, "__dict__", {}).get(GET_ITERATOR)
    if watched is not None and isinstance(clone, DataLoader):
        vars(clone)[GET_ITERATOR] = watched.of(clone)


def _inner_of(loader: Any) -> str | None:
    """Return the name of the only attribute that is a loader with a base, if ``__iter__`` uses the attribute."""
    inner = [name for name, value in getattr(loader, "__dict__", {}).items() if isinstance(value, DataLoader)]
    is_used = len(inner) == 1 and inner[0] in type(loader).__iter__.__code__.co_names
    return inner[0] if is_used and base_of(vars(loader)[inner[0]]) is not None else None


def _holds_stream(loader: Any) -> bool:
    held = [value for name, value in getattr(loader, "__dict__", {}).items() if name != "_iterator"]
    return any(isinstance(value, Iterator) or callable(getattr(value, "write", None)) for value in held)
