"""Stopwatch: seconds, waits and memory of updates, whose batches come from a list or from a loader."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.autograd import profiler

from flatout.core.batches import batch_size_of
from flatout.core.kineto import allocated_peak, quiet_allocator, quiet_kineto
from flatout.data import InMemoryLoader, Prefetcher
from flatout.data.loader_class import base_of
from flatout.data.prefix import for_trial
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

PREFETCHED = 2
"""Number of batches that a Prefetcher or an InMemoryLoader holds in advance."""

ALONE_SECONDS = 0.1
"""Shortest time for a measurement of the loader's own rate."""

IDLE_BELOW = 0.1
"""Share of a core below which making batches counts as waiting, for a disk or a network."""

FEWEST_FOR_QUARTILE = 4
"""Fewest updates of a block that its lower quartile represents. The mean represents shorter blocks."""


@dataclass(frozen=True)
class Block:
    """Times of consecutive updates, in seconds.

    Attributes:
        wall: wall time of each update. On a GPU, it is the time between two events on the stream.
        cpu: CPU time of this process per update, summed over its threads.
        sleeps: voluntary context switches of the training's thread. The thread makes one when it sleeps, or waits for a
            lock, a device or another thread. None if the system does not count them.
        waits: part of each wall time that is spent on waiting for batches; empty if the batches come from a list.
        load_cpu: part of ``cpu`` that is spent on waiting for batches.
        samples: number of samples of all ranks in the block; 0 if unknown.
    """

    wall: tuple[float, ...]
    cpu: float
    sleeps: int | None = None
    waits: tuple[float, ...] = ()
    load_cpu: float = 0.0
    samples: int = 0

    @property
    def mean(self) -> float:
        """Mean wall time of an update."""
        return sum(self.wall) / len(self.wall)

    def scaled(self, factor: float) -> Block:
        """Return the block with all times multiplied by ``factor``."""
        wall, waits = (tuple(factor * each for each in times) for times in (self.wall, self.waits))
        return replace(self, wall=wall, waits=waits, cpu=factor * self.cpu, load_cpu=factor * self.load_cpu)

    def time(self, statistic: Statistic) -> float:
        """Return the time of an update that represents the block: the lower quartile, or the mean CPU time.

        Interference adds time and never removes any. The lower quartile of short updates is therefore nearly free of
        interference, and CPU time of a single thread is nearly free of it at any length. A quartile would hide waits
        for batches, because these are rare and long, so the mean represents updates from a loader.
        """
        if statistic == "cpu":
            return self.cpu
        if self.waits or len(self.wall) < FEWEST_FOR_QUARTILE:
            return self.mean
        return sorted(self.wall)[round((len(self.wall) - 1) / 4)]


Measure = Callable[[int], Block]
"""Function that measures block ``i`` with one configuration."""


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
    update: Callable[[int], object], updates: Iterable[int], device: torch.device, ranks: Agreement = ALONE
) -> Block:
    """Run ``update`` for each number in ``updates``, and return the times. Each time is that of the slowest rank.

    On a GPU, events on the current stream measure the times. The block waits for the GPU only at its start and end.
    """
    synchronize(device)
    before, cpu = _sleeps(), time.process_time()
    walls = _between_events(update, updates, device) if device.type == "cuda" else _between_readings(update, updates)
    cpu, after = time.process_time() - cpu, _sleeps()
    sleeps = math.inf if before is None or after is None else after - before  # infinite if the system does not count
    *agreed, cpu, sleeps = ranks.largest([*walls, cpu, sleeps])
    return Block(tuple(agreed), cpu / len(agreed), None if sleeps == math.inf else int(sleeps))


def _between_readings(update: Callable[[int], object], updates: Iterable[int]) -> list[float]:
    readings = [time.perf_counter()]
    for i in updates:
        update(i)
        readings.append(time.perf_counter())
    return [end - start for start, end in itertools.pairwise(readings)]


def _between_events(update: Callable[[int], object], updates: Iterable[int], device: torch.device) -> list[float]:
    stream = torch.cuda.current_stream(device)
    events = [torch.cuda.Event(enable_timing=True)]
    events[0].record(stream)
    for i in updates:
        update(i)
        events.append(torch.cuda.Event(enable_timing=True))
        events[-1].record(stream)
    torch.cuda.synchronize(device)
    return [start.elapsed_time(end) / 1e3 for start, end in itertools.pairwise(events)]


def _sleeps() -> int | None:
    """Return the voluntary context switches of this thread so far; None if the system does not count them."""
    this_thread = getattr(resource, "RUSAGE_THREAD", None)  # on Linux
    return None if this_thread is None else resource.getrusage(this_thread).ru_nvcsw


def pace_of(blocks: Iterable[Block], steps: int) -> Pace:
    """Return the means over the middle half of the blocks, by time, because outliers come from other processes.

    A single block has no spread, so the pace shows its updates in place of blocks.

    Args:
        blocks: blocks of a training.
        steps: batches of an update.
    """
    blocks = tuple(blocks)
    ordered = sorted(blocks, key=lambda block: block.mean)
    outer = len(ordered) // 4
    middle = ordered[outer : len(ordered) - outer]
    batches = steps * sum(len(block.wall) for block in middle)
    total, waited = sum(sum(block.wall) for block in middle), sum(sum(block.waits) for block in middle)
    cpu = sum((block.cpu - block.load_cpu) * len(block.wall) for block in middle)
    if len(blocks) == 1:
        times = list(itertools.zip_longest(blocks[0].wall, blocks[0].waits, fillvalue=0.0))
    else:
        times = [(block.mean, sum(block.waits) / len(block.wall)) for block in blocks]
    return Pace(
        step_ms=1e3 * (total - waited) / batches,
        load_ms=1e3 * waited / batches,
        samples_per_second=sum(block.samples for block in middle) / total,
        cpu_ms=1e3 * cpu / batches,
        stretches=tuple((1e3 * wait / steps, 1e3 * (wall - wait) / steps) for wall, wait in times),
    )


def workers_and_queue(job: Job, loader: Iterable[Any]) -> tuple[int, int]:
    """Return the number of batches that a loader makes at once, at least 1, and the number that it makes in advance."""
    base = base_of(loader)
    workers = 0 if base is None else base.num_workers
    queue = workers * (base.prefetch_factor or 0) if base is not None else 0
    if isinstance(loader, InMemoryLoader) or job.spec.device.type == "cuda":
        queue += PREFETCHED
    return max(1, workers), queue


class Stopwatch:
    """Training whose waits and steps are timed, possibly in turns with a training from another loader.

    All ranks train for the same number of batches, and the times are those of the slowest rank.

    Args:
        job: the job that steps the batches.
        loader: iterated again after its end by the prefetcher of ``Run``, as in training. A loader with a base
            (``base_of``) is cloned, so that the user's own starts no workers. An InMemoryLoader is cloned, so that
            training is the first to run it. None stands for the batches of the trials, for a loader that must not be
            read.

    Attributes:
        queue: number of batches that may be ready when a block begins, made during the other loader's turn.
        refill_seconds: seconds in which this queue fills at the rate of the latest block.
        blocks: the timed blocks.
    """

    def __init__(self, job: Job, loader: Iterable[Any] | None) -> None:
        self._job = job
        self._ranks = job.spec.ranks
        self._workers, self.queue = (1, 0) if loader is None else workers_and_queue(job, loader)
        if loader is not None and base_of(loader) is not None:
            loader = for_trial(loader)
        if isinstance(loader, InMemoryLoader):
            loader = loader.clone()
        self.refill_seconds = 0.0
        self._batches = _endless(job.data.batches if loader is None else Prefetcher(loader, job.spec.device))
        self.blocks: list[Block] = []
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

    def block(self, steps: int, limit: float = math.inf) -> Block:
        """Train for ``steps`` batches or more, or to the end of the update in which ``limit`` seconds are over.

        Workers that are slower than the steps send their batches in rounds. A block therefore lasts for whole rounds of
        batches, or for the time that whole rounds take.
        """
        job, ranks = self._job, self._ranks
        waits: list[float] = []
        samples, load_cpu = 0, 0.0

        def update(_: int) -> None:
            nonlocal samples, load_cpu
            waits.append(0.0)
            for _ in range(job.spec.accumulate):
                asked, asked_cpu = time.perf_counter(), time.process_time()
                batch = next(self._batches)
                waits[-1] += time.perf_counter() - asked
                load_cpu += time.process_time() - asked_cpu
                job.stepper.step(batch)
                samples += batch_size_of(batch)

        timed = timed_block(update, self._updates(steps, limit), job.spec.device, ranks)
        *agreed, load_cpu = ranks.largest([*waits, load_cpu / len(waits)])
        block = replace(timed, waits=tuple(agreed), load_cpu=load_cpu, samples=int(ranks.total(samples)))
        self.blocks.append(block)
        rounds = math.ceil(self.queue / self._workers)
        self.refill_seconds = min(self.queue * block.mean / job.spec.accumulate, rounds * self._round_seconds)
        self._is_started, self._is_empty = True, False
        return block

    def _updates(self, steps: int, limit: float) -> Iterator[int]:
        """Yield the numbers of updates until a block is long enough. Several ranks agree on its end."""
        rounds, accumulate = math.ceil(steps / self._workers), self._job.spec.accumulate
        start, took, next_look = time.perf_counter(), 0.0, accumulate
        for update in itertools.count():
            yield update
            done = (update + 1) * accumulate
            if done < steps and limit == math.inf:
                continue
            if self._ranks.size == 1 or done >= next_look:  # several ranks look rarely, because each look takes time
                took, next_look = self._ranks.largest([time.perf_counter() - start])[0], 2 * done
            in_rounds = self._workers > 1 and done < rounds * self._workers and took < rounds * self._round_seconds
            if not in_rounds and (done >= steps or took >= limit):
                return

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

    @property
    def busy(self) -> float:
        """Share of a core that this process keeps busy while it waits for batches; 1 without waits."""
        waited = sum(sum(block.waits) for block in self.blocks)
        return sum(block.load_cpu * len(block.wall) for block in self.blocks) / waited if waited else 1.0

    @property
    def pace(self) -> Pace:
        """Mean pace of the blocks so far."""
        return pace_of(self.blocks, self._job.spec.accumulate)

    def close(self) -> None:
        """Close the loader's iterator, which ends its workers or threads."""
        self._batches.close()


@contextmanager
def in_turns(
    old: Stopwatch,
    new: Stopwatch,
    progress: Progress,
    *,
    steps: int,
    limit: float,
    settle: int,
    busy: float = 1.0,
    on_for_new: Sequence[Candidate] = (),
    scale: float = 1.0,
) -> Iterator[tuple[Measure, Measure]]:
    """Yield two functions that measure a block, from the old and from the new loader.

    After a change of loaders, a loop empties its queue. The loop then trains untimed until its queue is filled as in a
    long training. The untimed part also lasts until the other loader's workers have filled their queue, because busy
    workers may slow down everything else. A block right after a block of the same loop needs no such preparation.

    Args:
        old: the baseline.
        new: the candidate.
        progress: shown between blocks.
        steps: batches of a block.
        limit: seconds after which a block ends early.
        settle: untimed batches before each block. Use 0 for batches that take so long that caches do not matter.
        busy: share of a core that one process keeps busy while it makes batches. Workers that compute slow down the
            step until they have filled their queue.
        on_for_new: candidates that are on only while ``new`` runs.
        scale: samples per batch of ``new``, relative to ``old``. Times of ``old`` are multiplied by it.
    """
    latest: Stopwatch | None = None

    def block(watch: Stopwatch, other: Stopwatch) -> Block:
        nonlocal latest
        progress.refresh()
        untimed, rest = settle, 0.0
        if latest is not watch:
            rest = 0.0 if latest is None else other.refill_seconds
            watch.empty_queue()
            if watch.queue:
                untimed = max(untimed, watch.queue if busy >= IDLE_BELOW else 1)
        if not settle:
            time.sleep(rest)
            rest = 0.0
        watch.settle(untimed, rest)
        latest = watch
        return watch.block(steps, limit)

    def measure_old(_: int) -> Block:
        for candidate in reversed(on_for_new):
            candidate.disable()
        return block(old, new).scaled(scale)

    def measure_new(_: int) -> Block:
        for candidate in on_for_new:
            candidate.enable()
        return block(new, old)

    try:
        yield measure_old, measure_new
    finally:
        try:
            old.close()
        finally:
            new.close()


@dataclass(frozen=True)
class LoaderComparison:
    """Trial of a loader against another, with the same steps.

    Attributes:
        old: the baseline.
        before: pace of the baseline.
        after: pace of the candidate.
        gain: speed of the candidate relative to the baseline.
        floor: noise of the baseline against itself.
        pair_seconds: seconds of a pair.
    """

    old: Iterable[Any]
    before: Pace
    after: Pace
    gain: Gain
    floor: NoiseFloor
    pair_seconds: float


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


def _endless(loader: Iterable[Any]) -> Generator[Any, None, None]:
    while True:
        yield from loader
