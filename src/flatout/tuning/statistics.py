"""Intervals of gains: a sequence that is valid at any number of pairs, one for a fixed number, and a regression.

*Sequence.* The interval holds the true gain at all numbers of pairs together. So a trial may look at the interval after
every pair, and stop at any pair. The sequence is the Gaussian mixture t sequence of Wang and Ramdas, "Anytime-valid
t-tests and confidence sequences for Gaussian means with unknown variance" (2025), after Lai (1976). Pairs of the
baseline with itself, whose mean is known to be 0, extend the sequence. Such pairs give a scale before the first pair of
a trial, so that two or three pairs decide large gains.

*Regression.* Blocks with random combinations of factors decide many factors together. A pair of neighboring blocks runs
a random combination of the open factors and then its complement. The log ratio of the two times is regressed on the
differences of the factors, without an intercept. Every pair therefore informs about one factor of every open group, and
slow drift cancels within a pair. Interactions of two factors cancel, too. Each estimate is the effect of a factor,
averaged over the other factors (fold-over; Box, Hunter and Hunter, "Statistics for Experimenters", 2005).
"""

from __future__ import annotations

import math
import random
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from flatout.distributed.agreement import ALONE, Agreement
from flatout.report.estimates import t_quantile
from flatout.report.model import Gain
from flatout.tuning.acceptance import verdict

LEVEL = 0.05
"""Probability that the interval misses the true gain at any number of pairs."""

PRIOR_PAIRS = 1.0
"""Weight of the prior around no gain, in pairs: the variance of the mixture is that of a pair divided by this number.

A smaller number narrows the interval of few pairs and widens that of many. On recorded trials, 0.3 keeps more
slower candidates and finds fewer gains of 5 %.
"""

FEWEST_FOR_INTERVAL = 2
"""Fewest pairs that have an interval. A stall in a single pair is not Gaussian."""

FEWEST_PAIRS = 3
"""Fewest pairs of a comparison, and of the baseline with itself. In moderate noise, they show a gain of a factor of 2.

With fewer pairs of the baseline with itself, three pairs of a trial decide no large gain.
"""

LEAST_SCALE = 0.002
"""Smallest standard deviation of a pair, in log time, even if a few pairs show less."""


NOTHING_KNOWN = -math.inf, math.inf
"""Interval of a log ratio without evidence."""


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
    def interval(self) -> tuple[float, float]:
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
        return self.mean - half, self.mean + half


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


Factor = TypeVar("Factor", bound=Hashable)

PRIOR = 0.5
"""Standard deviation of the prior of a factor's log gain, around 0."""

EARLY = 3.2
"""Posterior standard deviations between an estimate and a limit that fix a factor before the end."""

LATE = 2.2
"""Posterior standard deviations between an estimate and a limit that fix a factor at the end."""

CHECK_EVERY = 2
"""Number of pairs between two tests of the estimates."""


class Estimate(NamedTuple):
    """Estimate of a factor's log gain, with its standard deviation and the degrees of freedom of the latter."""

    mean: float
    deviation: float
    freedom: float

    def low(self, deviations: float) -> float:
        """Return the lower bound with the confidence of ``deviations`` standard deviations of a normal distribution."""
        return self.mean - self._half(deviations)

    def high(self, deviations: float) -> float:
        """Return the upper bound. See ``low``."""
        return self.mean + self._half(deviations)

    def gain(self, deviations: float) -> Gain:
        """Return the gain with its interval. See ``low``."""
        return Gain(math.exp(self.mean), math.exp(self.low(deviations)), math.exp(self.high(deviations)))

    def _half(self, deviations: float) -> float:
        """Return half the width of the interval, with Wallace's approximation (1959) of the quantile of Student's t."""
        n = self.freedom
        z = deviations * (8 * n + 3) / (8 * n + 1)
        return self.deviation * math.sqrt(n * math.expm1(z * z / n))


class Factorial(Generic[Factor]):
    """Decisions about factors that any combination may turn on.

    Args:
        groups: alternatives of each technique, of which a combination has at most one.
        floor: noise of the baseline against itself.
        seed: seed of the combinations.
        ranks: the ranks that decide together. The estimates of rank 0 count, because processors may round differently.

    Attributes:
        floor: as given.
        kept: factors that are fixed on.
        open: groups without a decision.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[Factor]],
        floor: NoiseFloor,
        seed: int = 0,
        *,
        ranks: Agreement = ALONE,
    ) -> None:
        self.kept: list[Factor] = []
        self.open = [list(group) for group in groups]
        self._columns = {factor: i for i, factor in enumerate(factor for group in groups for factor in group)}
        self.floor = floor
        self._ranks = ranks
        self._random = random.Random(seed)
        self._rows: list[np.ndarray] = []
        self._gains: list[float] = []

    def combinations(self) -> tuple[list[Factor], list[Factor]]:
        """Return a random combination and its complement. The kept factors are in both."""
        one, other = list(self.kept), list(self.kept)
        for group in self.open:
            factor = self._random.choice(group)
            (one if self._random.random() < 0.5 else other).append(factor)
        return one, other

    def add(self, one: Sequence[Factor], other: Sequence[Factor], gain: float) -> None:
        """Add a pair.

        Args:
            one: factors of the first block.
            other: factors of the second block.
            gain: log ratio of the second time to the first.
        """
        row = np.zeros(len(self._columns))
        row[[self._columns[factor] for factor in one]] += 1
        row[[self._columns[factor] for factor in other]] -= 1
        self._rows.append(row)
        self._gains.append(gain)
        if len(self._gains) % CHECK_EVERY == 0:
            self._fix(EARLY)

    def close(self) -> None:
        """Decide at the end. Factors that remain open are undecided."""
        self._fix(LATE, last=True)

    def pairs_of(self, factor: Factor) -> int:
        """Return the number of pairs that inform about a factor."""
        return sum(bool(row[self._columns[factor]]) for row in self._rows)

    def estimates(self) -> dict[Factor, Estimate]:
        """Return the estimate of each factor by ridge regression. Noise floor and residuals give the scale."""
        rows = np.array(self._rows).reshape(-1, len(self._columns))
        gains = np.array(self._gains)
        variance, freedom = max(self.floor.scale, LEAST_SCALE) ** 2, float(self.floor.pairs)
        means, covariance = self._ridge(rows, gains, variance)
        residuals = gains - rows @ means
        spent = len(self._columns) - np.trace(covariance) / PRIOR**2  # degrees of freedom that the estimates use
        left = max(0.0, len(gains) - spent)
        pooled = (freedom * variance + residuals @ residuals) / (freedom + left)
        variance, freedom = max(pooled, LEAST_SCALE**2), freedom + left
        means, covariance = self._ridge(rows, gains, variance)
        deviations = np.sqrt(np.diag(covariance))
        means, deviations, freedom = self._ranks.first((means, deviations, freedom))
        return {factor: Estimate(float(means[i]), float(deviations[i]), freedom) for factor, i in self._columns.items()}

    def _ridge(self, rows: np.ndarray, gains: np.ndarray, variance: float) -> tuple[np.ndarray, np.ndarray]:
        """Return means and covariance of the posterior, if a pair has this variance."""
        information = rows.T @ rows / variance + np.eye(len(self._columns)) / PRIOR**2
        covariance = np.linalg.inv(information)
        return covariance @ rows.T @ gains / variance, covariance

    def _fix(self, deviations: float, *, last: bool = False) -> None:
        """Keep the best factor of each group if it clearly pays, and drop the factors that clearly do not.

        Args:
            deviations: standard deviations between an estimate and a limit that make a decision clear.
            last: True to keep the best factor of a group although another may be as good.
        """
        estimates, still_open = self.estimates(), []
        verdicts = {factor: verdict(each.gain(deviations), self.floor.scale) for factor, each in estimates.items()}
        for group in self.open:
            best = max(group, key=lambda factor: estimates[factor].mean)
            rivals = [s for s in group if s != best and estimates[s].high(deviations) > estimates[best].low(deviations)]
            if verdicts[best] == "faster" and (last or not rivals):
                self.kept.append(best)
            else:
                still_open.append([factor for factor in group if verdicts[factor] != "not faster"])
        self.open = [group for group in still_open if group]
