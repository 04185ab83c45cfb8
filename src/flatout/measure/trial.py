"""Paired trials: two ways of doing the same work, interleaved in one process on real batches."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable
from typing import Any

import torch

from flatout.data import batch_size_of, to_device
from flatout.job import Job
from flatout.measure.statistics import paired_gain
from flatout.report.model import Gain, Pace

KEEP_ABOVE = 1.01
"""A candidate is kept when the lower end of its gain's interval is above this."""

FEWEST_PAIRS = 8
MOST_PAIRS = 40
HOPELESS_AFTER = 3


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """Wall time of ``work()`` with everything that it queued on the device."""
    _synchronize(device)
    start = time.perf_counter()
    work()
    _synchronize(device)
    return time.perf_counter() - start


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def interleave(
    baseline: Callable[[int], float], candidate: Callable[[int], float], deadline: float
) -> tuple[list[float], list[float]]:
    """Measure pairs, in alternating order, until the verdict is clear or the time is up.

    Args:
        baseline: measures pair ``i`` the old way and returns seconds.
        candidate: measures pair ``i`` the new way, on the same work.
        deadline: ``time.perf_counter()`` after which no further pair begins; one pair is always measured.

    Returns:
        Seconds of the baseline and of the candidate, one each per pair.
    """
    old: list[float] = []
    new: list[float] = []
    for i in range(MOST_PAIRS):
        if i % 2 == 0:
            old.append(baseline(i))
            new.append(candidate(i))
        else:
            new.append(candidate(i))
            old.append(baseline(i))
        if time.perf_counter() > deadline or _is_clear(old, new):
            break
    return old, new


def _is_clear(old: list[float], new: list[float]) -> bool:
    """Whether more pairs could not change the verdict; looking early asks for more than the final margin."""
    if len(old) == HOPELESS_AFTER and all(b < 0.8 * c for b, c in zip(old, new, strict=True)):
        return True
    if len(old) < FEWEST_PAIRS or len(old) % 4:
        return False
    gain = paired_gain(old, new)
    return gain.low > 1 + 2 * (KEEP_ABOVE - 1) or gain.high < 1.0


def pays(gain: Gain, pairs: int) -> bool:
    """Whether a measured gain is enough to keep a candidate: sure, and measured often enough to be."""
    return gain.low > KEEP_ABOVE and pairs >= HOPELESS_AFTER


class Track:
    """A loader that is trained from in stretches, load and step timed apart.

    Args:
        job: stepped with the batches.
        loader: iterated again when it ends, as training does.
        settle: batches trained on but not timed at the start of a stretch: what the loader had queued while it
            was not its turn would flatter it.
    """

    def __init__(self, job: Job, loader: Iterable[Any], settle: int) -> None:
        self._job = job
        self._batches = _endless(loader)
        self._settle = settle
        self._loads = self._computes = 0.0
        self._samples = self._steps = 0

    def stretch(self, steps: int) -> float:
        """Train for ``steps`` batches; the seconds that took."""
        for _ in range(self._settle):
            self._step()
        before = self._loads + self._computes
        for _ in range(steps):
            load, compute, samples = self._step()
            self._loads += load
            self._computes += compute
            self._samples += samples
            self._steps += 1
        return self._loads + self._computes - before

    def _step(self) -> tuple[float, float, int]:
        start = time.perf_counter()
        batch = to_device(next(self._batches), self._job.device)
        loaded = time.perf_counter()
        self._job.step(batch)
        _synchronize(self._job.device)
        return loaded - start, time.perf_counter() - loaded, batch_size_of(batch)

    @property
    def pace(self) -> Pace:
        """Means over everything timed so far."""
        return Pace(
            step_ms=1e3 * self._computes / self._steps,
            load_ms=1e3 * self._loads / self._steps,
            samples_per_second=self._samples / (self._loads + self._computes),
        )

    def close(self) -> None:
        """Let go of the loader's iterator, and so of its workers or threads."""
        self._batches.close()


def _endless(loader: Iterable[Any]) -> Generator[Any, None, None]:
    while True:
        yield from loader
