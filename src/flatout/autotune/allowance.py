"""Limit of the time that tuning may take from a script of unknown length."""

from __future__ import annotations

import math
import time

FIRST_SECONDS = 1.0
"""Seconds that tuning may take from the start."""

SHARE = 0.1
"""Additional tuning time, relative to the time that the script has trained so far."""


class Allowance:
    """Time for tuning, which is ``FIRST_SECONDS`` and a share of the time that the script has trained so far.

    A trial that has begun may exceed the allowance. The script then trains longer before the next trial.

    Args:
        budget: limit in seconds of all tuning.

    Attributes:
        budget: the argument.
        spent: seconds of tuning so far.
    """

    def __init__(self, budget: float = math.inf) -> None:
        self.budget = budget
        self._begun = time.perf_counter()
        self.spent = 0.0

    @property
    def trained(self) -> float:
        """Seconds since the beginning, without tuning."""
        return time.perf_counter() - self._begun - self.spent

    @property
    def left(self) -> float:
        """Seconds that tuning may take now, or a negative number if tuning has exceeded the allowance."""
        return min(FIRST_SECONDS + SHARE * self.trained, self.budget) - self.spent

    def due(self, seconds: float) -> float:
        """Return the ``time.perf_counter()`` at which ``left`` reaches ``seconds`` without tuning until then.

        The result is infinity if ``left`` never does.
        """
        if seconds == math.inf or self.spent + seconds > self.budget:
            return math.inf
        return self._begun + self.spent + (seconds + self.spent - FIRST_SECONDS) / SHARE
