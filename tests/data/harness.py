"""Simulated machines and loaders for the tests of the data path, independent of the machine's speed."""

from __future__ import annotations

import contextlib
import itertools
import math
import multiprocessing
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from flatout.core import machine
from flatout.data import (
    CachedDataset,
    InMemoryLoader,
    Prefetcher,
    Tuned,
    tune,
)
from flatout.data.normalize import _is_native
from flatout.data.prefetcher import _Ahead
from flatout.data.rate_trials import Try
from flatout.data.transfer import NativeCopier
from flatout.distributed.agreement import Agreement, decoded, encoded
from flatout.native import _host
from tests.clock import Clock, simulated_time
from tests.helpers import native_threads

PLENTY = 2**50
"""Bytes of memory, more than any test uses."""

TICK = 5e-3
"""Seconds between two readings of the simulated clock. Loading a batch takes at least one tick."""


@contextlib.contextmanager
def simulated_machine(cores: int = 2, memory: int = PLENTY, shared_memory: int = PLENTY) -> Iterator[Clock]:
    """Simulate the time and the resources that the tuner sees. All time except sleep keeps one core busy."""
    with (
        simulated_time(TICK) as clock,
        _resources(cores, memory, shared_memory),
        mock.patch("flatout.data.rate_trials.wanted_core_seconds", clock.core_seconds),
    ):
        yield clock


def _resources(cores: int, memory: int, shared_memory: int) -> Any:
    """Patch the resources that the tuner reads from the machine, which no public argument sets."""
    return mock.patch.multiple(
        "flatout.data.tuning",
        own_cores=lambda: cores,
        available_memory=lambda: memory,
        free_shared_memory=lambda: shared_memory,
    )


class SlowSamples(Dataset[torch.Tensor]):
    """Samples that sleep as if they waited for a disk. A lambda as the attribute prevents pickling."""

    def __init__(self, seconds: float, size: int = 512, attribute: Any = None) -> None:
        self.seconds = seconds
        self.size = size
        self.attribute = attribute

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.seconds)
        return torch.full((3,), float(index))


class ModelledLoader:
    """Model of a loader, which replaces the trials of a real loader.

    A batch takes ``seconds``, in which it needs the fraction ``busy`` of a core. All workers share ``cores``. A worker
    starts in ``start`` seconds. The training process needs ``receive`` seconds for each batch of a worker. Each
    ``bursts[0]``-th batch takes ``bursts[1]`` times as long as the others.
    """

    def __init__(
        self,
        seconds: float,
        busy: float = 0.0,
        cores: int = 8,
        start: float = 0.02,
        receive: float = 0.0,
        bursts: tuple[int, float] = (1, 1.0),
        batch_bytes: int = 1000,
    ) -> None:
        self.clock = Clock(tick=0.0)
        self.busy, self.cores, self.start, self.receive = busy, cores, start, receive
        every, factor = bursts
        self.times = [seconds * factor] + [seconds] * (every - 1)
        self.batch_bytes, self.device, self.start_method = batch_bytes, None, None

    @property
    def mean(self) -> float:
        return sum(self.times) / len(self.times)

    def rate(self, workers: int) -> float:
        at_once = min(workers, self.cores / self.busy) if self.busy else workers
        return min(at_once / self.mean, 1 / self.receive if self.receive else math.inf)

    def alone(self) -> Try:
        self.clock.now += self.mean + max(0.25, self.mean)
        return Try(0, 1 / self.mean, self.mean)

    def with_workers(self, workers: int) -> Try:
        rate = self.rate(workers)
        self.clock.now += 2 * workers * self.start + self.mean + 2 * workers / rate + max(0.25, workers / rate)
        return Try(workers, rate, workers * self.start + self.mean)

    def paced(self, workers: int, prefetch_factor: int, step_time: float, fill: float, at_least: int) -> float:
        asked, ready, waited = [0.0] * workers * prefetch_factor, list[float](), 0.0
        first = now = self.times[0] + fill
        for k in itertools.count():
            if k > at_least and now >= first + 0.75:
                break
            begun = max(asked[k], ready[k - workers] if k >= workers else 0.0)
            ready.append(begun + self.times[k % len(self.times)])
            if k:
                now += step_time
                took = max(self.receive, ready[k] - now)
                now, waited = now + took, waited + took
            asked.append(now)
        self.clock.now += workers * self.start + now
        return waited / (now - first)

    def start_otherwise(self, error: Exception) -> bool:
        return False


def tune_modelled(
    model: ModelledLoader,
    step: float,
    *,
    budget: float = 3.0,
    memory: int = PLENTY,
    shared_memory: int = PLENTY,
    dataset: Dataset[Any] | None = None,
    **options: Any,
) -> Tuned:
    """Tune a ``DataLoader``, with the trials and the clock of the model."""
    loader = DataLoader(dataset or TensorDataset(torch.zeros(1000)), 10, **options)
    with (
        mock.patch.object(time, "perf_counter", model.clock),
        mock.patch("flatout.data.tuning.Trials", return_value=model),
        _resources(model.cores, memory, shared_memory),
    ):
        return tune(loader, step, budget=budget)


class MachineFiles:
    """Files that describe the cores and memory of a machine: at first 4 cores of two hardware threads each."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.affinity: Sequence[int] = range(8)
        self.write("cpus", {f"cpu{cpu}/topology/thread_siblings_list": f"{cpu % 4},{cpu % 4 + 4}" for cpu in range(8)})
        self.write("proc", {"meminfo": "MemTotal: 9000 kB\nMemAvailable:    8000 kB", "self/cgroup": "0::/"})

    def write(self, folder: str, files: Mapping[str, str]) -> None:
        """Write files below ``cgroup``, ``cpus`` or ``proc``."""
        for name, text in files.items():
            file = self.root / folder / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"{text}\n")

    @contextlib.contextmanager
    def read(self) -> Iterator[None]:
        """Redirect ``machine`` to these files and to this affinity."""
        places = {"_CGROUP": "cgroup", "_CPUS": "cpus", "_PROC": "proc", "SHARED_MEMORY": "shm"}
        with (
            mock.patch.multiple(machine, **{name: self.root / folder for name, folder in places.items()}),
            mock.patch.object(os, "sched_getaffinity", self._allowed),
        ):
            yield

    def _allowed(self, pid: int) -> Sequence[int]:
        return self.affinity


@contextlib.contextmanager
def started_by(default: str, chosen: str) -> Iterator[None]:
    """Simulate a platform's default start method and the start method that the user has chosen."""
    methods = [default, *({"spawn", "fork"} - {default})]
    before = multiprocessing.get_start_method(allow_none=True)
    with mock.patch("multiprocessing.get_all_start_methods", return_value=methods):
        multiprocessing.set_start_method(chosen, force=True)
        try:
            yield
        finally:
            multiprocessing.set_start_method(before, force=True)


@contextlib.contextmanager
def impatient_trials() -> Iterator[None]:
    """Reduce the timeouts for hanging workers: half a second in trials, a tenth of a second in torch.

    The simulated machine has two cores, so that two workers hang.
    """
    with (
        _resources(2, PLENTY, PLENTY),
        mock.patch("flatout.data.rate_trials._PATIENCE", (0.5, 1)),
        mock.patch("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.1),
    ):
        yield


class CopyingPrefetcher(Prefetcher):
    """Prefetcher that runs the code path of a GPU, with the host in place of the device.

    The public constructor takes this path only for a CUDA device, so ``__iter__`` assembles the parts.
    """

    copier = NativeCopier

    def __iter__(self) -> Iterator[Any]:
        if self._ring is None:
            self._ring = _host.Ring(device=-1)
        iterator = _Ahead(self, self._source.open(), self.copier(self.device, self.depth, self._ring), self.depth)
        self._live.add(iterator)
        return iterator


@contextlib.contextmanager
def memory_left(memory: int = PLENTY, shared_memory: int = PLENTY) -> Iterator[None]:
    """Simulate the free memory that caches see. Public arguments can only reduce this memory."""
    with (
        mock.patch("flatout.data.cache.available_memory", return_value=memory),
        mock.patch("flatout.data.table.free_shared_memory", return_value=shared_memory),
    ):
        yield


def columns_of(cache: CachedDataset | InMemoryLoader) -> list[torch.Tensor]:
    """Return the tensors in which a cache, or a loader over a cache, stores samples. The samples are copies."""
    if isinstance(cache, CachedDataset):
        return cache._table.columns
    return [part for (part,) in cache._columns]


def begin_row(cached: CachedDataset, row: int) -> None:
    """Leave a row in the state of a write that its process did not finish."""
    cached._table._states.claim(row)


def rings_of(loader: InMemoryLoader) -> list[_host.Ring]:
    """Return the rings of a loader's batches, which count allocations and idle slots."""
    return list(loader._rings.values())


def eventually(holds: Callable[[], Any]) -> bool:
    """Return whether ``holds()`` becomes true within a minute, as the end of a thread or process takes time."""
    deadline = time.monotonic() + 60
    while not holds() and time.monotonic() < deadline:
        threading.Event().wait(0.001)
    return bool(holds())


def threads_end() -> bool:
    """Return whether flatout's threads end. A thread may outlive ``close`` for a moment."""
    return eventually(lambda: not native_threads())


def kernels_there(there: bool) -> Any:
    """Simulate a device with or without flatout's kernels, as builds and GPUs differ."""
    return mock.patch("flatout.data.normalize.has_kernels", return_value=there)


def is_normalized_by_kernel(device: torch.device, channels: int) -> bool:
    """Return True if a kernel normalizes images on a device with kernels. Results are the same bits without it."""
    with kernels_there(True):
        return _is_native(device, channels)


class RecordedRanks(Agreement):
    """Ranks that run one after another in this process: rank 0 first, whose values the others then get.

    Args:
        rank: number of the rank.
        size: number of ranks.
        values: values of rank 0, encoded as for a message, in order.
    """

    def __init__(self, rank: int, size: int, values: list[bytes]) -> None:
        self.rank, self.size = rank, size
        self._values = values
        self._next = 0

    def first(self, value: Any) -> Any:
        if self.rank == 0:
            self._values.append(encoded(value))
        self._next += 1
        return decoded(self._values[self._next - 1])


def on_ranks(size: int, program: Callable[[Agreement], Any]) -> list[Any]:
    """Return the results of a program on all ranks. Each rank starts with its own random states."""
    values: list[bytes] = []
    results = []
    for rank in range(size):
        seed_all(1000 * rank + 5)
        ranks = RecordedRanks(rank, size, values)
        results.append(program(ranks))
        assert ranks._next == len(values), "all ranks must agree equally often"
    return results


def seed_all(seed: int) -> None:
    """Seed the global generators."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
