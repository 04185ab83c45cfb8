"""Times of calls inside flatout, for figures that a report does not contain."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any
from unittest import mock


@dataclass(frozen=True)
class Call:
    """Call of a function.

    Attributes:
        args: positional arguments.
        begun: ``time.perf_counter()`` before the call.
        ended: ``time.perf_counter()`` after the call, even if the call raised an error.
    """

    args: tuple[Any, ...]
    begun: float
    ended: float

    @property
    def seconds(self) -> float:
        """Duration of the call."""
        return self.ended - self.begun


@contextmanager
def observed(module: ModuleType, name: str) -> Iterator[list[Call]]:
    """Yield a list that receives every ended call of a module's function through the module.

    Raises:
        AttributeError: the module has no such function.
    """
    calls: list[Call] = []
    function = getattr(module, name)

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        begun = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            calls.append(Call(args, begun, time.perf_counter()))

    with mock.patch.object(module, name, wrapper):
        yield calls
