"""Timing of work on a device: seconds of a call, and blocks of updates."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from flatout.distributed.agreement import ALONE, Agreement
from flatout.report.model import Statistic

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
