"""A loader that is trained from in stretches, the way ``Run`` trains from it."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable
from typing import Any

from torch.utils.data import DataLoader

from flatout.data import InMemoryLoader, Prefetcher, batch_size_of, clone_loader
from flatout.job import Job
from flatout.measure.trial import synchronize
from flatout.report.model import Pace

PREFETCHED = 2
"""Batches that a Prefetcher or an InMemoryLoader has ready before they are asked for."""


class Track:
    """Trains from one loader in turns with another, waiting for data and stepping timed apart.

    Args:
        job: stepped with the batches.
        loader: iterated again when it ends, as training does. A DataLoader is cloned, so that the user's own
            starts no workers.
    """

    def __init__(self, job: Job, loader: Iterable[Any]) -> None:
        self._job = job
        self.queue = 0
        """Batches that may be waiting when a stretch begins, made while it was not this loader's turn."""
        if isinstance(loader, DataLoader):
            loader = clone_loader(loader)
            self.queue = loader.num_workers * (loader.prefetch_factor or 0)
        if isinstance(loader, InMemoryLoader) or job.device.type == "cuda":
            self.queue += PREFETCHED
        self.refill_seconds = 0.0
        """Seconds in which that queue fills at the rate of the latest stretch."""
        self._batches = _endless(Prefetcher(loader, job.device))
        self._seconds = self._waited = 0.0
        self._samples = self._steps = 0

    def stretch(self, steps: int, settle: int, rest: float = 0.0) -> float:
        """Train for ``steps`` batches after some that are not timed.

        Args:
            steps: batches that are timed.
            settle: the fewest batches before them, which come in whole updates.
            rest: the fewest seconds before them, in which another loader's workers fill their queue and come to rest.

        Returns:
            The seconds that the ``steps`` took.
        """
        begin, settled = time.perf_counter(), 0
        while settled < settle or time.perf_counter() < begin + rest:
            for _ in range(self._job.accumulate):
                self._job.step(next(self._batches))
            synchronize(self._job.device)
            settled += self._job.accumulate
        synchronize(self._job.device)
        start = time.perf_counter()
        for _ in range(steps):
            asked = time.perf_counter()
            batch = next(self._batches)
            self._waited += time.perf_counter() - asked
            self._job.step(batch)
            self._samples += batch_size_of(batch)
        synchronize(self._job.device)
        took = time.perf_counter() - start
        self._seconds += took
        self._steps += steps
        self.refill_seconds = self.queue * took / steps
        return took

    @property
    def pace(self) -> Pace:
        """Means over everything timed so far."""
        return Pace(
            step_ms=1e3 * (self._seconds - self._waited) / self._steps,
            load_ms=1e3 * self._waited / self._steps,
            samples_per_second=self._samples / self._seconds,
        )

    def close(self) -> None:
        """Let go of the loader's iterator, and so of its workers or threads."""
        self._batches.close()


def _endless(loader: Iterable[Any]) -> Generator[Any, None, None]:
    while True:
        yield from loader
