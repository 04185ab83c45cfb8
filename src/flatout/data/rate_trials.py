"""Short trials of a loader with other settings. No sample is lost."""

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
"""Seconds of one trial at full speed. At most half a dozen such trials find the number of workers."""
STROLL = 0.75
"""Seconds of a trial at the pace of the training step."""
_PATIENCE = 10.0, 20
"""Timeout of workers that send nothing: seconds, and additional batch times.

A worker hangs if a lock that it needs was held when the worker was forked.
"""


@dataclass(frozen=True)
class Try:
    """Measurement of a loader with one number of workers."""

    workers: int
    batches_per_second: float
    """Rate at full speed, after the start."""
    start_seconds: float
    """Seconds from ``iter`` to the first batch."""
    worker_bytes: int = 0
    """Largest private memory of a worker process; 0 if unknown, or without workers."""


class Trials:
    """Trials of clones of a loader, over one stream of batches of its indices.

    Args:
        loader: the loader.
        is_warm: True if this process has loaded batches before.

    Attributes:
        start_method: start method of workers in place of the loader's own; None: the loader's own.
        busy: share of a core that loading keeps busy in one process.
        batch_bytes: bytes of a batch.
        device: device of the batches; None for the CPU.
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
        """Measure loading in this process.

        The measurement begins after the first batch, and lasts for at least one batch. If this process is warm and
        batches are slow, the first batch is the only one.
        """
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
        """Measure loading with workers.

        Batches that were made ahead during the start are not counted: ``PREFETCH`` of each worker, or one if batches
        are slow. After these, at least one batch per worker is counted.
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
        """Measure the share of time that steps wait for their batch.

        Args:
            workers: number of workers.
            prefetch_factor: batches ahead per worker.
            step_time: seconds between a batch and the request for the next one.
            fill: seconds in which the queue fills before the first step.
            at_least: smallest number of steps.
        """
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
        """Set another start method after workers failed to start. Return False if there is no other method.

        The other method is fork, after a pickling error on Linux. A method that the user has chosen is kept. Fork is
        not used after this process has initialized CUDA.
        """
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
    """Load batches for ``seconds``, and ``at_least`` this many. Return their number."""
    end = time.perf_counter() + seconds
    loaded = 0
    while loaded < at_least or time.perf_counter() < end:
        next(batches)
        loaded += 1
    return loaded
