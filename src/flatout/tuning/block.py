"""Block of consecutive updates with one configuration: times, and statistics that represent the times."""

from __future__ import annotations

from dataclasses import dataclass, replace

from flatout.report.model import Statistic

FEWEST_FOR_QUARTILE = 4
"""Fewest updates of a block that its lower quartile represents. The mean represents shorter blocks."""


@dataclass(frozen=True)
class Block:
    """Times of consecutive updates, in seconds.

    Attributes:
        wall: wall time of each update. On a GPU, it is the time between two events on the stream.
        cpu: CPU time of this process per update, summed over its threads.
        waits: voluntary context switches of the training's thread. The thread makes one when it sleeps, or waits for a
            lock, a device or another thread. None if the system does not count them.
    """

    wall: tuple[float, ...]
    cpu: float
    waits: int | None = None

    @property
    def mean(self) -> float:
        """Mean wall time of an update."""
        return sum(self.wall) / len(self.wall)

    def scaled(self, factor: float) -> Block:
        """Return the block with all times multiplied by ``factor``."""
        return replace(self, wall=tuple(factor * wall for wall in self.wall), cpu=factor * self.cpu)

    def time(self, statistic: Statistic) -> float:
        """Return the time of an update that represents the block: the lower quartile, or the mean CPU time.

        Interference adds time and never removes any. The lower quartile of short updates is therefore nearly free of
        interference, and CPU time of a single thread is nearly free of it at any length.
        """
        if statistic == "cpu":
            return self.cpu
        if len(self.wall) < FEWEST_FOR_QUARTILE:
            return self.mean
        return sorted(self.wall)[round((len(self.wall) - 1) / 4)]
