"""``PrefixCache``: a dataset whose transforms draw random numbers, with the results of the steps before in memory."""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset

from flatout.core.contents import named_values
from flatout.core.machine import available_memory
from flatout.core.random_state import RandomState, generators_in
from flatout.core.reachable import reachable
from flatout.core.snapshot import Snapshot
from flatout.data.cache import SampleCache
from flatout.data.front import cuts_in, front_of, runs_known_code
from flatout.data.loader_class import base_of
from flatout.data.loaders import clone_loader
from flatout.data.packed import bytes_of, packed, unpacked
from flatout.data.samples import NotCacheable
from flatout.data.table import RaggedTable
from flatout.data.watch import Watch, files_opened, state_of

_LOOKED_AT = 4
"""Samples, spread over the dataset, that are made in both ways before the cache is used."""
_TOGETHER = 32
"""Largest number of samples in one call of native code. It bounds the memory of decoded images."""
_SPREAD = (math.sqrt(5) - 1) / 2
"""Golden ratio. The fractional parts of its multiples are spread evenly over [0, 1)."""


class PrefixCache(SampleCache):
    """Map-style dataset that keeps the front of its samples in memory: everything before the first random transform.

    The front of ``Compose([Resize(256), RandomCrop(224), ...])`` is reading, decoding and ``Resize``. The first process
    that requests a sample stores its front as bytes, in memory that all processes share. Later requests run the rest
    of the transforms on a copy. Draws, their order and results are those of ``dataset``, bit for bit. Samples that do
    not fit in the memory, or cannot be stored, come from ``dataset``.

    A file that a stored sample was read from may change. This is seen when the sample is requested, by the size and the
    time of the change, and the sample is then read again. Other changes of ``dataset`` end the cache, as in
    :class:`SampleCache`. Changes of files that only a library in C opens are seen in random samples at the start of
    each epoch.

    Args:
        dataset: map-style. Its transforms are attributes of the dataset, or of datasets inside it.
        byte_budget: largest number of bytes of all stored samples together. Default: half of the available memory.
            With 0, nothing is stored.

    Attributes:
        sample_bytes: mean number of bytes of a stored sample.
        share: share of the samples that fit in the memory.

    Raises:
        NotCacheable: the dataset cannot be cached. The message says why. Generators are restored, as on success.
    """

    _OWN = SampleCache._OWN | {"sample_bytes", "share"}
    _table: RaggedTable

    def __init__(self, dataset: Any, *, byte_budget: int | None = None) -> None:
        super().__init__(dataset)
        front = front_of(dataset)
        if front is None:
            raise NotCacheable("the dataset has no transform: its samples have no part before one that draws")
        if hasattr(dataset, "__getitems__") and type(dataset) is not Subset:
            raise NotCacheable(f"the dataset, a {type(dataset).__name__}, makes several samples at once")
        if name := _asks_for_worker(dataset):
            raise NotCacheable(f"the code of {name} has get_worker_info: its samples may depend on the worker")
        self._front = front
        watch = Watch(dataset, self._holds)
        snapshot = Snapshot()
        snapshot.add_data(dataset)
        budget = available_memory() // 2 if byte_budget is None else byte_budget
        last = len(dataset) - 1
        rows = sorted({round(i * last / (_LOOKED_AT - 1)) for i in range(_LOOKED_AT)})
        with RandomState.of(self._generators or []).restored():
            try:
                self._choose_lengths(rows, budget)
                self.sample_bytes = self._mean_bytes(rows)
                seen = watch.changed_by_samples({}, nearby=False)
            finally:
                snapshot.restore()
        if seen:
            raise NotCacheable(f"making samples changes the dataset: {seen}")
        self.share = min(1.0, budget / (self.sample_bytes * len(dataset)))
        if not budget and not front.is_native:
            raise NotCacheable(front.why_not_read or "no native code makes the samples' transforms")
        if budget and self.share * len(dataset) < 1:
            raise NotCacheable(f"a sample takes {self.sample_bytes:,.0f} bytes, the budget is {budget:,}")
        try:
            self._table = RaggedTable(len(dataset), budget)
        except OSError as error:
            raise NotCacheable(f"no {budget:,} bytes of shared memory for the samples: {error}") from error
        self._watch = Watch(dataset, self._holds)
        self.why_unsure = self._watch.opaque
        self._runs_known_code = runs_known_code(dataset)
        self._rehearsed: tuple[float, Sequence[int]] = 0.0, ()
        self._is_trial = False

    def rehearse(self, share: float, count: int) -> None:
        """Let trials meet the mix of stored and other samples of the whole training (:func:`for_trial`).

        In the first epoch, no sample is in memory. A trial that reads the first batches would not show what later
        epochs gain.

        Args:
            share: share of the samples of the training that come from memory.
            count: number of samples that stand for all others. They are stored now.
        """
        last = len(self) - 1
        rows = sorted({round(i * last / max(1, count - 1)) for i in range(count)})
        with RandomState.of(self._generators or []).restored():
            for row in rows:
                self[row]
        self._rehearsed = share, rows

    def __getitem__(self, index: Any) -> Any:
        return self._front.run([self._drawn(index)])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return the samples of many indices. Their random numbers are drawn one sample after the other."""
        samples: list[Any] = []
        drawn: list[Any] = []
        for index in indices:
            drawn.append(self._drawn(index))
            if len(drawn) == _TOGETHER:
                samples += self._front.run(drawn)
                drawn = []
        return samples + self._front.run(drawn)

    def _drawn(self, index: Any) -> Any:
        """Return a sample whose random numbers are drawn (:meth:`Front.drawn`)."""
        row = self._row(index)
        if row is None or not self._still_holds(1):
            return self.dataset[index]
        is_kept = True
        if self._is_trial:
            share, rows = self._rehearsed
            if is_kept := _SPREAD * row % 1 < share:
                index = row = rows[row % len(rows)]
        kept = self._stored(row) if is_kept else None
        # a sample may hold its index, whose type counts
        sample = kept[1] if kept is not None and _kind_of(kept[0]) == _kind_of(index) else None
        has_room = is_kept and not self._table.is_full and not self._table.has(row)
        if sample is None and (has_room or self._front.is_native):
            sample = self._made(row, index, has_room)
        if sample is None:
            return self.dataset[index]
        if not self._front.may_catch:
            return self._front.drawn(sample)
        before = RandomState.of(self._generators_now())
        try:
            return self._front.drawn(sample)
        except Exception:  # the dataset handles its error in its own way
            before.restore()
            return self.dataset[index]

    def _generators_now(self) -> list[Any]:
        if self._generators is None:
            self._generators = generators_in(self.dataset)
        return self._generators

    def _stored(self, row: int) -> tuple[Any, Any] | None:
        """Return the index and the sample after the front from memory.

        None if it is not there, or if one of its files has changed.
        """
        if not self._table.has(row):
            return None
        files, settings, index, sample = unpacked(self._table.take(row))
        if settings == _settings_of_pillow() and all(state_of(path) == state for path, state in files.items()):
            return index, sample
        self._table.forget(row)
        return None

    def _made(self, row: int, index: Any, has_room: bool) -> Any:
        """Make a sample after the front, and store it if there is room. None if the dataset has to make it."""
        # Another thread may draw meanwhile. So generators count only if the user's code runs.
        before = None if self._runs_known_code else RandomState.of(self._generators_now())
        settings = _settings_of_pillow()
        try:
            with files_opened() as files:
                sample = self._front.sample(index)
            if before is not None and (moved := before.moved()) is not None:
                raise NotCacheable(f"dataset[{row}] draws from {moved} before its transforms do")
        except Exception as error:  # the dataset raises its error again, or handles this sample in another way
            if isinstance(error, NotCacheable):
                self._give_up(error)
            if before is not None:
                before.restore()
            return None
        for owner, name, value in self._front.changed_attributes(self.dataset):
            setattr(owner, name, value)
        if self._watch is not None and (seen := self._watch.changed_by_samples(files, nearby=True)):
            self._give_up(NotCacheable(f"making dataset[{row}] changes the dataset: {seen}"))
            return sample
        if has_room:
            with contextlib.suppress(NotCacheable):  # this sample stays out of the memory
                self._table.put(row, packed((files, settings, index, sample)))
        return sample

    def _holds(self, row: int) -> bool:
        """Make a sample again, and return False if another one is in memory, although its files are the same."""
        stored = self._stored(row)
        try:
            return stored is None or bytes_of(self._front.sample(stored[0])) == bytes_of(stored[1])
        except FileNotFoundError:  # the dataset raises this error when the sample is requested
            return True

    def _choose_lengths(self, rows: Sequence[int], budget: int) -> None:
        """Set the length of each front: the last step that yields bytes, or the smallest result if that does not fit.

        Floats are made again from bytes, because they take four times the memory.
        """
        if not budget:
            return
        front, room = self._front, budget / len(self.dataset)
        samples = [{cut.rest[0][0]: cut for cut in cuts_in(self._sample(row))} for row in rows]
        for number in range(len(front.transforms)):
            of_rows = [list(front.values(cuts[number])) for cuts in samples if number in cuts]
            sizes = [
                sum(sum(map(_size_of, _values_in(value))) for value in values) / len(of_rows)
                for values in zip(*of_rows, strict=True)
            ]
            are_bytes = [all(map(_is_bytes, _values_in(value))) for value in of_rows[0]] if of_rows else []
            best = max((i for i, is_bytes in enumerate(are_bytes) if is_bytes), default=0)
            if sizes and sizes[best] > room:
                best = min(range(len(sizes)), key=lambda i: (sizes[i], -i))
            front.lengths[number] = best

    def _mean_bytes(self, rows: Sequence[int]) -> float:
        """Return the mean bytes of a stored sample, after a comparison with the dataset's samples."""
        if self._front.use_native_code():
            with contextlib.suppress(NotCacheable):
                return sum(map(self._checked, rows)) / len(rows)
        self._front.use_python()
        return sum(map(self._checked, rows)) / len(rows)

    def _sample(self, row: int) -> Any:
        """Return a sample after the front, for the first time."""
        before = RandomState.of(self._generators or [])
        try:
            sample = self._front.sample(row)
        except Exception as error:
            raise NotCacheable(
                f"dataset[{row}] without its transforms raised {type(error).__name__}: {error}"
            ) from error
        if (moved := before.moved()) is not None:
            raise NotCacheable(f"dataset[{row}] draws from {moved} before its transforms do")
        if not cuts_in(sample):
            raise NotCacheable(f"dataset[{row}] does not hold the result of its transform")
        return sample

    def _checked(self, row: int) -> int:
        """Compare a sample with the one that is made in two parts. Return the bytes that are stored.

        Raises:
            NotCacheable: the samples, or the states of the generators after them, differ.
        """
        generators = self._generators or []
        before = RandomState.of(generators)
        stored = bytes_of(self._sample(row))
        try:
            expected = bytes_of(self.dataset[row])
        except NotCacheable:
            raise
        except Exception as error:  # the user's own code, which raises again in the training
            raise NotCacheable(f"dataset[{row}] raised {type(error).__name__}: {error}") from error
        after = RandomState.of(generators)
        before.restore()
        if stored != bytes_of(self._sample(row)):
            raise NotCacheable(f"dataset[{row}] gave two different results before its random transforms")
        _, sample = unpacked(memoryview(bytearray(bytes_of(({}, self._sample(row))))))
        try:
            finished = bytes_of(self._front.finished(sample))
        except Exception as error:
            raise NotCacheable(f"dataset[{row}] in two parts raised {type(error).__name__}: {error}") from error
        if finished != expected or after.moved() is not None:
            raise NotCacheable(f"dataset[{row}] in two parts is another sample")
        return len(stored)


def for_trial(loader: Any) -> Any:
    """Return a clone of a loader with a base, for trials. A :class:`PrefixCache` in it is rehearsed."""
    base = base_of(loader)
    assert base is not None
    if not isinstance(base.dataset, PrefixCache):
        return clone_loader(loader)
    rehearsed = copy.copy(base.dataset)  # has the same memory, and no watch
    vars(rehearsed).update(_is_trial=True, _watch=None)
    return clone_loader(loader, dataset=rehearsed)


def _settings_of_pillow() -> tuple[Any, ...]:
    """Return the settings by which Pillow raises or warns."""
    image, file = sys.modules.get("PIL.Image"), sys.modules.get("PIL.ImageFile")
    return getattr(image, "MAX_IMAGE_PIXELS", None), getattr(file, "LOAD_TRUNCATED_IMAGES", None)


def _kind_of(index: Any) -> tuple[type, str]:
    return type(index), str(getattr(index, "dtype", ""))


def _asks_for_worker(dataset: Any) -> str:
    """Return the class of a dataset whose code asks for its worker process; empty if there is none."""
    kinds = dict.fromkeys(type(node) for node in reachable(dataset) if isinstance(node, Dataset))
    asks = (each for each in kinds if "get_worker_info" in named_values(each, "__getitem__")[1])
    return next((each.__name__ for each in asks), "")


def _values_in(value: Any) -> Iterator[Any]:
    if isinstance(value, (tuple, list)):
        yield from itertools.chain.from_iterable(map(_values_in, value))
    elif isinstance(value, dict):
        yield from _values_in(tuple(value.values()))
    else:
        yield value


def _size_of(value: Any) -> int:
    if isinstance(value, (Tensor, np.ndarray)):
        return value.nbytes
    size = getattr(value, "size", None)
    return size[0] * size[1] * len(value.getbands()) if isinstance(size, tuple) and hasattr(value, "getbands") else 64


def _is_bytes(value: Any) -> bool:
    return not isinstance(value, (Tensor, np.ndarray)) or value.dtype in (torch.uint8, np.uint8)
