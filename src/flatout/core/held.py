"""Values that live as long as an object of the user, and that copies and pickles of this object do not have.

The value may refer to the object. Python's garbage collector frees both together, which it cannot do for a value in a
``WeakKeyDictionary`` that refers to its key.
"""

from __future__ import annotations

import weakref
from typing import Any


class _Held:
    def __init__(self, owner: Any, value: Any) -> None:
        self.owner, self.value = weakref.ref(owner), value

    def __reduce__(self) -> Any:
        return type(None), ()


def hold(owner: Any, name: str, value: Any) -> None:
    """Hold a value until ``owner`` dies, or until ``release``.

    Args:
        owner: any object with a ``__dict__`` that can be weakly referenced.
        name: name of the attribute.
        value: any object.
    """
    vars(owner)[name] = _Held(owner, value)


def held(owner: Any, name: str) -> Any:
    """Return the value that ``hold`` was given for this very object, or None."""
    found = vars(owner).get(name)
    return found.value if isinstance(found, _Held) and found.owner() is owner else None


def release(owner: Any, name: str) -> None:
    """Release a value."""
    vars(owner).pop(name, None)
