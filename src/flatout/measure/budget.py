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
        self._started = time.perf_counter()

    @property
    def spent(self) -> float:
        """Seconds since measuring began."""
        return time.perf_counter() - self._started

    @property
    def left(self) -> float:
        """Seconds still to spend; never negative."""
        return max(0.0, self.seconds - self.spent)

    def fits(self, estimate: float) -> bool:
        """Whether a trial that takes about ``estimate`` seconds may begin."""
        return self.left > 0 and estimate <= self.left

    def deadlines(self, at_most: float) -> tuple[float, float]:
        """When a trial of about so many seconds ends, and when it has to: ``time.perf_counter()`` values."""
        now = time.perf_counter()
        return now + min(at_most, self.left), now + self.left
