"""Hash of the source code of functions and classes. The code does not run."""

from __future__ import annotations

import functools
import hashlib
import inspect
import types
from collections.abc import Iterable, Iterator
from typing import Any

_LIBRARIES = ("torch", "flatout", "builtins", "typing", "abc")
"""Packages whose code is not hashed, because their versions identify the code."""


def hash_of_source(code: Iterable[Any]) -> str:
    """Return a hash of the functions in ``code``, and of the methods of its classes and their bases.

    Code of torch and flatout is left out. For a function whose source cannot be read, only the name is hashed.

    Args:
        code: functions, methods, partial functions, classes, or other objects. Such an object counts as its class.
    """
    functions = {function for part in code for function in _functions_of(part)}
    texts = sorted(f"{function.__module__}.{function.__qualname__}\n{_source_of(function)}" for function in functions)
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]


def hashes_of_source(code: Iterable[Any]) -> dict[str, str]:
    """Return ``hash_of_source`` of each function and class, by its qualified name, sorted.

    Args:
        code: as for ``hash_of_source``. Parts without code of the user are left out.
    """
    named: dict[str, list[Any]] = {}
    for part in code:
        if any(True for _ in _functions_of(part)):
            named.setdefault(_name_of(part), []).append(part)
    return {name: hash_of_source(parts) for name, parts in sorted(named.items())}


def _name_of(part: Any) -> str:
    if isinstance(part, functools.partial):
        return _name_of(part.func)
    if not isinstance(part, (type, types.FunctionType, types.MethodType)):
        part = type(part)
    return f"{part.__module__}.{part.__qualname__}".removeprefix("__main__.")


def _functions_of(part: Any) -> Iterator[types.FunctionType]:
    if isinstance(part, functools.partial):
        yield from _functions_of(part.func)
    elif isinstance(part, types.MethodType):
        yield from _functions_of(part.__func__)
    elif isinstance(part, types.FunctionType):
        if not _is_of_library(part):
            yield part
    elif isinstance(part, type):
        for owner in part.__mro__:
            if not _is_of_library(owner):
                for value in map(_unwrapped, vars(owner).values()):
                    if isinstance(value, types.FunctionType):
                        yield from _functions_of(value)
    else:
        yield from _functions_of(type(part))


def _unwrapped(attribute: Any) -> Any:
    """Return the function that a property, class method or static method wraps. Return other attributes unchanged."""
    if isinstance(attribute, property):
        return attribute.fget
    return attribute.__func__ if isinstance(attribute, (classmethod, staticmethod)) else attribute


def _is_of_library(part: Any) -> bool:
    return str(part.__module__).partition(".")[0] in _LIBRARIES


def _source_of(function: types.FunctionType) -> str:
    try:
        return inspect.getsource(function)
    except Exception:  # made by exec, from a file that is gone, or not read as Python
        return ""
