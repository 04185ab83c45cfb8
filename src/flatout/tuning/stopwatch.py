"""Stopwatch: seconds, waits and memory of updates, whose batches come from a list or from a loader."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch.autograd import profiler

from flatout.core.batches import batch_size_of
from flatout.core.kineto import allocated_peak, quiet_allocator, quiet_kineto
from flatout.data import InMemoryLoader, Prefetcher, clone_loader
from flatout.data.loader_class import base_of
from flatout.distributed.agreement import ALONE, Agreement
from flatout.report.model import Gain, Pace, Statistic
from flatout.techniques import Candidate
from flatout.training.job import Job
from flatout.tuning.progress import Progress
from flatout.tuning.statistics import NoiseFloor

try:
    import resource
except ImportError:  # on Windows
    resource = None  # type: ignore[assignment]


def seconds(work: Callable[[], object], device: torch.device, ranks: Agreement = ALONE) -> float:
    """Return the seconds that ``work()`` and its operations on the device take on the slowest rank."""
    synchronize(device)
    start = time.perf_counter()
    work()
    synchronize(device)
    return ranks.largest([time.perf_counter() - start])[0]


def synchronize(device: torch.device) -> None:
    """Wait for everything that is queued on a CUDA device. Other devices have no queue."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed_block(
    update: Callable[[int], object], updates: range, device: torch.device, ranks: Agreement = ALONE
) -> Block:
    """Run ``update`` for each number in ``updates``, and return the times. Each time is that of the slowest rank.

    On a GPU, events on the current stream measure the times. The block waits for the GPU only at its start and end.
    """
    synchronize(device)
    before, cpu = _waits(), time.process_time()
    walls = _between_events(update, updates, device) if device.type == "cuda" else _between_readings(update, updates)
    cpu, after = time.process_time() - cpu, _waits()
    waits = math.inf if before is None or after is None else after - before  # infinite if the system does not count
    *agreed, cpu, waits = ranks.largest([*walls, cpu, waits])
    return Block(tuple(agreed), cpu / len(updates), None if waits == math.inf else int(waits))


def _between_readings(update: Callable[[int], object], updates: range) -> tuple[float, ...]:
    readings = [time.perf_counter()]
    for i in updates:
        update(i)
        readings.append(time.perf_counter())
    return tuple(end - start for start, end in itertools.pairwise(readings))


def _between_events(update: Callable[[int], object], updates: range, device: torch.device) -> tuple[float, ...]:
    stream = torch.cuda.current_stream(device)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(len(updates) + 1)]
    events[0].record(stream)
    for event, i in zip(events[1:], updates, strict=True):
        update(i)
        event.record(stream)
    torch.cuda.synchronize(device)
    return tuple(start.elapsed_time(end) / 1e3 for start, end in itertools.pairwise(events))


def _waits() -> int | None:
    """Return the voluntary context switches of this thread so far; None if the system does not count them."""
    this_thread = getattr(resource, "RUSAGE_THREAD", None)  # on Linux
    return None if this_thread is None else resource.getrusage(this_thread).ru_nvcsw


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


def step_memory(
    step: Callable[[], object], device: torch.device, *, is_warm: bool = False, ranks: Agreement = ALONE
) -> int | None:
    """Return the peak memory of a step in bytes, above the memory that is allocated between steps.

    On CUDA the caching allocator counts the bytes, on the CPU torch's profiler.

    Args:
        step: a function that runs a step. It runs twice, and the second run counts, because the first run creates
            gradients and optimizer state.
        device: where the step runs.
        is_warm: True if gradients and optimizer state exist. Then the step runs once.
        ranks: the ranks that run the step. The largest memory counts.

    Returns:
        The bytes; None on the CPU while another profiler runs, because torch allows only one.
    """
    if device.type == "cuda":
        if not is_warm:
            step()
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        step()
        torch.cuda.synchronize(device)
        return int(ranks.largest([torch.cuda.max_memory_allocated(device) - before])[0])
    if not ranks.all_hold(not profiler._is_profiler_enabled):
        return None
    with quiet_kineto(), quiet_allocator(), profiler.profile(use_cpu=True, profile_memory=True) as profile:
        if not is_warm:
            step()
        with profiler.record_function("flatout.measured"):
            step()
    return int(ranks.largest([allocated_peak(profile, "flatout.measured", device)])[0])


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


IDLE_BELOW = 0.1
"""Share of a core below which making batches counts as waiting, for a disk or a network."""


@dataclass(frozen=True)
class LoaderComparison:
    """Trial of a loader against another, with the same steps.

    Attributes:
        old: the baseline.
        new: the candidate.
        before: pace of the baseline.
        after: pace of the candidate.
        gain: speed of the candidate relative to the baseline.
        floor: noise of the baseline against itself.
        pair_seconds: seconds of a pair.
    """

    old: Iterable[Any]
    new: Iterable[Any]
    before: Pace
    after: Pace
    gain: Gain
    floor: NoiseFloor
    pair_seconds: float


class LoaderLoops:
    """Training from an old and from a new loader, in turns.

    After a change of loaders, a loop empties its queue. The loop then trains untimed until its queue is filled as in a
    long training. The untimed part also lasts until the other loader's workers have filled their queue, because busy
    workers may slow down everything else. A stretch right after a stretch of the same loop needs no such preparation.

    Args:
        old: the baseline.
        new: the candidate.
        progress: shown between stretches.
        steps: batches of a stretch.
        limit: seconds after which a stretch ends early.
        settle: untimed batches before each stretch. Use 0 for batches that take so long that caches do not matter.
        busy: share of a core that one process keeps busy while it makes batches. Workers that compute slow down the
            step until they have filled their queue.
        on_for_new: candidates that are on only while ``new`` runs.
        scale: samples per batch of ``new``, relative to ``old``. Times of ``old`` are multiplied by it.
    """

    def __init__(
        self,
        old: LoaderTimer,
        new: LoaderTimer,
        progress: Progress,
        *,
        steps: int,
        limit: float,
        settle: int,
        busy: float = 1.0,
        on_for_new: Sequence[Candidate] = (),
        scale: float = 1.0,
    ) -> None:
        self._old, self._new, self._progress = old, new, progress
        self._steps, self._limit, self._settle = steps, limit, settle
        self._is_computing = busy >= IDLE_BELOW
        self._on_for_new = on_for_new
        self._scale = scale
        self._latest: LoaderTimer | None = None

    def old(self, _: int) -> Block:
        """Measure a stretch of the baseline."""
        for candidate in reversed(self._on_for_new):
            candidate.disable()
        return self._stretch(self._old, self._new).scaled(self._scale)

    def new(self, _: int) -> Block:
        """Measure a stretch of the candidate."""
        for candidate in self._on_for_new:
            candidate.enable()
        return self._stretch(self._new, self._old)

    def close(self) -> None:
        """Close both loaders."""
        try:
            self._old.close()
        finally:
            self._new.close()

    def _stretch(self, timer: LoaderTimer, other: LoaderTimer) -> Block:
        self._progress.refresh()
        settle, rest = self._settle, 0.0
        if self._latest is not timer:
            rest = 0.0 if self._latest is None else other.refill_seconds
            timer.empty_queue()
            if timer.queue:
                settle = max(settle, timer.queue if self._is_computing else 1)
        if not self._settle:
            time.sleep(rest)
            rest = 0.0
        timer.settle(settle, rest)
        self._latest = timer
        return timer.stretch(self._steps, self._limit)
