"""Seconds that may be spent on measuring, looked at before every trial."""

from __future__ import annotations

import time


class Budget:
    """A deadline that a trial is fitted into before it begins.

    Args:
        seconds: how long measuring may take in all; 0 allows no trial.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._extra = 0.0
        self._started = time.perf_counter()

    @property
    def spent(self) -> float:
        """Seconds since measuring began."""
        return time.perf_counter() - self._started

    @property
    def left(self) -> float:
        """Seconds still to spend; never negative."""
        return max(0.0, self.seconds + self._extra - self.spent)

    def allow(self, share: float) -> None:
        """Let what is measured last have at least so large a share of the whole, whatever trials have left."""
        self._extra = max(0.0, self.spent - (1 - share) * self.seconds)

    def fits(self, estimate: float) -> bool:
        """Whether a trial that takes about ``estimate`` seconds may begin."""
        return self.left > 0 and estimate <= self.left

    def deadlines(self, at_most: float) -> tuple[float, float]:
        """When a trial of about so many seconds ends, and when it has to: ``time.perf_counter()`` values."""
        now = time.perf_counter()
        return now + min(at_most, self.left), now + self.left
