"""Timer of training from one loader in stretches, with the prefetcher of ``Run``."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Generator, Iterable, Sequence
from typing import Any, NamedTuple

from flatout.core.batches import batch_size_of
from flatout.data import InMemoryLoader, Prefetcher, clone_loader
from flatout.data.loader_class import base_of
from flatout.report.model import Pace
from flatout.training.job import Job
from flatout.tuning.timing import Block, synchronize

PREFETCHED = 2
"""Number of batches that a Prefetcher or an InMemoryLoader holds in advance."""

ALONE_SECONDS = 0.1
"""Shortest time for a measurement of the loader's own rate."""


class Stretch(NamedTuple):
    """Measured stretch.

    Attributes:
        seconds: wall time.
        waited: part of ``seconds`` spent on waiting for batches.
        samples: number of samples of all ranks.
        steps: number of batches.
        step_cpu: CPU seconds of this process between taking a batch and asking for the next one.
        load_cpu: CPU seconds of this process while waiting for batches.
        updates: seconds of waiting and of steps per batch, for each update.
    """

    seconds: float
    waited: float
    samples: int
    steps: int
    step_cpu: float = 0.0
    load_cpu: float = 0.0
    updates: tuple[tuple[float, float], ...] = ()


def pace_of(stretches: Iterable[Stretch]) -> Pace:
    """Return the means over the middle half of the stretches, by time, because outliers come from other processes.

    A single stretch has no spread, so the pace shows its updates in place of stretches.
    """
    stretches = tuple(stretches)
    ordered = sorted(stretches, key=lambda stretch: stretch.seconds / stretch.steps)
    outer = len(ordered) // 4
    middle = [stretch[:5] for stretch in ordered[outer : len(ordered) - outer]]
    seconds, waited, samples, steps, cpu = map(sum, zip(*middle, strict=True))
    times = [(s.waited / s.steps, (s.seconds - s.waited) / s.steps) for s in stretches]
    return Pace(
        step_ms=1e3 * (seconds - waited) / steps,
        load_ms=1e3 * waited / steps,
        samples_per_second=samples / seconds,
        cpu_ms=1e3 * cpu / steps,
        stretches=tuple(
            (1e3 * load, 1e3 * step) for load, step in (stretches[0].updates if len(times) == 1 else times)
        ),
    )


def workers_and_queue(job: Job, loader: Iterable[Any]) -> tuple[int, int]:
    """Return the number of batches that a loader makes at once, at least 1, and the number that it makes in advance."""
    base = base_of(loader)
    workers = 0 if base is None else base.num_workers
    queue = workers * (base.prefetch_factor or 0) if base is not None else 0
    if isinstance(loader, InMemoryLoader) or job.spec.device.type == "cuda":
        queue += PREFETCHED
    return max(1, workers), queue


class LoaderTimer:
    """Training from one loader, in turns with another, with waits and steps timed separately.

    All ranks train for the same number of batches, and the times are those of the slowest rank.

    Args:
        job: the job that steps the batches.
        loader: iterated again after its end, as in training. A loader with a base (``base_of``) is cloned, so that the
            user's own starts no workers. An InMemoryLoader is cloned, so that training is the first to run it.
    """

    def __init__(self, job: Job, loader: Iterable[Any]) -> None:
        self._job = job
        self._ranks = job.spec.ranks
        self._workers, self.queue = workers_and_queue(job, loader)
        """Number of batches that may be ready when a stretch begins, made during the other loader's turn."""
        if base_of(loader) is not None:
            loader = clone_loader(loader)
        if isinstance(loader, InMemoryLoader):
            loader = loader.clone()
        self.refill_seconds = 0.0
        """Seconds in which this queue fills at the rate of the latest stretch."""
        self._batches = _endless(Prefetcher(loader, job.spec.device))
        self._stretches: list[Stretch] = []
        self._round_seconds = math.inf
        self._is_started = False
        self._is_empty = True

    def empty_queue(self) -> None:
        """Take the batches that were made during the other loader's turn, without training.

        A full queue hides for many steps that a loader is slower than the step. With an empty queue, the steps wait for
        a slow loader immediately.
        """
        if self._is_started:  # before the start, the queue is empty
            for _ in range(self.queue):
                next(self._batches)
            self._is_empty = True

    def settle(self, steps: int, rest: float = 0.0) -> None:
        """Train without timing, until a step has its full speed after a change of the training.

        Args:
            steps: minimum of batches, in whole updates. The wait for the first batch of an empty queue must be untimed.
            rest: minimum of seconds, in which another loader's workers fill their queue and stop.
        """
        begin, settled, steps = self._ranks.now(), 0, max(steps, self._job.stepper.steps_to_settle)
        while settled < steps or self._ranks.now() < begin + rest:
            for _ in range(self._job.spec.accumulate):
                asked = time.perf_counter()
                batch = next(self._batches)
                if self._is_empty:
                    self._round_seconds = self._ranks.largest([time.perf_counter() - asked])[0]
                    self._is_empty = False
                self._job.stepper.step(batch)
                settled += 1
            synchronize(self._job.spec.device)
        self._is_started = self._is_started or settled > 0

    def stretch(self, steps: int, limit: float = math.inf) -> Block:
        """Train for ``steps`` batches or more, or to the end of the update in which ``limit`` seconds are over.

        Workers that are slower than the steps send their batches in rounds. A stretch therefore lasts for whole rounds
        of batches, or for the time that whole rounds take.

        Returns:
            A block with a single time, the mean over the batches. A quartile would hide waits for batches, because
            these are rare and long.
        """
        job, ranks = self._job, self._ranks
        rounds = math.ceil(steps / self._workers)
        synchronize(job.spec.device)
        start, cpu, samples, done = time.perf_counter(), time.process_time(), 0, 0
        waited = load_cpu = 0.0
        ends = [(start, waited)]
        took, next_look = 0.0, job.spec.accumulate

        def is_missing() -> bool:
            nonlocal took, next_look
            if done == 0 or done % job.spec.accumulate:
                return True
            if ranks.size == 1 or done >= next_look:  # several ranks look rarely, because each look takes time
                took, next_look = ranks.largest([time.perf_counter() - start])[0], 2 * done
            in_rounds = self._workers > 1 and done < rounds * self._workers and took < rounds * self._round_seconds
            return in_rounds or (done < steps and took < limit)

        while is_missing():
            asked, asked_cpu = time.perf_counter(), time.process_time()
            if done and done % job.spec.accumulate == 0:
                ends.append((asked, waited))
            batch = next(self._batches)
            waited += time.perf_counter() - asked
            load_cpu += time.process_time() - asked_cpu
            job.stepper.step(batch)
            samples += batch_size_of(batch)
            done += 1
        synchronize(job.spec.device)
        took, cpu = time.perf_counter() - start, time.process_time() - cpu
        own_updates = _updates([*ends, (start + took, waited)], job.spec.accumulate)
        own = [took, waited, cpu, load_cpu, *itertools.chain.from_iterable(own_updates)]
        took, waited, cpu, load_cpu, *times = ranks.largest(own)
        updates = tuple(zip(times[::2], times[1::2], strict=True))
        self._stretches.append(
            Stretch(took, waited, int(ranks.total(samples)), done, cpu - load_cpu, load_cpu, updates)
        )
        rounds = math.ceil(self.queue / self._workers)
        self.refill_seconds = min(self.queue * took / done, rounds * self._round_seconds)
        self._is_started, self._is_empty = True, False
        return Block((took / done,), cpu / done)

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
            took = self._ranks.largest([time.perf_counter() - start])[0]  # an epoch begins on all ranks or on none
        return self._ranks.total(samples) / took

    def discard(self) -> None:
        """Discard the stretches so far, because they were a warm-up."""
        self._stretches.clear()

    @property
    def busy(self) -> float:
        """Share of a core that this process keeps busy while it waits for batches; 1 without stretches."""
        waited = sum(stretch.waited for stretch in self._stretches)
        return sum(stretch.load_cpu for stretch in self._stretches) / waited if waited else 1.0

    @property
    def pace(self) -> Pace:
        """Mean pace of the stretches so far."""
        return pace_of(self._stretches)

    def close(self) -> None:
        """Close the loader's iterator, which ends its workers or threads."""
        self._batches.close()


def _updates(ends: Sequence[tuple[float, float]], steps: int) -> tuple[tuple[float, float], ...]:
    """Return the seconds of waiting and of steps per batch, for each update of ``steps`` batches.

    Args:
        ends: time and seconds waited so far, at the beginning and after each update.
        steps: batches of an update.
    """
    return tuple(
        ((waited - waited_before) / steps, (end - begin - (waited - waited_before)) / steps)
        for (begin, waited_before), (end, waited) in itertools.pairwise(ends)
    )


def _endless(loader: Iterable[Any]) -> Generator[Any, None, None]:
    while True:
        yield from loader
