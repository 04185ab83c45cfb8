"""Access to attributes of a loader or dataset through its wrapper."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, ClassVar


class Forwarding:
    """Base class of wrappers. Reading, setting or deleting a public attribute reaches the wrapped object.

    Names with a leading underscore, names in ``_OWN``, and methods and properties of the class belong to the wrapper.
    """

    _OWN: ClassVar[frozenset[str]] = frozenset()
    """Public attributes of the wrapper's instances."""

    @property
    def _wrapped(self) -> Any:
        raise NotImplementedError

    def _is_own(self, name: str) -> bool:
        return name.startswith("_") or name in self._OWN or hasattr(type(self), name)

    def __getattr__(self, name: str) -> Any:
        if self._is_own(name):  # `copy` and `pickle` look up attributes before `_wrapped` exists
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
    """Base class of wrappers that belong to one training in one process.

    A copy or pickle of the wrapper is a copy or pickle of the wrapped object.
    """

    def __copy__(self) -> Any:
        return copy.copy(self._wrapped)

    def __reduce__(self) -> tuple[Callable[[Any], Any], tuple[Any]]:
        return _itself, (self._wrapped,)


def _itself(wrapped: Any) -> Any:
    return wrapped
