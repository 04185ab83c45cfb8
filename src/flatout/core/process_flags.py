"""Process-wide flags that every snapshot saves.

A file that changes a flag also declares how to read and write this flag::

    @process_flag
    class Threads:
        def __init__(self) -> None:
            self._threads = torch.get_num_threads()

        def restore(self) -> None:
            torch.set_num_threads(self._threads)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

import torch


class Restorable(Protocol):
    """State that can be restored any number of times."""

    def restore(self) -> None:
        """Restore the captured state."""


FlagT = TypeVar("FlagT", bound=Callable[[], Restorable])

_declared: list[Callable[[], Restorable]] = []


def process_flag(flag: FlagT) -> FlagT:
    """Declare a flag: a class whose objects hold the flag's present value and can restore it."""
    _declared.append(flag)
    return flag


def saved_flags() -> list[Restorable]:
    """Return the present values of all declared flags."""
    return [flag() for flag in _declared]


@process_flag
class TorchModes:
    """Grad mode and default dtype of torch, which the user's code may change."""

    def __init__(self) -> None:
        self._grad_enabled = torch.is_grad_enabled()
        self._dtype = torch.get_default_dtype()

    def restore(self) -> None:
        """Restore both modes."""
        torch.set_grad_enabled(self._grad_enabled)
        torch.set_default_dtype(self._dtype)
