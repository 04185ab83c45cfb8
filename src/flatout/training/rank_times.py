"""Times of all ranks in the last steps of a data-parallel training."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Sequence

import torch

from flatout.distributed.agreement import Agreement
from flatout.report.model import RankPace

WINDOW = 100
"""Number of steps that the means cover."""


class RankTimes:
    """Times of all ranks in the last ``WINDOW`` steps. Ranks exchange their times with the loss of each step."""

    def __init__(self) -> None:
        self._places: Sequence[tuple[str, str]] = ()
        self._steps: deque[Sequence[Sequence[float]]] = deque(maxlen=WINDOW)

    def begin(self, ranks: Agreement, device: torch.device) -> None:
        """Collect the host and the device of each rank.

        Args:
            ranks: agreement of all ranks.
            device: the device of this rank.
        """
        self._places = ranks.every((socket.gethostname(), str(device)))

    def add(self, times: Sequence[Sequence[float]]) -> None:
        """Add a step.

        Args:
            times: for each rank, the numbers that ``StepClock.take`` returns.
        """
        self._steps.append(times)

    def clear(self) -> None:
        """Discard all steps."""
        self._steps.clear()

    @property
    def paces(self) -> tuple[RankPace, ...]:
        """Mean times of each rank, by rank. Empty before the first step."""
        found = []
        for rank, taken in enumerate(zip(*self._steps, strict=True)):
            steps, loading, computing, waiting = map(sum, zip(*taken, strict=True))
            host, device = self._places[rank]
            load_ms, steps = 1e3 * loading / len(taken), max(1, steps)
            found.append(RankPace(rank, host, device, load_ms, 1e3 * computing / steps, 1e3 * waiting / steps))
        return tuple(found)
