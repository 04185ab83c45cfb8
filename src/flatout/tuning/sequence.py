"""Time-uniform confidence sequence of a gain, from paired blocks and the noise floor.

The interval holds the true gain at all numbers of pairs together. So a trial may look at the interval after every pair,
and stop at any pair. The sequence is the Gaussian mixture t sequence of Wang and Ramdas, "Anytime-valid t-tests and
confidence sequences for Gaussian means with unknown variance" (2025), after Lai (1976). Pairs of the baseline with
itself, whose mean is known to be 0, extend the sequence. Such pairs give a scale before the first pair of a trial, so
that two or three pairs decide large gains.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import NamedTuple

from flatout.report.estimates import t_quantile
from flatout.report.model import Gain

LEVEL = 0.05
"""Probability that the interval misses the true gain at any number of pairs."""

PRIOR_PAIRS = 1.0
"""Weight of the prior around no gain, in pairs: the variance of the mixture is that of a pair divided by this number.

A smaller number narrows the interval of few pairs and widens that of many. On recorded trials, 0.3 keeps more
slower candidates and finds fewer gains of 5 %.
"""

FEWEST_FOR_INTERVAL = 2
"""Fewest pairs that have an interval. A stall in a single pair is not Gaussian."""

LEAST_SCALE = 0.002
"""Smallest standard deviation of a pair, in log time, even if a few pairs show less."""


class Interval(NamedTuple):
    """Interval of a log ratio."""

    low: float
    high: float


NOTHING_KNOWN = Interval(-math.inf, math.inf)


@dataclass(frozen=True)
class NoiseFloor:
    """Spread of the baseline against itself.

    Attributes:
        scale: root mean square of the log ratios of neighboring blocks.
        pairs: number of these pairs.
    """

    scale: float
    pairs: int

    @classmethod
    def of(cls, differences: Sequence[float]) -> NoiseFloor:
        """Return the noise floor for the log ratios of pairs of the baseline with itself."""
        squares = sum(difference**2 for difference in differences)
        return cls(math.sqrt(squares / len(differences)) if differences else 0.0, len(differences))


UNKNOWN_NOISE = NoiseFloor(0.0, 0)


class GainSequence:
    """Confidence sequence of the mean log ratio of pairs.

    Args:
        floor: noise of the baseline against itself.
    """

    def __init__(self, floor: NoiseFloor) -> None:
        self._floor = floor
        self._count = 0
        self._sum = 0.0
        self._squares = 0.0

    def add(self, difference: float) -> None:
        """Add the log ratio of a pair: baseline time / candidate time."""
        self._count += 1
        self._sum += difference
        self._squares += difference**2

    @property
    def mean(self) -> float:
        """Mean log ratio; NaN without a pair."""
        return self._sum / self._count if self._count else math.nan

    @property
    def scale(self) -> float:
        """Standard deviation of a pair, pooled from the noise floor and from the spread of these pairs."""
        spread = max(0.0, self._squares - self._count * self.mean**2) if self._count else 0.0
        freedom = self._floor.pairs + max(0, self._count - 1)
        variance = (self._floor.pairs * self._floor.scale**2 + spread) / freedom if freedom else math.inf
        return max(math.sqrt(variance), LEAST_SCALE)

    @property
    def interval(self) -> Interval:
        """Interval of the log ratio; infinite while there are too few pairs."""
        n = self._count
        freedom = self._floor.pairs + n - 1
        if n < FEWEST_FOR_INTERVAL or freedom <= 0:
            return NOTHING_KNOWN
        shrink = PRIOR_PAIRS / (n + PRIOR_PAIRS)
        bound = (LEVEL * math.sqrt(shrink)) ** (-2 / (freedom + 1))
        if shrink * bound >= 1:
            return NOTHING_KNOWN
        half = self.scale * math.sqrt(freedom * (bound - 1) / ((1 - shrink * bound) * n))
        return Interval(self.mean - half, self.mean + half)


MUCH_NOISIER = 1.5
"""Ratio of the spread of pairs to the noise floor above which the floor no longer describes the machine."""


def fixed_gain(differences: Sequence[float], floor: NoiseFloor = UNKNOWN_NOISE) -> Gain:
    """Return the geometric mean of paired ratios with its 95 % t interval.

    The interval is valid only if the measured times do not determine the number of pairs. The noise floor adds its
    degrees of freedom, unless the pairs are much noisier. The scale is never below the spread of the pairs, nor below
    the scale that is pooled from pairs and noise floor. So a few pairs that agree by chance, or that miss rare pauses,
    do not give a narrow interval.

    Args:
        differences: log ratio of baseline time to candidate time, one per pair.
        floor: spread of the same statistic, for pairs of the baseline with itself.

    Raises:
        ValueError: there are fewer than two pairs.
    """
    pairs = len(differences)
    if pairs < 2:
        raise ValueError(f"differences must have at least 2 pairs, got {pairs}")
    spread, freedom = stdev(differences), pairs - 1
    scale = spread
    if spread <= MUCH_NOISIER * floor.scale:
        squares = freedom * spread**2 + floor.pairs * floor.scale**2
        freedom += floor.pairs
        scale = max(spread, math.sqrt(squares / freedom))
    half = t_quantile(freedom) * scale / math.sqrt(pairs)
    mean = fmean(differences)
    return Gain(math.exp(mean), math.exp(mean - half), math.exp(mean + half))
