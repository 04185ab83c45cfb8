"""Replacement of functions of classes and modules by any number of observers, which may end in any order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import reduce
from types import CodeType
from typing import Any

_CODES: set[CodeType] = set()


class _Replaced:
    """Attribute of a class or module that observers replace. The observer that began first is the innermost."""

    def __init__(self, owner: Any, name: str) -> None:
        self.owner, self.name, self.is_own = owner, name, name in vars(owner)
        self.original = self.shown = getattr(owner, name)
        self.wraps: list[Callable[[Any], Any]] = []

    @property
    def is_shown(self) -> bool:
        """False after other code has replaced the attribute, which then belongs to that code."""
        return getattr(self.owner, self.name) is self.shown

    def show(self) -> None:
        if not self.is_shown:
            return
        self.shown = reduce(_wrapped, self.wraps, self.original)
        if self.wraps or self.is_own:
            setattr(self.owner, self.name, self.shown)
        else:
            delattr(self.owner, self.name)


_REPLACED: dict[tuple[Any, str], _Replaced] = {}


@contextmanager
def replaced(owner: Any, name: str, wrap: Callable[[Any], Any]) -> Iterator[None]:
    """Replace an attribute of a class or module by ``wrap(attribute)`` within the block.

    Blocks for the same attribute may end in any order. ``wrap`` is called again when another block has ended. After the
    last block the attribute is the original object, unless other code has replaced the attribute meanwhile.

    Args:
        owner: class or module. The attribute may be inherited.
        name: name of the attribute.
        wrap: function of the attribute without this replacement.
    """
    key = owner, name
    entry = _REPLACED.get(key)
    if entry is None or not entry.is_shown:
        entry = _REPLACED[key] = _Replaced(owner, name)
    entry.wraps.append(wrap)
    entry.show()
    try:
        yield
    finally:
        entry.wraps.remove(wrap)
        entry.show()
        if not entry.wraps and _REPLACED.get(key) is entry:
            del _REPLACED[key]


def is_replacement(code: CodeType) -> bool:
    """Return True for the code of a function that has replaced another one."""
    return code in _CODES


def _wrapped(attribute: Any, wrap: Callable[[Any], Any]) -> Any:
    replacement = wrap(attribute)
    if code := getattr(replacement, "__code__", None):
        _CODES.add(code)
    return replacement
