"""Turns of a training loop, timed."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch

WARM_UP_SECONDS = 0.5

LEAD = 10
"""Timed steps for each untimed step before them."""


class TimedSteps:
    """A training loop that runs in turns.

    A turn is a number of steps, not of seconds: the host may be a thousand steps ahead of the device. A tenth as many
    steps run before it, untimed. They fill the processor's caches, and empty the queues that filled meanwhile.

    No code of flatout takes part, so that the flatout of any commit can be timed.

    Args:
        steps: trains a step and yields its samples.
    """

    def __init__(self, steps: Iterator[int]) -> None:
        self._steps = steps
        self._steps_per_second: float | None = None

    def warm_up(self) -> None:
        """Train until the pace is known."""
        self._train(1)
        steps = 1
        while True:
            _, took = self._train(steps)
            if took > WARM_UP_SECONDS:
                break
            steps *= 2
        self._steps_per_second = steps / took

    def turn(self, seconds: float) -> float:
        """Train for about so long, in the first turn after warming up; returns samples per second."""
        if self._steps_per_second is None:
            self.warm_up()
        assert self._steps_per_second is not None
        steps = max(1, round(seconds * self._steps_per_second))
        self._train(steps // LEAD)
        samples, took = self._train(steps)
        self._steps_per_second = steps / took
        return samples / took

    def close(self) -> None:
        """End the loop, and with it its workers."""
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
