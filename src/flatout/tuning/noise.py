"""Noise of a machine: the baseline measured against itself."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flatout.report.model import Statistic
from flatout.tuning.sequence import UNKNOWN_NOISE, NoiseFloor
from flatout.tuning.timing import Block

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
        running = sum(block.waits == 0 and block.cpu > 0 for block in blocks)
        counts = one_thread and 2 * running >= len(blocks) and all(block.cpu > 0 for block in blocks)
        statistics: tuple[Statistic, ...] = ("wall", "cpu") if counts else ("wall",)
        floors = {each: NoiseFloor.of([difference(pair, each) for pair in pairs]) for each in statistics}
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
