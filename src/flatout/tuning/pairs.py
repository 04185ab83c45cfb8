"""Noise of a machine, and paired trials: a candidate and the baseline in turns until the pairs decide."""

from __future__ import annotations

import itertools
import logging
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from flatout.core.standard_error import trials as log
from flatout.distributed.agreement import ALONE, Agreement
from flatout.report.model import Gain, Statistic, Trial
from flatout.tuning import acceptance
from flatout.tuning.statistics import FEWEST_PAIRS, UNKNOWN_NOISE, GainSequence, NoiseFloor
from flatout.tuning.stopwatch import Block, Measure

MUCH_QUIETER = 0.8
"""Ratio of the noise of CPU time to the noise of wall time below which CPU time represents blocks."""

Pair = tuple[Block, Block]
"""Neighboring blocks of the baseline and of the candidate."""


def pairs_of(blocks: Sequence[Block]) -> list[Pair]:
    """Return the pairs of blocks that follow each other. Each block is in one pair at most."""
    return list(zip(blocks[::2], blocks[1::2], strict=False))


def difference(pair: Pair, statistic: Statistic) -> float:
    """Return the log ratio of baseline time to candidate time."""
    baseline, candidate = pair
    return math.log(baseline.time(statistic) / candidate.time(statistic))


@dataclass(frozen=True)
class Noise:
    """Noise floor of a training for each statistic.

    Attributes:
        floors: spread of pairs of the baseline with itself, by the statistics that measure the work of an update. CPU
            time requires a training on the CPU with one intra-op thread, because idle OpenMP threads spin. It also
            requires that at least half of the blocks never waited.
        mean: spread of the mean wall time. A race compares blocks of any length by this time.
    """

    floors: Mapping[Statistic, NoiseFloor]
    mean: NoiseFloor = UNKNOWN_NOISE

    @classmethod
    def of(cls, pairs: Sequence[Pair], *, one_thread: bool) -> Noise:
        """Return the noise of pairs of the baseline with itself.

        Args:
            pairs: neighboring blocks of the baseline.
            one_thread: True for a training on the CPU with one intra-op thread.
        """
        blocks = [block for pair in pairs for block in pair]
        running = sum(block.sleeps == 0 and block.cpu > 0 for block in blocks)
        counts = one_thread and 2 * running >= len(blocks) and all(block.cpu > 0 for block in blocks)
        statistics: tuple[Statistic, ...] = ("wall", "cpu") if counts else ("wall",)
        floors = {each: NoiseFloor.of([difference(pair, each) for pair in pairs]) for each in statistics}
        if log.isEnabledFor(logging.DEBUG):
            log.debug(
                "noise of a pair of the baseline: %s", {each: f"±{floor.scale:.2%}" for each, floor in floors.items()}
            )
        return cls(floors, NoiseFloor.of([math.log(old.mean / new.mean) for old, new in pairs]))

    @property
    def cpu_counts(self) -> bool:
        """True if CPU time measures the work of an update."""
        return "cpu" in self.floors

    def statistic(self, *, keeps_cpu_time: bool) -> Statistic:
        """Return "cpu" if CPU time is comparable and much less noisy than wall time, else "wall".

        Args:
            keeps_cpu_time: True if the candidate changes no threads, processes or waits, so that its CPU time is
                comparable with the baseline's.
        """
        if not (self.cpu_counts and keeps_cpu_time):
            return "wall"
        return "cpu" if self.floors["cpu"].scale < MUCH_QUIETER * self.floors["wall"].scale else "wall"


MOST_PAIRS = 200
"""Number of pairs after which a trial ends undecided."""

_seeds = itertools.count()
"""Seeds of the random orders."""


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
        self.statistic: Statistic = noise.statistic(keeps_cpu_time=keeps_cpu_time)
        self.pairs: list[Pair] = []
        self._ranks = ranks
        floor = noise.floors[self.statistic]
        self._sequence = GainSequence(floor)
        self._noise, self._has_other_merits = floor.scale, has_other_merits

    def add(self, pair: Pair) -> None:
        """Add neighboring blocks of the baseline and of the candidate."""
        self.pairs.append(pair)
        self._sequence.add(difference(pair, self.statistic))
        if log.isEnabledFor(logging.DEBUG):
            times = [f"{1e3 * block.time(self.statistic):.3f}" for block in pair]
            low, high = self._sequence.interval
            text = "pair %d: %s ms without and %s ms with, %s time; speed %.3f to %.3f, %s"
            gain = math.exp(low), math.exp(high)
            log.debug(text, len(self.pairs), *times, self.statistic, *gain, self.verdict)

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
            if now > soft and len(self.pairs) >= FEWEST_PAIRS and now + self._pairs_missing * pair_seconds > hard:
                break

    @property
    def _pairs_missing(self) -> float:
        """Number of pairs until the verdict, if the next pairs are like those so far."""
        low, high = self._sequence.interval
        mean = self._sequence.mean
        keep_above, drop_below = acceptance.limits(self._noise, has_other_merits=self._has_other_merits)
        margin = max(mean - math.log(keep_above), math.log(drop_below) - mean)
        return len(self.pairs) * (((high - low) / 2 / margin) ** 2 - 1)

    @property
    def gain(self) -> Gain:
        """Geometric mean of the candidate's speed relative to the baseline, with the interval of the sequence."""
        low, high = self._sequence.interval
        return Gain(math.exp(self._sequence.mean), math.exp(low), math.exp(high))

    @property
    def verdict(self) -> acceptance.Verdict:
        """Verdict of the pairs so far."""
        return acceptance.verdict(self.gain, self._noise, has_other_merits=self._has_other_merits)

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
            noise=self._noise,
        )
