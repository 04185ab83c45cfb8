"""Values of tests that trials do not restore, because the search for a step's state follows no numbers."""

from __future__ import annotations

import weakref
from _ctypes import PyObj_FromPtr
from typing import Any


class _Values:
    pass


class Unseen:
    """Values that a step may write without being restored: ``unseen = Unseen(calls=0)``, ``unseen.calls += 1``."""

    def __init__(self, **values: Any) -> None:
        held = _Values()
        vars(held).update(values)
        vars(self)["_held"] = id(held)  # a number, which no search follows
        weakref.finalize(self, id, held)  # keeps the values alive

    def __getattr__(self, name: str) -> Any:
        if name == "_held":
            raise AttributeError(name)
        return getattr(PyObj_FromPtr(self._held), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(PyObj_FromPtr(self._held), name, value)
