"""Old names of public objects."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any


def old_names(module: str, renamed: Mapping[str, Any]) -> Callable[[str], Any]:
    """Return a ``__getattr__`` for a module that still accepts the old names of its objects.

    Args:
        module: name of the module.
        renamed: old name to the object, which has its new name in ``__name__``.
    """

    def __getattr__(name: str) -> Any:
        if name not in renamed:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        new = renamed[name]
        message = f"{module}.{name} is now {module}.{new.__name__}. Replace the old name, which will be removed"
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        return new

    return __getattr__
