"""Change to the user's objects that can be turned on and off."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any


class Toggle(ABC):
    """Change to the user's objects that can be turned on and off, any number of times.

    A toggle must not keep the model alive, because the toggle may live longer than the ``Run``.

    Attributes:
        label: name in the report.
        on_batch: function to call with each batch of ``run.loader``, also while the change is off; None for none.
    """

    label: str
    on_batch: Callable[[Any], None] | None = None
    _is_on = False

    def enable(self) -> None:
        """Turn the change on. Do nothing if the change is on already."""
        if not self._is_on:
            self._turn_on()
            self._is_on = True

    def disable(self) -> None:
        """Turn the change off, so that the objects are exactly as before. Do nothing if the change is off already."""
        if self._is_on:
            self._turn_off()
            self._is_on = False

    @abstractmethod
    def _turn_on(self) -> None: ...

    @abstractmethod
    def _turn_off(self) -> None: ...

    def release(self) -> None:
        """Free memory that only a later ``enable`` would use."""
