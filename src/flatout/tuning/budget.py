"""Time budget for measurements, its default, and the limits of a trial."""

from __future__ import annotations

import math
import time

from flatout.core import formatting
from flatout.distributed.agreement import ALONE, Agreement
from flatout.tuning.statistics import FEWEST_PAIRS

RACE_SHARE, MOST_FOR_RACE = 0.15, 0.4
"""Limits of the share of the budget that trials leave for the race of the tuned loop against the original."""


class Budget:
    """Deadline for measurements. A trial starts only if it is expected to fit.

    Args:
        seconds: total seconds for measurements; 0 allows no trial.
        ranks: the ranks whose trials the budget limits. The clock of rank 0 counts.

    Attributes:
        seconds: the argument. It may change before the first trial.
        later: seconds that untried techniques need. A trial with an unclear result leaves them this time.
    """

    def __init__(self, seconds: float, ranks: Agreement = ALONE) -> None:
        self.seconds = seconds
        self._ranks = ranks
        self.later = 0.0
        self._race_seconds = 0.0
        self._race_share = RACE_SHARE
        self._started = ranks.now()

    @property
    def spent(self) -> float:
        """Seconds since measurements began."""
        return self._ranks.now() - self._started

    @property
    def shown(self) -> float:
        """``spent`` without agreement, which is exact on the machine of rank 0."""
        return time.perf_counter() - self._started

    @property
    def left(self) -> float:
        """Remaining seconds for trials, at least 0."""
        end = min(self.seconds - self._race_seconds, (1 - self._race_share) * self.seconds)
        return max(0.0, end - self.spent)

    @property
    def left_with_race(self) -> float:
        """Remaining seconds for a trial that can replace the race, at least 0."""
        return max(0.0, self.seconds - self.spent)

    def reserve(self, seconds: float) -> None:
        """Leave at least ``seconds`` for the race, up to the share ``MOST_FOR_RACE`` of the budget."""
        self._race_seconds = min(seconds, MOST_FOR_RACE * self.seconds)

    def begin_race(self) -> None:
        """Give the remaining time to the race."""
        self._race_seconds = self._race_share = 0.0

    def fits(self, estimate: float) -> bool:
        """Return True if a trial that takes about ``estimate`` seconds may start."""
        return self.left > 0 and estimate <= self.left

    def deadlines(self, at_most: float, *, with_race: bool = False) -> tuple[float, float]:
        """Return the soft and the hard end of a trial, as values of ``Agreement.now``.

        Args:
            at_most: seconds until the soft end.
            with_race: True for a trial that can replace the race.
        """
        left = self.left_with_race if with_race else self.left
        now, first = self._ranks.now(), min(at_most, left)
        return now + first, now + max(first, left - self.later)


MOST_SECONDS = 60.0
"""Upper limit of the default budget, in seconds."""

SHARE = 0.1
"""Share of the training's duration that measurements may take."""

COMPARED_UPDATES = 2 * (2 * FEWEST_PAIRS + 1) + 2 * FEWEST_PAIRS
"""Updates of one comparison: pairs of the noise floor with the pace, those of a candidate, and those of the race."""

BLOCK_SECONDS = 0.02
"""Duration in seconds of a block with one candidate, if updates are shorter."""


def affordable(batch_seconds: float, expected_steps: int, per_update: float = 1) -> float:
    """Return the seconds of the default budget; 0 if the budget does not pay for one comparison.

    Args:
        batch_seconds: time of a batch, from its loading to its update.
        expected_steps: batches of the whole training.
        per_update: batches per update.
    """
    fewest = fewest_steps(batch_seconds, per_update)
    if fewest is None or expected_steps < fewest:
        return 0.0
    return min(MOST_SECONDS, SHARE * expected_steps * batch_seconds)


def fewest_steps(batch_seconds: float, per_update: float = 1) -> int | None:
    """Return the smallest ``expected_steps`` that pays for one comparison; None if ``MOST_SECONDS`` are too short."""
    comparison = COMPARED_UPDATES * max(BLOCK_SECONDS, per_update * batch_seconds)
    return None if comparison > MOST_SECONDS else math.ceil(comparison / (SHARE * batch_seconds))


def too_few(expected_steps: int, per_update: float = 1) -> bool:
    """Return True if ``expected_steps`` batches pay for no comparison, for any duration of a batch."""
    return SHARE * expected_steps < COMPARED_UPDATES * per_update


def why_nothing(batch_seconds: float, expected_steps: int, per_update: float = 1) -> str:
    """Return the note on a training for which ``affordable`` is 0."""
    fewest = fewest_steps(batch_seconds, per_update)
    if fewest is None:
        return (
            f"nothing was measured: an update takes {formatting.seconds(per_update * batch_seconds)}, and the default "
            f"budget is at most {MOST_SECONDS:.0f} s. Pass budget= in seconds"
        )
    return (
        f"nothing was measured: {formatting.share(SHARE)} of {expected_steps:,} expected steps do not pay for one "
        f"comparison. Pass expected_steps={fewest} or more if the training is longer, or budget= in seconds"
    )


FIRST_SECONDS = 1.0
"""Seconds that tuning may take from the start."""


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
