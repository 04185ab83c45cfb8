"""Attributes of a wrapped loader or dataset, through its wrapper."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, ClassVar


class Forwarding:
    """A wrapper. Public attributes that are not its own are those of the wrapped object: to read, set and delete.

    Names that begin with an underscore, and those of methods and properties of the class, are the wrapper's.
    """

    _OWN: ClassVar[frozenset[str]] = frozenset()
    """Public attributes that instances of the wrapper hold."""

    @property
    def _wrapped(self) -> Any:
        raise NotImplementedError

    def _is_own(self, name: str) -> bool:
        return name.startswith("_") or name in self._OWN or hasattr(type(self), name)

    def __getattr__(self, name: str) -> Any:
        if self._is_own(name):  # a copy looks for attributes before there is a wrapped object to ask
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._wrapped, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if self._is_own(name):
            object.__setattr__(self, name, value)
        else:
            setattr(self._wrapped, name, value)

    def __delattr__(self, name: str) -> None:
        if self._is_own(name):
            object.__delattr__(self, name)
        else:
            delattr(self._wrapped, name)


class CopiedAsWrapped(Forwarding):
    """A wrapper that belongs to one training in one process: copies and pickles are of the wrapped object."""

    def __copy__(self) -> Any:
        return copy.copy(self._wrapped)

    def __reduce__(self) -> tuple[Callable[[Any], Any], tuple[Any]]:
        return _itself, (self._wrapped,)


def _itself(wrapped: Any) -> Any:
    return wrapped
