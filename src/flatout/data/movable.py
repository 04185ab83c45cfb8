"""``movable_transforms``: torch work per sample that the device could do on whole batches."""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, MapDataPipe, default_collate, default_convert

from flatout.core.random_state import RandomState
from flatout.data.torch_calls import MOST_CALLS, CallRecorder, Place, Recording, TorchCall, storages_of

WORTH_NAMING = 0.03
"""Smallest share of a sample's time that is reported."""

FEWEST = 4
"""Smallest number of samples that shows which work every sample needs."""

_GROUP = 4  # samples in each batch for the collate_fn
_NORMALIZING = re.compile(
    "view|reshape|permute|contiguous|clone|unsqueeze|requires_grad_|to|type|float|half|bfloat16|(div|mul|sub|add)_?"
    "|tensor|as_tensor"
)


class NotExamined(ValueError):
    """Samples that cannot be examined. The message says why."""


@dataclass(frozen=True)
class MovableWork:
    """Torch work on the CPU, done for each sample, that the device could do for a whole batch.

    Attributes:
        place: ``file:line``, or the expression that reaches a library's transform: ``dataset.transform.transforms[2]``.
        file: file of the user's code, ``"Cell In[3]"`` in a notebook; None if all the code is a library's.
        line: line in ``file``.
        what: class of the transform, or the user's function.
        operators: names of the torch functions, each once, in order.
        seconds: duration per sample on the calling thread.
        share: share of a sample's time, between 0 and 1.
        normalizes: True if the work is part of a conversion of bytes to normalized floats, as in
            ``flatout.data.Normalize``.
    """

    place: str
    file: str | None
    line: int | None
    what: str
    operators: tuple[str, ...]
    seconds: float
    share: float
    normalizes: bool

    @property
    def advice(self) -> str:
        """Change of the user's code that moves the work."""
        if self.normalizes:
            return (
                "keep the samples uint8, and give flatout.data.Normalize to flatout.data.Prefetcher(transform=...): "
                "it makes normalized floats of whole batches on the device"
            )
        return "give it to flatout.data.Prefetcher(transform=...), to be done for whole batches on the device"

    def __str__(self) -> str:
        operators = ", ".join(name.strip("_") if name.startswith("__") else name for name in self.operators)
        cost = f"{self.seconds * 1e3:.2f} ms, {100 * self.share:.0f} % of a sample's time"
        return f"{self.place}: {self.what} ({operators}) takes {cost}"


def movable_transforms(
    source: DataLoader | Dataset, samples: int = 8, seconds: float = math.inf
) -> tuple[MovableWork, ...]:
    """Find the torch work in a dataset's samples, and in a ``collate_fn``, that could run on whole batches.

    A few samples are evaluated on the calling thread, each twice. The torch calls of the second evaluation are
    recorded. Work is reported if all samples make the same calls with the same arguments and shapes. Only the tensors
    of the sample may depend on the results. Work that precedes a random choice, NumPy or a value read by Python is not
    reported. Random generators are restored.

    Work of NumPy and Python is not recorded, nor is a choice between tensors without a torch call. The files of the
    samples have just been read, so times exclude the disk.

    Args:
        source: a DataLoader over a map-style dataset, or the dataset.
        samples: number of samples to evaluate, spread over the dataset.
        seconds: time limit. At least ``FEWEST`` samples are needed.

    Returns:
        Work that takes at least ``WORTH_NAMING`` of a sample's time, the costliest first.

    Raises:
        ValueError: ``samples`` is less than ``FEWEST``.
        NotExamined: the dataset is not map-style, a sample raises, or samples take too long.
    """
    if samples < FEWEST:
        raise ValueError(f"samples must be >= {FEWEST}, got {samples}")
    dataset, collate = _parts(source)
    roots = {"dataset": dataset} | ({} if collate is None else {"collate_fn": collate})
    with RandomState.capture(list(roots.values())).restored(), _threads_of(source):
        recorder = CallRecorder(roots)
        made, recorded = _record_samples(recorder, dataset, samples, seconds)
        sample_seconds = median(each.seconds for each in recorded)
        work = _movable(recorded)
        if collate is not None:
            groups = [made[start : start + _GROUP] for start in range(0, len(made) - _GROUP + 1, _GROUP)]
            with _errors_in("collate_fn"):
                batches = [recorder.record(collate, group) for group in groups]
            sample_seconds += median(each.seconds for each in batches) / _GROUP
            given = storages_of(made)
            if any(call.name != "stack" for call in batches[0].calls if call.reads & given):
                work = []  # the collate_fn changes samples, for example by padding
            work += [(call, took / _GROUP) for call, took in _movable(batches)]
    return _findings(work, sample_seconds)


def _parts(source: Any) -> tuple[Any, Callable[[Any], Any] | None]:
    """Return the map-style dataset, and the collate_fn if it is not torch's own."""
    dataset, collate = source, None
    if isinstance(source, DataLoader):
        dataset = source.dataset
        collate = None if source.collate_fn in (default_collate, default_convert) else source.collate_fn
    if isinstance(dataset, (IterableDataset, MapDataPipe)) or not hasattr(dataset, "__getitem__"):
        raise NotExamined(f"the dataset is a {type(dataset).__name__}, not map-style")
    if not hasattr(dataset, "__len__"):
        raise NotExamined(f"the dataset, a {type(dataset).__name__}, has no length")
    if len(dataset) == 0:
        raise NotExamined("the dataset is empty")
    return dataset, collate


@contextmanager
def _threads_of(source: Any) -> Iterator[None]:
    """Use as many threads as the process that makes the samples: one in a worker process."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1 if getattr(source, "num_workers", 0) else threads)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def _errors_in(code: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # the user's own code: it raises again in the training
        raise NotExamined(f"{code} raised {type(error).__name__}: {error}") from error


def _record_samples(
    recorder: CallRecorder, dataset: Any, samples: int, seconds: float
) -> tuple[list[Any], list[Recording]]:
    """Return all evaluated samples, and a recording of the second evaluation of each."""

    def fetch(index: int) -> Any:
        return dataset.__getitems__([index])[0] if hasattr(dataset, "__getitems__") else dataset[index]

    made: list[Any] = []
    recorded: list[Recording] = []
    begun = time.perf_counter()
    for index in (i * len(dataset) // samples for i in range(samples)):
        with _errors_in(f"dataset[{index}]"):
            made.append(fetch(index))  # imports modules, reads the file and fills caches
            if time.perf_counter() - begun > seconds:
                break
            recorded.append(recorder.record(fetch, index))
    if len(recorded) < FEWEST:
        raise NotExamined(f"there are {seconds:.2g} s for this, in which {len(made)} samples were made")
    return made + [each.result for each in recorded], recorded


def _movable(recordings: Sequence[Recording]) -> list[tuple[TorchCall, float]]:
    """Return the calls that only the results depend on, in order, each with its median seconds.

    The recordings are compared call by call from their ends. A call stays if it differs between recordings or if a
    call that stays needs its results.
    """
    if any(len(each.calls) >= MOST_CALLS for each in recordings):
        raise NotExamined(f"a sample or a batch takes {MOST_CALLS:,} torch operations or more")
    results, staying = storages_of(recordings[0].result), frozenset[int]()
    moving: list[tuple[TorchCall, float]] = []
    for call, *others in zip(*(reversed(each.calls) for each in recordings), strict=False):
        twins = [call, *others]
        if any(twin.stays or twin.key != call.key for twin in twins) or call.writes & staying:
            staying |= call.reads
        elif call.writes & results:
            results |= call.reads
            moving.append((call, median(twin.seconds for twin in twins)))
    return moving[::-1]


def _findings(work: Sequence[tuple[TorchCall, float]], sample_seconds: float) -> tuple[MovableWork, ...]:
    """Return a finding for each function and transform, at its costliest line."""
    groups: dict[Place, list[tuple[float, int, str]]] = {}
    for call, took in work:
        if call.place is not None:
            groups.setdefault(call.place._replace(line=0), []).append((took, call.place.line, call.name))
    from_bytes = any(call.to_float for call, _ in work)
    found = []
    for (file, _, way, what), group in groups.items():
        seconds, line = sum(took for took, _, _ in group), max(group)[1] or None
        place = way or f"{str(file).removeprefix(os.path.join(os.getcwd(), ''))}:{line}"
        names = tuple(dict.fromkeys(name for _, _, name in group))
        normalizes = from_bytes and all(map(_NORMALIZING.fullmatch, names))
        share = min(1.0, seconds / sample_seconds)
        found.append(MovableWork(place, file, line, what, names, seconds, share, normalizes))
    return tuple(sorted((each for each in found if each.share >= WORTH_NAMING), key=lambda each: -each.seconds))
