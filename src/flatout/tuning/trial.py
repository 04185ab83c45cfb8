"""Paired trials: a candidate and the baseline in turns, until the pairs show which is faster."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator
from statistics import median
from typing import Literal

from flatout.distributed.agreement import ALONE, Agreement
from flatout.report.model import Gain, Statistic, Trial
from flatout.tuning.noise import Noise, Pair, difference
from flatout.tuning.sequence import GainSequence
from flatout.tuning.timing import Block

KEEP_ABOVE = 1.01
"""Speed above which a candidate is kept. Effects of memory layout of up to 1 % do not last until the next start."""

DROP_BELOW = 1.03
"""Speed below which a candidate is not worth more pairs."""

NO_SLOWER = 0.98
"""Speed above which a candidate counts as no slower."""

FEWEST_UNDECIDED = 3
"""Number of pairs from which a trial may end undecided at its soft deadline.

In moderate noise, three pairs show a gain of a factor of two.
"""

MOST_PAIRS = 200
"""Number of pairs after which a trial ends undecided."""

_seeds = itertools.count()
"""Seeds of the random orders."""

Verdict = Literal["faster", "not faster", "undecided"]

Measure = Callable[[int], Block]
"""Function that measures block ``i`` with one configuration."""


def measure_pairs(
    baseline: Measure, candidate: Measure, *, alternates: bool = False, ranks: Agreement = ALONE
) -> Iterator[Pair]:
    """Yield pairs without end, each in random order.

    Alternating orders cancel linear drift, but resonate with periodic disturbances. One example is thermal throttling,
    simulated in benchmarks/decisions_noise.py. The 95 % interval of 12 alternating pairs with steps of 2 s holds a gain
    of 2 in only 57 % of the races. The same random order in every trial would resonate, too.

    Args:
        baseline: measures block ``i`` of the baseline.
        candidate: measures block ``i`` of the candidate.
        alternates: True to begin each pair with the configuration that ended the last pair, and the first pair with the
            baseline. This halves the number of changes. For workers with a queue, a change takes longer than a block.
        ranks: the ranks that measure the pairs together, in the order of rank 0.
    """
    order = random.Random(ranks.first(next(_seeds)))
    for i in itertools.count():
        if i % 2 == 0 if alternates else order.random() < 0.5:
            old = baseline(i)
            yield old, candidate(i)
        else:
            new = candidate(i)
            yield baseline(i), new


class PairedTrial:
    """Pairs of a baseline and a candidate. The verdict is valid at any number of pairs.

    Args:
        noise: noise of the baseline against itself.
        keeps_cpu_time: True if the candidate's CPU time is comparable with the baseline's.
        has_other_merits: True if being no slower is enough for the candidate, because it saves memory or cores.
        ranks: the ranks that measure the pairs together.
    """

    def __init__(
        self,
        noise: Noise,
        *,
        keeps_cpu_time: bool = True,
        has_other_merits: bool = False,
        ranks: Agreement = ALONE,
    ) -> None:
        self._keep_above, self._drop_below = (NO_SLOWER, 1.0) if has_other_merits else (KEEP_ABOVE, DROP_BELOW)
        self.statistic: Statistic = noise.statistic(keeps_cpu_time=keeps_cpu_time)
        self.pairs: list[Pair] = []
        self._ranks = ranks
        self._sequence = GainSequence(noise.floors[self.statistic])

    def add(self, pair: Pair) -> None:
        """Add neighboring blocks of the baseline and of the candidate."""
        self.pairs.append(pair)
        self._sequence.add(difference(pair, self.statistic))

    def run(
        self,
        baseline: Measure,
        candidate: Measure,
        soft: float,
        hard: float,
        *,
        fewest: int = 1,
        alternates: bool = False,
    ) -> None:
        """Add pairs until the verdict is clear or the time is up.

        Args:
            baseline: measures block ``i`` of the baseline.
            candidate: measures block ``i`` of the candidate, on the same batches.
            soft: ``Agreement.now()`` after which an undecided trial continues only if it may end before ``hard``.
            hard: ``Agreement.now()`` after which no pair starts.
            fewest: number of pairs that the time does not limit.
            alternates: as in ``measure_pairs``.
        """
        begun, earlier = self._ranks.now(), len(self.pairs)
        pairs = measure_pairs(baseline, candidate, alternates=alternates, ranks=self._ranks)
        for pair in itertools.islice(pairs, MOST_PAIRS):
            self.add(pair)
            now = self._ranks.now()
            pair_seconds = (now - begun) / (len(self.pairs) - earlier)
            if self.verdict != "undecided" or (now > hard and len(self.pairs) >= fewest):
                break
            if now > soft and len(self.pairs) >= FEWEST_UNDECIDED and now + self._pairs_missing * pair_seconds > hard:
                break

    @property
    def _pairs_missing(self) -> float:
        """Number of pairs until the verdict, if the next pairs are like those so far."""
        low, high = self._sequence.interval
        mean = self._sequence.mean
        margin = max(mean - math.log(self._keep_above), math.log(self._drop_below) - mean)
        return len(self.pairs) * (((high - low) / 2 / margin) ** 2 - 1)

    @property
    def gain(self) -> Gain:
        """Geometric mean of the candidate's speed relative to the baseline, with the interval of the sequence."""
        low, high = self._sequence.interval
        return Gain(math.exp(self._sequence.mean), math.exp(low), math.exp(high))

    @property
    def verdict(self) -> Verdict:
        """Verdict of the pairs so far. "faster" means fast enough to keep, "not faster" means not worth more pairs."""
        gain = self.gain
        if gain.low > self._keep_above:
            return "faster"
        return "not faster" if gain.high < self._drop_below else "undecided"

    def record(self, label: str, steps: int) -> Trial:
        """Return the record of at least one pair for the report.

        Args:
            label: name of the candidate.
            steps: steps of an update.
        """
        baseline = median(old.mean for old, _ in self.pairs)
        return Trial(
            candidate=label,
            baseline_ms=1e3 * baseline / steps,
            candidate_ms=1e3 * baseline / self.gain.ratio / steps,
            gain=self.gain,
            pairs=len(self.pairs),
        )
