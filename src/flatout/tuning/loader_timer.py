"""Timer of training from one loader in stretches, with the prefetcher of ``Run``."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable
from typing import Any, NamedTuple

from flatout.core.batches import batch_size_of
from flatout.data import InMemoryLoader, Prefetcher, clone_loader
from flatout.data.loader_class import base_of
from flatout.report.model import Pace
from flatout.training.job import Job
from flatout.tuning.block import Block
from flatout.tuning.timing import synchronize

PREFETCHED = 2
"""Number of batches that a Prefetcher or an InMemoryLoader holds in advance."""

ALONE_SECONDS = 0.1
"""Shortest time for a measurement of the loader's own rate."""


class Stretch(NamedTuple):
    """Measured stretch: seconds, the part of them spent on waiting, samples and batches."""

    seconds: float
    waited: float
    samples: int
    steps: int


def pace_of(stretches: Iterable[Stretch]) -> Pace:
    """Return the means over the middle half of the stretches, by time, because outliers come from other processes."""
    ordered = sorted(stretches, key=lambda stretch: stretch.seconds / stretch.steps)
    outer = len(ordered) // 4
    seconds, waited, samples, steps = map(sum, zip(*ordered[outer : len(ordered) - outer], strict=True))
    return Pace(
        step_ms=1e3 * (seconds - waited) / steps,
        load_ms=1e3 * waited / steps,
        samples_per_second=samples / seconds,
    )


class LoaderTimer:
    """Training from one loader, in turns with another, with waits and steps timed separately.

    Args:
        job: the job that steps the batches.
        loader: iterated again after its end, as in training. A loader with a base (``base_of``) is cloned, so that the
            user's own starts no workers. An InMemoryLoader is cloned, so that training is the first to run it.
    """

    def __init__(self, job: Job, loader: Iterable[Any]) -> None:
        self._job = job
        self.queue = 0
        """Number of batches that may be ready when a stretch begins, made during the other loader's turn."""
        self._workers = 1
        base = base_of(loader)
        if base is not None:
            loader = clone_loader(loader)
            self._workers = max(1, base.num_workers)
            self.queue = base.num_workers * (base.prefetch_factor or 0)
        if isinstance(loader, InMemoryLoader):
            loader = loader.clone()
        if isinstance(loader, InMemoryLoader) or job.spec.device.type == "cuda":
            self.queue += PREFETCHED
        self.refill_seconds = 0.0
        """Seconds in which this queue fills at the rate of the latest stretch."""
        self._batches = _endless(Prefetcher(loader, job.spec.device))
        self._stretches: list[Stretch] = []

    def stretch(self, steps: int, settle: int, rest: float = 0.0) -> Block:
        """Train for ``steps`` batches, after some untimed ones.

        Args:
            steps: number of timed batches.
            settle: minimum of untimed batches, in whole updates.
            rest: minimum of untimed seconds, in which another loader's workers fill their queue and stop.

        Returns:
            A block whose only time is the mean of the timed batches. Waits for batches are rare and long, and a
            quartile would hide them.
        """
        begin, settled = time.perf_counter(), 0
        while settled < settle or time.perf_counter() < begin + rest:
            for _ in range(self._job.spec.accumulate):
                self._job.stepper.step(next(self._batches))
            synchronize(self._job.spec.device)
            settled += self._job.spec.accumulate
        synchronize(self._job.spec.device)
        start, cpu, waited, samples = time.perf_counter(), time.process_time(), 0.0, 0
        for _ in range(steps):
            asked = time.perf_counter()
            batch = next(self._batches)
            waited += time.perf_counter() - asked
            self._job.stepper.step(batch)
            samples += batch_size_of(batch)
        synchronize(self._job.spec.device)
        took, cpu = time.perf_counter() - start, time.process_time() - cpu
        self._stretches.append(Stretch(took, waited, samples, steps))
        self.refill_seconds = self.queue * took / steps
        return Block((took / steps,), cpu / steps)

    @property
    def fewest_alone(self) -> int:
        """Minimum number of batches that ``alone`` takes."""
        return self.queue + 1 + self._workers

    def alone(self) -> float:
        """Return the samples per second of the loader without training between its batches.

        Batches that are ready, or made while workers start, are not timed. Workers finish in rounds, so whole rounds
        are timed.
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
        """Mean pace of the stretches so far."""
        return pace_of(self._stretches)

    def close(self) -> None:
        """Close the loader's iterator, and so its workers or threads."""
        self._batches.close()


def _endless(loader: Iterable[Any]) -> Generator[Any, None, None]:
    while True:
        yield from loader
