"""Factorial trial that decides many factors together, from blocks with random combinations of factors.

A pair of neighboring blocks runs a random combination of the open factors and then its complement. The log ratio of
the two times is regressed on the differences of the factors, without an intercept. Every pair therefore informs about
one factor of every open group, and slow drift cancels within a pair. Interactions of two factors cancel, too. Each
estimate is the effect of a factor, averaged over the other factors (fold-over; Box, Hunter and Hunter, "Statistics for
Experimenters", 2005).
"""

from __future__ import annotations

import math
import random
from collections.abc import Hashable, Sequence
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from flatout.distributed.agreement import ALONE, Agreement
from flatout.tuning.sequence import LEAST_SCALE, NoiseFloor
from flatout.tuning.trial import DROP_BELOW, KEEP_ABOVE

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
        kept: factors that are fixed on.
        open: groups without a decision.
    """

    def __init__(
        self, groups: Sequence[Sequence[Factor]], floor: NoiseFloor, seed: int = 0, ranks: Agreement = ALONE
    ) -> None:
        self.kept: list[Factor] = []
        self.open = [list(group) for group in groups]
        self._columns = {factor: i for i, factor in enumerate(factor for group in groups for factor in group)}
        self._floor = floor
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
        variance, freedom = max(self._floor.scale, LEAST_SCALE) ** 2, float(self._floor.pairs)
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
        for group in self.open:
            best = max(group, key=lambda factor: estimates[factor].mean)
            rivals = [s for s in group if s != best and estimates[s].high(deviations) > estimates[best].low(deviations)]
            if estimates[best].low(deviations) > math.log(KEEP_ABOVE) and (last or not rivals):
                self.kept.append(best)
            else:
                still_open.append([s for s in group if estimates[s].high(deviations) > math.log(DROP_BELOW)])
        self.open = [group for group in still_open if group]
