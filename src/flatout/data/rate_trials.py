"""A loader tried with other settings for a moment, and nothing lost by it."""

from __future__ import annotations

import itertools
import multiprocessing
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader

from flatout.core.batches import tensors_of
from flatout.core.machine import private_memory, wanted_core_seconds
from flatout.data.loaders import clone_loader
from flatout.data.remote import InWorker

PREFETCH = 2
"""Batches ahead per worker: torch's default."""
LOOK = 0.25
"""Seconds of one trial as fast as can be, at most half a dozen of which find the number of workers."""
STROLL = 0.75
"""Seconds of a trial at the step's pace."""
_PATIENCE = 10.0, 20
"""Seconds, and batch times, after which workers that send nothing hang: in a lock that was held when they forked."""


@dataclass(frozen=True)
class Try:
    """One number of workers, measured."""

    workers: int
    batches_per_second: float
    """As fast as the loader can, after its start."""
    start_seconds: float
    """From ``iter`` to the first batch."""
    worker_bytes: int = 0
    """Memory that each worker process has for itself; 0 where that cannot be known."""


class Trials:
    """Clones of a loader, tried over one stream of batches of its indices.

    Args:
        loader: the loader.
        is_warm: True if this process has loaded batches before.

    Attributes:
        start_method: how workers are started instead of the loader's own way; None: that way.
        busy: share of a core that loading keeps busy in one process.
        batch_bytes: bytes of a batch.
        device: where batches are if not on the CPU; None otherwise.
    """

    def __init__(self, loader: DataLoader, *, is_warm: bool = False) -> None:
        self._is_warm = is_warm
        self.start_method: str | None = None
        self.busy = 0.0
        self.batch_bytes = 0
        self.device: torch.device | None = None
        self._patience = _PATIENCE[0]
        self._seconds = 0.0
        self._loader = loader
        self._stream = "sampler" if loader.batch_sampler is None else "batch_sampler"
        self._indices = _endless(getattr(loader, self._stream))

    def alone(self) -> Try:
        """Load in this process, for a moment after the first batch; of slow batches one more, or only the first."""
        begin, had = time.perf_counter(), wanted_core_seconds()
        batches = iter(self._made(0))
        tensors = tensors_of(next(batches))
        start = seconds = time.perf_counter() - begin
        loaded = 1
        self.batch_bytes = sum(tensor.nbytes for tensor in tensors)
        self.device = next((tensor.device for tensor in tensors if tensor.device.type != "cpu"), None)
        if not self._is_warm or start < LOOK:
            begin, had = time.perf_counter(), wanted_core_seconds()
            loaded = _load_for(batches, LOOK, at_least=1)
            seconds = time.perf_counter() - begin
        self._seconds = seconds / loaded
        self._patience = _PATIENCE[0] + _PATIENCE[1] * self._seconds
        self.busy = min(1.0, (wanted_core_seconds() - had) / seconds)
        return Try(0, loaded / seconds, start)

    def with_workers(self, workers: int) -> Try:
        """Load with workers: what they had ready when they began is not counted, one round of all of them is.

        Workers whose batches take long have at most one ready each.
        """
        begin = time.perf_counter()
        batches = iter(self._made(workers, prefetch_factor=PREFETCH))
        next(batches)
        start = time.perf_counter() - begin
        rounds = 1 if self._seconds > LOOK else PREFETCH
        for _ in itertools.islice(batches, workers * rounds - 1):
            pass
        begin = time.perf_counter()
        loaded = _load_for(batches, LOOK, at_least=workers)
        seconds = time.perf_counter() - begin
        memory = max(private_memory(worker.pid) for worker in batches._workers)
        return Try(workers, loaded / seconds, start, memory)

    def paced(self, workers: int, prefetch_factor: int, step_time: float, fill: float, at_least: int) -> float:
        """Wait ``step_time`` between batches, from a queue that had ``fill`` seconds to fill: share of time waited."""
        batches = iter(self._made(workers, prefetch_factor=prefetch_factor))
        next(batches)
        time.sleep(fill)
        waited, steps, begin = 0.0, 0, time.perf_counter()
        while steps < at_least or time.perf_counter() < begin + STROLL:
            time.sleep(step_time)
            asked = time.perf_counter()
            next(batches)
            waited += time.perf_counter() - asked
            steps += 1
        return waited / (time.perf_counter() - begin)

    def start_otherwise(self, error: Exception) -> bool:
        """Whether workers that failed to start may start another way: forked, as the user did not rule out."""
        default = multiprocessing.get_all_start_methods()[0]
        if (
            self.start_method is not None
            or self._loader.multiprocessing_context is not None
            or default == "fork"
            or multiprocessing.get_start_method(allow_none=True) not in (None, default)
            or sys.platform != "linux"
            or torch.cuda.is_initialized()
            or "pickle" not in f"{type(error).__name__} {error}".lower()
        ):
            return False
        self.start_method = "fork"
        return True

    def _made(self, workers: int, **settings: Any) -> Any:
        settings |= {"num_workers": workers, "generator": torch.Generator(), self._stream: self._indices}
        if workers == 0:
            return clone_loader(self._loader, **settings)
        if self.start_method is not None:
            settings["multiprocessing_context"] = self.start_method
        settings |= {"persistent_workers": False, "worker_init_fn": InWorker(self._loader.worker_init_fn)}
        settings["timeout"] = self._loader.timeout or self._patience
        return clone_loader(self._loader, **settings)


def _endless(indices: Iterable[Any]) -> Iterator[Any]:
    while True:
        yield from indices


def _load_for(batches: Iterator[Any], seconds: float, at_least: int) -> int:
    """Load for some time, and at least some batches: how many."""
    end = time.perf_counter() + seconds
    loaded = 0
    while loaded < at_least or time.perf_counter() < end:
        next(batches)
        loaded += 1
    return loaded
