"""Time budget for measurements, checked before every trial."""

from __future__ import annotations

import time


class Budget:
    """Deadline for measurements. A trial starts only if it is expected to fit.

    Args:
        seconds: total seconds for measurements; 0 allows no trial.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._extra = 0.0
        self._started = time.perf_counter()

    @property
    def spent(self) -> float:
        """Seconds since measurements began."""
        return time.perf_counter() - self._started

    @property
    def left(self) -> float:
        """Remaining seconds; never negative."""
        return max(0.0, self.seconds + self._extra - self.spent)

    def allow(self, share: float) -> None:
        """Reserve a share of the total for the last measurements, even if trials have used more."""
        self._extra = max(0.0, self.spent - (1 - share) * self.seconds)

    def fits(self, estimate: float) -> bool:
        """Return True if a trial that takes about ``estimate`` seconds may start."""
        return self.left > 0 and estimate <= self.left

    def deadlines(self, at_most: float) -> tuple[float, float]:
        """Return the soft and the hard end of a trial of ``at_most`` seconds, as ``time.perf_counter()`` values."""
        now = time.perf_counter()
        return now + min(at_most, self.left), now + self.left
