"""Timed turns of a training loop."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch

WARM_UP_SECONDS = 0.5

LEAD = 10
"""Number of timed steps for which one untimed step warms up."""


class TimedSteps:
    """Training loop that runs in turns.

    A turn is a number of steps and not of seconds, because the host may be a thousand steps ahead of the device. Before
    a turn, a tenth as many steps run untimed. They fill the processor's caches, and empty queues that were filled
    between the turns.

    This class uses no code of flatout, so that it can time the flatout of any commit.

    Args:
        steps: generator that trains a step and yields its number of samples.
    """

    def __init__(self, steps: Iterator[int]) -> None:
        self._steps = steps
        self._steps_per_second: float | None = None

    def warm_up(self, seconds: float = WARM_UP_SECONDS) -> None:
        """Train for at least ``seconds`` seconds, until the pace is known."""
        self._train(1)
        steps = 1
        while True:
            _, took = self._train(steps)
            if took > seconds:
                break
            steps *= 2
        self._steps_per_second = steps / took

    def turn(self, seconds: float) -> float:
        """Train for about ``seconds`` seconds, after a warm-up in the first turn, and return the samples per second."""
        if self._steps_per_second is None:
            self.warm_up(min(WARM_UP_SECONDS, 2 * seconds))
        assert self._steps_per_second is not None
        steps = max(1, round(seconds * self._steps_per_second))
        self._train(steps // LEAD)
        samples, took = self._train(steps)
        self._steps_per_second = steps / took
        return samples / took

    def close(self) -> None:
        """End the loop and its workers."""
        self._steps.close()  # type: ignore[attr-defined]

    def _train(self, steps: int) -> tuple[int, float]:
        _synchronize()
        begun = time.perf_counter()
        samples = sum(next(self._steps) for _ in range(steps))
        _synchronize()
        return samples, time.perf_counter() - begun


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
