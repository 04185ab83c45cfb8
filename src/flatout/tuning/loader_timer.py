"""A loader that is trained from in stretches, the way ``Run`` trains from it."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable
from typing import Any, NamedTuple

from torch.utils.data import DataLoader

from flatout.core.batches import batch_size_of
from flatout.data import InMemoryLoader, Prefetcher, clone_loader
from flatout.report.model import Pace
from flatout.training.job import Job
from flatout.tuning.trial import synchronize

PREFETCHED = 2
"""Batches that a Prefetcher or an InMemoryLoader has ready before they are asked for."""

ALONE_SECONDS = 0.1
"""Shortest time that the loader's own rate is taken over."""


class Stretch(NamedTuple):
    """What was timed in one go: seconds, those of them spent on waiting, samples and batches."""

    seconds: float
    waited: float
    samples: int
    steps: int


def pace_of(stretches: Iterable[Stretch]) -> Pace:
    """Means over the middle half of the stretches, by time: what disturbs the machine is not the loop's."""
    ordered = sorted(stretches, key=lambda stretch: stretch.seconds / stretch.steps)
    outer = len(ordered) // 4
    seconds, waited, samples, steps = map(sum, zip(*ordered[outer : len(ordered) - outer], strict=True))
    return Pace(
        step_ms=1e3 * (seconds - waited) / steps,
        load_ms=1e3 * waited / steps,
        samples_per_second=samples / seconds,
    )


class LoaderTimer:
    """Trains from one loader in turns with another, waiting for data and stepping timed apart.

    Args:
        job: stepped with the batches.
        loader: iterated again when it ends, as training does. A DataLoader is cloned, so that the user's own
            starts no workers; an InMemoryLoader, so that training is the first to run it.
    """

    def __init__(self, job: Job, loader: Iterable[Any]) -> None:
        self._job = job
        self.queue = 0
        """Batches that may be waiting when a stretch begins, made while it was not this loader's turn."""
        self._workers = 1
        if isinstance(loader, DataLoader):
            loader = clone_loader(loader)
            self._workers = max(1, loader.num_workers)
            self.queue = loader.num_workers * (loader.prefetch_factor or 0)
        if isinstance(loader, InMemoryLoader):
            loader = loader.clone()
        if isinstance(loader, InMemoryLoader) or job.spec.device.type == "cuda":
            self.queue += PREFETCHED
        self.refill_seconds = 0.0
        """Seconds in which that queue fills at the rate of the latest stretch."""
        self._batches = _endless(Prefetcher(loader, job.spec.device))
        self._stretches: list[Stretch] = []

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
            for _ in range(self._job.spec.accumulate):
                self._job.stepper.step(next(self._batches))
            synchronize(self._job.spec.device)
            settled += self._job.spec.accumulate
        synchronize(self._job.spec.device)
        start, waited, samples = time.perf_counter(), 0.0, 0
        for _ in range(steps):
            asked = time.perf_counter()
            batch = next(self._batches)
            waited += time.perf_counter() - asked
            self._job.stepper.step(batch)
            samples += batch_size_of(batch)
        synchronize(self._job.spec.device)
        took = time.perf_counter() - start
        self._stretches.append(Stretch(took, waited, samples, steps))
        self.refill_seconds = self.queue * took / steps
        return took

    @property
    def fewest_alone(self) -> int:
        """Batches that ``alone`` takes at the least."""
        return self.queue + 1 + self._workers

    def alone(self) -> float:
        """Samples per second that the loader delivers when nobody trains between its batches.

        What is ready, or is made while the workers start, is not timed; workers finish in rounds, and so whole rounds
        are.
        """
        for _ in range(self.queue + 1):
            next(self._batches)
        synchronize(self._job.spec.device)
        start, samples, took = time.perf_counter(), 0, 0.0
        while took < ALONE_SECONDS:
            samples += sum(batch_size_of(next(self._batches)) for _ in range(self._workers))
            synchronize(self._job.spec.device)
            took = time.perf_counter() - start
        return samples / took

    @property
    def pace(self) -> Pace:
        """What the stretches so far come to."""
        return pace_of(self._stretches)

    def close(self) -> None:
        """Let go of the loader's iterator, and so of its workers or threads."""
        self._batches.close()


def _endless(loader: Iterable[Any]) -> Generator[Any, None, None]:
    while True:
        yield from loader
