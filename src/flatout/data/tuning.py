"""``tune``: the fewest worker processes of a ``DataLoader`` that keep up with a step, found by trying."""

from __future__ import annotations

import itertools
import math
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from flatout.data.batch import tensors_of
from flatout.data.generators import RandomState
from flatout.data.loaders import clone_loader, is_rewindable
from flatout.data.machine import available_memory, free_shared_memory, usable_cores

_MOST_WORKERS = 64
_ENOUGH = 0.95
"""Share of the best rate that is good enough for fewer workers; the noise of a short trial."""
_PREFETCH = 2
"""Batches ahead per worker: torch's default."""
_FEWEST_BATCHES = 3
_LOOK = 0.25
"""Seconds of one trial, at most half a dozen of which find the number of workers."""


@dataclass(frozen=True)
class Try:
    """One number of workers, measured."""

    workers: int
    batches_per_second: float
    """As fast as the loader can, after its start."""
    start_seconds: float
    """From ``iter`` to the first batch."""


@dataclass(frozen=True)
class Tuned:
    """What :func:`tune` found."""

    loader: DataLoader
    """The user's own, or a clone with other workers."""
    workers: int
    persistent: bool
    """Workers live on from epoch to epoch."""
    tries: tuple[Try, ...]
    reason: str
    """Why this and no other, in one sentence."""


def tune(loader: DataLoader, step_time: float, *, budget: float = 3.0) -> Tuned:
    """Find the fewest workers with which no step waits for its batch.

    Loaders are tried as fast as they can, over batches of indices that are the trials' own: samplers, generators and
    the user's position stay as they are. With ``num_workers=0`` loading and step take turns; workers load while the
    step runs. Their number is bounded by the cores that this process may use, divided by the share of a core that
    loading one batch keeps busy: waiting for a disk or a network takes more workers than decoding does.

    Args:
        loader: an exact ``DataLoader`` over a map-style dataset, with torch's own samplers.
        step_time: seconds of one training step without loading; 0: as fast as can be.
        budget: seconds to spend; a dataset so slow that a trial takes longer is measured over fewer batches.

    Returns:
        The tuned loader and all that was measured.

    Raises:
        ValueError: ``step_time`` or ``budget`` is negative, or ``loader`` is one whose samples trials would use up.
    """
    if not step_time >= 0 or not budget >= 0:
        raise ValueError(f"step_time and budget must be >= 0, got {step_time} and {budget}")
    if type(loader) is not DataLoader or not is_rewindable(loader):
        raise ValueError("loader must be a DataLoader that trials can iterate without using up its samples")
    with RandomState.capture(loader.dataset).restored(), warnings.catch_warnings():
        # torch warns of more workers than cores: how many are too many is what is being found out.
        warnings.filterwarnings("ignore", message="This DataLoader will create")
        return _Search(loader, step_time, budget).run()


class _Search:
    def __init__(self, loader: DataLoader, step_time: float, budget: float) -> None:
        self._loader = loader
        self._step_time = step_time
        self._deadline = time.perf_counter() + budget
        self._tries: dict[int, Try] = {}

    def run(self) -> Tuned:
        alone, busy, batch_bytes = self._alone()
        most = self._most(busy, batch_bytes)
        seconds = 1 / alone.batches_per_second
        # As many as a step is too short for; without a step, one for each core to begin with.
        wanted = math.ceil(1.1 * seconds / self._step_time) if self._step_time else usable_cores()
        workers, pace = max(1, min(wanted, most)), 0.0
        if seconds > (1 - _ENOUGH) * self._step_time:
            while self._has_time(workers, seconds):
                before, pace = pace, self._pace(self._try(workers))
                if workers == most or pace >= _ENOUGH * self._best_possible() or pace < before / _ENOUGH:
                    break
                workers = min(most, math.ceil(1.5 * workers))
        best = max(map(self._pace, self._tries.values()))
        chosen = next(self._tries[n] for n in sorted(self._tries) if self._pace(self._tries[n]) >= _ENOUGH * best)
        return self._made(chosen, most, busy)

    def _pace(self, tried: Try) -> float:
        """Steps per second with such a loader."""
        seconds = 1 / tried.batches_per_second
        return 1 / (seconds + self._step_time if tried.workers == 0 else max(seconds, self._step_time))

    def _best_possible(self) -> float:
        return 1 / self._step_time if self._step_time else math.inf

    def _has_time(self, workers: int, seconds: float) -> bool:
        """The first number is tried whatever it takes."""
        if workers in self._tries:
            return False
        rounds = _PREFETCH + 2  # of all workers: see `_try`
        return len(self._tries) < 2 or time.perf_counter() + rounds * seconds < self._deadline

    def _most(self, busy: float, batch_bytes: int) -> int:
        cores = usable_cores()
        by_cores = int(cores / max(busy, cores / _MOST_WORKERS))
        room = min(free_shared_memory(), available_memory()) / 2
        by_memory = int(room // (batch_bytes * (_PREFETCH + 1))) if batch_bytes else _MOST_WORKERS
        return max(1, min(max(cores, by_cores), by_memory))

    def _alone(self) -> tuple[Try, float, int]:
        """Without workers; the share of a core that loading keeps busy; bytes of a batch."""
        begin, begin_cpu = time.perf_counter(), time.thread_time()
        batches = iter(self._trial(0))
        batch_bytes = sum(tensor.nbytes for tensor in tensors_of(next(batches)))
        start = time.perf_counter() - begin
        loaded = 1 + _load_for(batches, _LOOK - start)
        seconds = time.perf_counter() - begin
        self._tries[0] = Try(0, loaded / seconds, start)
        return self._tries[0], min(1.0, (time.thread_time() - begin_cpu) / seconds), batch_bytes

    def _try(self, workers: int) -> Try:
        begin = time.perf_counter()
        batches = iter(self._trial(workers))
        next(batches)
        start = time.perf_counter() - begin
        # What was loaded ahead while the workers started says nothing of their rate.
        for _ in itertools.islice(batches, workers * _PREFETCH - 1):
            pass
        begin = time.perf_counter()
        loaded = _load_for(batches, _LOOK, at_least=2 * workers)
        self._tries[workers] = Try(workers, loaded / (time.perf_counter() - begin), start)
        return self._tries[workers]

    def _trial(self, workers: int) -> DataLoader:
        return clone_loader(
            self._loader,
            batch_sampler=_Endless(self._loader),
            generator=torch.Generator(),
            num_workers=workers,
            **({"prefetch_factor": _PREFETCH, "persistent_workers": False} if workers else {}),
        )

    def _made(self, chosen: Try, most: int, busy: float) -> Tuned:
        loader, workers = self._loader, chosen.workers
        epoch = len(loader) / self._pace(chosen)
        # Workers that live on see the dataset as it was when they started.
        persistent = workers > 0 and (
            loader.persistent_workers
            or (not hasattr(loader.dataset, "set_epoch") and chosen.start_seconds > (1 - _ENOUGH) * epoch)
        )
        reason = self._reason(chosen)
        if loader.num_workers > most:
            reason += (
                f"; {loader.num_workers} workers, each of which keeps {busy:.0%} of a core busy, are more than this "
                f"machine can serve ({usable_cores()} cores): {most} at most"
            )
        if (workers, persistent) != (loader.num_workers, loader.persistent_workers):
            ahead = {"prefetch_factor": loader.prefetch_factor or _PREFETCH} if workers else {}
            loader = clone_loader(loader, num_workers=workers, persistent_workers=persistent, **ahead)
        return Tuned(loader, workers, persistent, tuple(self._tries.values()), reason)

    def _reason(self, chosen: Try) -> str:
        load, step = f"{1e3 / self._tries[0].batches_per_second:.2f} ms", f"{1e3 * self._step_time:.2f} ms"
        if chosen.workers == 0:
            if len(self._tries) == 1:
                return f"loading a batch takes {load} beside a step of {step}: there is nothing to hide"
            return f"loading a batch takes {load} beside a step of {step}, and no number of workers tried does better"
        rate = f"{chosen.workers} worker{'s' * (chosen.workers > 1)} load {chosen.batches_per_second:.1f} batches/s"
        if not self._step_time:
            return f"{rate}, {chosen.batches_per_second / self._tries[0].batches_per_second:.1f} times as many as none"
        keeps_up = chosen.batches_per_second >= _ENOUGH / self._step_time
        outcome = "which a step needs" if keeps_up else "the most that was reached"
        return f"{rate}, {outcome} ({1 / self._step_time:.1f}/s at {step}); without workers a batch takes {load}"


class _Endless:
    """Batches of indices like the loader's, without end and without its generators."""

    def __init__(self, loader: DataLoader) -> None:
        self._batches: Any = loader.batch_sampler
        self._samples = len(loader.dataset)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        if type(self._batches) is not BatchSampler:
            return itertools.cycle(self._batches)
        indices = self._indices()
        return iter(lambda: list(itertools.islice(indices, self._batches.batch_size)), [])

    def _indices(self) -> Iterator[int]:
        generator = torch.Generator()
        while True:
            in_order = type(self._batches.sampler) is SequentialSampler
            yield from range(self._samples) if in_order else torch.randperm(self._samples, generator=generator).tolist()


def _load_for(batches: Iterator[Any], seconds: float, at_least: int = _FEWEST_BATCHES) -> int:
    """Load for some time, and at least some batches: how many."""
    end = time.perf_counter() + seconds
    loaded = 0
    while loaded < at_least or time.perf_counter() < end:
        next(batches)
        loaded += 1
    return loaded
