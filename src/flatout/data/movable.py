"""``movable_transforms``: names the work in a dataset's samples that the device could do on whole batches."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, MapDataPipe, default_collate, default_convert

from flatout.core.batches import tensors_of
from flatout.core.random_state import RandomState
from flatout.data.operations import MOST, Operation, Recorder, Recording, memory_of
from flatout.data.transform_places import Place

WORTH_NAMING = 0.03
"""Share of a sample's time from which work is named."""

FEWEST = 4
"""Samples without which nothing is said: what happens in each of them is taken for what always happens."""

_GROUP = 4  # samples that a collate_fn is watched with
_NORMALIZING = re.compile(
    "view|reshape|permute|contiguous|clone|unsqueeze|requires_grad_|to|type|float|half|bfloat16|(div|mul|sub|add)_?"
    "|tensor|as_tensor"
)


class NotExamined(ValueError):
    """Samples that could not be looked at; the message says why."""


@dataclass(frozen=True)
class MovableWork:
    """Torch work on the CPU, done for each sample, that could be done for a whole batch on the device.

    Attributes:
        place: file and line of the user's own code, or the way to the library's transform.
        operators: the torch operations, each once, in order.
        seconds: what they take per sample, on the thread that asked.
        share: of the time that a sample takes, between 0 and 1.
        normalizes: whether it is part of making normalised floats of bytes, as ``flatout.data.Normalize`` does.
    """

    place: Place
    operators: tuple[str, ...]
    seconds: float
    share: float
    normalizes: bool

    @property
    def file(self) -> str | None:
        """The user's file, ``"Cell In[3]"`` in a notebook; None where all the code is a library's."""
        return self.place.file

    @property
    def line(self) -> int | None:
        """The line in ``file``."""
        return self.place.line

    @property
    def what(self) -> str:
        """The transform's class, or the function."""
        return self.place.what

    @property
    def advice(self) -> str:
        """What to do about it."""
        if self.normalizes:
            return (
                "keep the samples uint8, and give flatout.data.Normalize to flatout.data.Prefetcher(transform=...): "
                "it makes normalised floats of whole batches on the device"
            )
        return "give it to flatout.data.Prefetcher(transform=...), to be done for whole batches on the device"

    def __str__(self) -> str:
        operators = ", ".join(name.strip("_") if name.startswith("__") else name for name in self.operators)
        cost = f"{self.seconds * 1e3:.2f} ms, {100 * self.share:.0f} % of a sample's time"
        return f"{self.place}: {self.what} ({operators}) takes {cost}"


def movable_transforms(
    source: DataLoader | Dataset, samples: int = 8, seconds: float = math.inf
) -> tuple[MovableWork, ...]:
    """Name the torch work in a dataset's samples, and in a ``collate_fn``, that could run on whole batches.

    Evaluates a few samples on the calling thread, each twice, the second time with every torch operation written
    down. Named is what leads from the last thing that needs the CPU to the tensors of the sample: operations that
    happen in every sample with the same arguments and on the same shapes, behind all decoding and all random
    choices, whose intermediate values nobody reads. So a resize by PIL, a random crop and what comes before them
    are never named. Work in NumPy and in Python is not seen. Nothing is moved; all generators are put back.

    What stays open: a choice made by ``random`` or NumPy in a function that returns before the operations run,
    with the same outcome in all the samples, is taken for no choice. Times are those of files that were read a
    moment ago.

    Args:
        source: a DataLoader over a map-style dataset, or the dataset.
        samples: how many to evaluate, spread over the dataset.
        seconds: stop when this has passed; ``FEWEST`` samples are the least that anything is said about.

    Returns:
        What takes at least ``WORTH_NAMING`` of a sample's time, the costliest first.

    Raises:
        ValueError: ``samples`` is less than ``FEWEST``.
        NotExamined: the dataset is not map-style, a sample raises, or samples take too long.
    """
    if samples < FEWEST:
        raise ValueError(f"samples must be >= {FEWEST}, got {samples}")
    dataset, collate = _parts(source)
    roots = {"dataset": dataset} | ({} if collate is None else {"collate_fn": collate})
    with RandomState.capture(list(roots.values())).restored(), _threads_of(source):
        recorder = Recorder(roots)
        plain, recorded = _record_samples(recorder, dataset, samples, seconds)
        sample_seconds = median(each.seconds for each in recorded)
        work = _movable(recorded, same_shapes=True)
        if collate is not None:
            made = [*plain, *(each.result for each in recorded)]
            batches = _record_batches(recorder, collate, made)
            sample_seconds += median(each.seconds for each in batches) / _GROUP
            if not _only_stacks(batches[0], made[:_GROUP]):
                work = []  # what runs behind the collate_fn would run on something else, such as padding
            work += [(operation, took / _GROUP) for operation, took in _movable(batches, same_shapes=False)]
    return _findings(work, sample_seconds)


# -- watching --------------------------------------------------------------------------------------------------


def _parts(source: Any) -> tuple[Any, Callable[[Any], Any] | None]:
    """The map-style dataset, and the collate_fn where it is not torch's own."""
    dataset, collate = source, None
    if isinstance(source, DataLoader):
        dataset = source.dataset
        if source.collate_fn not in (default_collate, default_convert):
            collate = source.collate_fn
    if isinstance(dataset, (IterableDataset, MapDataPipe)) or not hasattr(dataset, "__getitem__"):
        raise NotExamined(f"the dataset is a {type(dataset).__name__}, not map-style")
    if not hasattr(dataset, "__len__"):
        raise NotExamined(f"the dataset, a {type(dataset).__name__}, has no length")
    if len(dataset) == 0:
        raise NotExamined("the dataset is empty")
    return dataset, collate


@contextmanager
def _threads_of(source: Any) -> Iterator[None]:
    """As many threads for torch's operations as where samples are made: one in a worker process."""
    threads = torch.get_num_threads()
    if getattr(source, "num_workers", 0) == 0 or threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _fetch(dataset: Any, index: int) -> Any:
    """One sample, fetched the way DataLoader does."""
    return dataset.__getitems__([index])[0] if hasattr(dataset, "__getitems__") else dataset[index]


def _record_samples(
    recorder: Recorder, dataset: Any, samples: int, seconds: float
) -> tuple[list[Any], list[Recording]]:
    """Samples as they are, and recordings of making them once more."""
    plain: list[Any] = []
    recorded: list[Recording] = []
    begun = time.perf_counter()
    for index in (i * len(dataset) // samples for i in range(samples)):
        try:
            plain.append(_fetch(dataset, index))  # imports, files from the disk, caches that fill
            if time.perf_counter() - begun <= seconds:
                recorded.append(_comparable(recorder.record(_fetch, dataset, index), recorded))
        except NotExamined:
            raise
        except Exception as error:  # the user's own code: it will raise again where the user looks for it
            raise NotExamined(f"dataset[{index}] raised {type(error).__name__}: {error}") from error
        if time.perf_counter() - begun > seconds:
            break
    if len(recorded) < FEWEST:
        raise NotExamined(f"there are {seconds:.2g} s for this, in which {len(plain)} samples were made")
    return plain, recorded


def _record_batches(recorder: Recorder, collate: Callable[[Any], Any], samples: Sequence[Any]) -> list[Recording]:
    """Recordings of collating the samples, each of them in one batch."""
    recorded: list[Recording] = []
    for start in range(0, len(samples) - _GROUP + 1, _GROUP):
        try:
            recording = recorder.record(collate, list(samples[start : start + _GROUP]))
        except Exception as error:  # the user's own code, as above
            raise NotExamined(f"collate_fn raised {type(error).__name__}: {error}") from error
        recorded.append(_comparable(recording, recorded))
    return recorded


def _comparable(recording: Recording, earlier: Sequence[Recording]) -> Recording:
    """Identities are compared with those of the first recording: what the later ones used may go."""
    if len(recording.operations) >= MOST:
        raise NotExamined(f"a sample or a batch takes {MOST:,} torch operations or more")
    if earlier:
        recording.kept.clear()
    return recording


# -- what can move ---------------------------------------------------------------------------------------------


def _movable(recordings: Sequence[Recording], same_shapes: bool) -> list[tuple[Operation, float]]:
    """Operations that a result is made by and nothing else needs, in order, each with its median seconds.

    Every tensor has at most one root: what it is computed from, by operations that are the same in all the
    recordings, and nothing but constants. An operation that differs, that has to stay, or that joins two roots
    is a root itself, and all that leads to it stays as well.
    """
    first = recordings[0]
    by_key = [{operation.key: operation for operation in each.operations} for each in recordings]
    twins = {key: [operations.get(key) for operations in by_key] for key in by_key[0]}
    roots: dict[Hashable, Hashable | None] = {}
    staying: list[Hashable] = []
    for operation in first.operations:
        sources = _sources(twins[operation.key], roots, same_shapes)
        if sources is None or len(sources) > 1 or operation.drew or (operation.stays and sources):
            roots[operation.key] = operation.key
            staying.append(operation.key)
        else:
            roots[operation.key] = next(iter(sources), None)
            staying += [key for source in sources if isinstance(source, _OneOf) for key in source.producers]
    only_sometimes = [op for operations in by_key[1:] for key, op in operations.items() if key not in twins]
    staying += [each.producer for operation in only_sometimes for each in operation.inputs]
    ends: list[Hashable] = []
    for producers in zip(*(each.producers for each in recordings), strict=False):
        (ends if len(set(producers)) == 1 and roots.get(producers[0]) is not None else staying).extend(producers)

    def leading_to(keys: Iterable[Hashable]) -> set[Hashable]:
        """The operations of these keys and all before them, back to their roots."""
        found: set[Hashable] = set()
        left = [key for key in keys if key in twins]
        while left:
            key = left.pop()
            if key not in found:
                found.add(key)
                left += [each.producer for each in by_key[0][key].inputs if each.producer in twins]
        return found

    moving = leading_to(ends) - leading_to(staying)
    return [
        (operation, median(twin.seconds for twin in twins[operation.key] if twin is not None))
        for operation in first.operations
        if operation.key in moving
    ]


@dataclass(frozen=True)
class _Outside:
    """A root that no operation made: memory that came from outside."""

    memory: int


@dataclass(frozen=True)
class _OneOf:
    """A root that another operation made in each recording."""

    producers: tuple[Hashable | None, ...]


def _sources(
    twins: Sequence[Operation | None], roots: dict[Hashable, Hashable | None], same_shapes: bool
) -> set[Hashable] | None:
    """The roots that an operation computes from; None when it is not the same in all the recordings."""
    first = twins[0]
    assert first is not None
    if any(twin is None or twin.settings != first.settings or len(twin.inputs) != len(first.inputs) for twin in twins):
        return None
    sources: set[Hashable] = set()
    root: Hashable | None
    for inputs in zip(*(twin.inputs for twin in twins if twin is not None), strict=True):
        read = inputs[0]
        if any(each.dtype != read.dtype for each in inputs):
            return None
        if same_shapes and any(each.shape != read.shape for each in inputs):
            return None
        producers = tuple(each.producer for each in inputs)
        if any(producer != read.producer for producer in producers):
            root = _OneOf(producers)
        elif read.producer is not None:
            root = roots[read.producer]
        else:
            root = None if all(each.value == read.value for each in inputs) else _Outside(read.memory)
        if root is not None:
            sources.add(root)
    return sources


def _only_stacks(batch: Recording, samples: Sequence[Any]) -> bool:
    """Whether the only operation that reads a sample's own tensors puts them side by side."""
    given = {memory_of(tensor) for tensor in tensors_of(samples)}
    return all(
        operation.name == "stack"
        for operation in batch.operations
        if any(each.producer is None and each.memory in given for each in operation.inputs)
    )


# -- what is said ----------------------------------------------------------------------------------------------


def _findings(work: Sequence[tuple[Operation, float]], sample_seconds: float) -> tuple[MovableWork, ...]:
    groups: dict[Hashable, list[tuple[Operation, float]]] = {}
    for operation, took in work:
        if operation.place is not None:
            place = operation.place
            groups.setdefault((place.file, place.way, place.what), []).append((operation, took))
    from_bytes = any(operation.floats for operation, _ in work)
    findings = [_finding(group, sample_seconds, from_bytes) for group in groups.values()]
    worth = [each for each in findings if each.share >= WORTH_NAMING]
    return tuple(sorted(worth, key=lambda each: each.seconds, reverse=True))


def _finding(group: Sequence[tuple[Operation, float]], sample_seconds: float, from_bytes: bool) -> MovableWork:
    costliest, _ = max(group, key=lambda each: each[1])
    assert costliest.place is not None
    seconds = sum(took for _, took in group)
    names = tuple(dict.fromkeys(operation.name for operation, _ in group))
    return MovableWork(
        place=costliest.place,
        operators=names,
        seconds=seconds,
        share=min(1.0, seconds / sample_seconds),
        normalizes=from_bytes and all(map(_NORMALIZING.fullmatch, names)),
    )
