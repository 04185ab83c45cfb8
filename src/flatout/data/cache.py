"""Cache of samples that are slow to decode: ``CachedDataset`` for samples, ``cache_in_memory`` for whole batches."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, MapDataPipe, default_collate

from flatout.core.batches import cloned, map_tensors
from flatout.core.machine import available_memory
from flatout.core.random_state import RandomState, generators_in
from flatout.data.forwarding import Forwarding
from flatout.data.in_memory_loader import InMemoryLoader, why_not_collated
from flatout.data.order import why_not_ordered
from flatout.data.prefetcher import Prefetcher
from flatout.data.samples import NotCacheable, SampleLayout, taken_apart
from flatout.data.table import SharedRows, Table
from flatout.data.watch import Watch, files_opened

_CHUNK = 32  # samples that `fill` decodes at a time, at most
_CHUNKS = 8  # for each worker, at least; with larger chunks, workers would wait longer for the last one
_SECOND_LOOK = 16  # samples evaluated twice


class SampleCache(Forwarding, Dataset):
    """Base of datasets that keep samples, or parts of samples, of another dataset in shared memory.

    A later change of ``dataset`` ends the cache. From then on all samples come from ``dataset``, in all processes. The
    process that made the cache looks for changes. It compares attributes and the length whenever samples are
    requested. At the start of each epoch it compares everything that Python can reach from ``dataset``.

    Args:
        dataset: map-style.

    Attributes:
        dataset: the wrapped dataset.
        on_change: called with the change, as a clause, when a change ends the cache. None: warn.
        why_unsure: reason why some changes of ``dataset`` cannot be seen, as a clause; empty if all can.

    Raises:
        NotCacheable: the dataset cannot be cached. The message says why.
    """

    _OWN = frozenset({"dataset", "on_change", "why_unsure"})
    _table: SharedRows

    def __init__(self, dataset: Any) -> None:
        if reason := why_not_map_style(dataset):
            raise NotCacheable(reason)
        if hasattr(dataset, "set_epoch"):
            raise NotCacheable("the dataset has a set_epoch: its samples may change from epoch to epoch")
        self.dataset = dataset
        self.on_change: Callable[[str], object] | None = None
        self._watch: Watch | None = None
        self._ended = False  # True if this process has seen a change
        self._asked = 0  # samples that were requested since the last check
        self.why_unsure = ""
        self._generators: list[Any] | None = generators_in(dataset)

    def __len__(self) -> int:
        return len(self.dataset)

    @property
    def _wrapped(self) -> Any:
        return self.dataset

    def __getstate__(self) -> dict[str, Any]:
        # Generators are searched again in the copy. Only one process looks for changes.
        return vars(self) | {"_generators": None, "_watch": None, "on_change": None}

    def __copy__(self) -> SampleCache:
        copied = type(self).__new__(type(self))
        vars(copied).update(vars(self))  # with the watch, as both have the same dataset
        return copied

    @property
    def given_up(self) -> str | None:
        """Reason why samples are no longer cached, the same in all processes; ``None`` while they are cached."""
        return self._table.note

    def _sample_was_read(self) -> None:
        if self._watch is not None:
            self._watch.sample_was_read()

    def check(self) -> bool:
        """Look for changes of the dataset at the start of an epoch. Return False if samples come from the dataset."""
        self._asked = 0
        return self._holds_after(None if self._watch is None else self._watch.seen())

    def check_nearby(self) -> bool:
        """Look for changes of the dataset in about 2 microseconds. Return False if samples come from the dataset."""
        if self._watch is not None and (seen := self._watch.seen_nearby()):
            return self._holds_after(seen)
        return not self._ended and not self._table.has(self._table.rows)  # the note, as in `given_up`

    def _holds_after(self, seen: str | None) -> bool:
        if not seen:
            return not self._ended and self.given_up is None
        self._watch, self._ended = None, True  # another process may still be writing the note
        if self._table.leave_note(f"the dataset has changed: {seen}"):
            if self.on_change is None:
                warnings.warn(f"samples are not cached any more: {seen}", stacklevel=4)
            else:
                self.on_change(seen)
        return False

    def _still_holds(self, count: int) -> bool:
        """Look for changes before ``count`` samples are taken."""
        is_new_epoch = self._asked + count > self._table.rows
        if self._watch is not None and self._watch.begins_in_worker():
            self.on_change = None  # that function belongs to the process that made the cache
            still_holds = self._holds_after(self._watch.seen_in_contents())
        else:
            still_holds = self.check() if is_new_epoch else self.check_nearby()
        self._asked += count
        return still_holds

    def _row(self, index: Any) -> int | None:
        """Return the row of an index; ``None`` unless the index is an integer in ``[0, len)``."""
        if isinstance(index, Tensor) and index.dim() == 0 and index.dtype in (torch.int64, torch.int32):
            index = index.item()
        if (type(index) is int or isinstance(index, np.integer)) and 0 <= index < self._table.rows:
            return int(index)
        return None

    def _give_up(self, reason: NotCacheable) -> None:
        if self._table.leave_note(str(reason)):
            warnings.warn(f"samples are not cached any more: {reason}", stacklevel=3)


class CachedDataset(SampleCache):
    """Deterministic map-style dataset whose samples are decoded once, by the first process that requests them.

    Samples are stored in columns of contiguous memory. All processes that are forked later share this memory, and so do
    processes that ``multiprocessing`` starts by any method. Examples are the workers of a ``DataLoader`` in all epochs,
    and the ranks of a job. Readers do not write to the memory, so there is only one copy. A sample takes memory when it
    is written. The last user frees the memory. Any other pickle, and a deep copy, begins without decoded samples. If a
    process dies while it writes a sample, this sample is never cached.

    A sample equals ``dataset[index]`` in containers, types and values, and is a new copy. An ``np.memmap`` becomes an
    ``np.ndarray``. Indices that are not integers in ``[0, len)`` are passed to ``dataset``, and errors of ``dataset``
    are raised unchanged. Reading or setting a public attribute reaches ``dataset``.

    A later change of ``dataset`` ends the cache. From then on all samples come from ``dataset``, in all processes. The
    process that made the cache looks for changes. It compares attributes and the length whenever samples are
    requested. At the start of each epoch it compares everything that Python can reach from ``dataset``, and the files
    that were opened for samples, and reads some samples again. ``check`` is the start of an epoch, and so is the
    request of as many samples as there are. Three kinds of changes may be missed: in memory that only a library in C
    can reach, in other processes, and of large arrays in mid-epoch.

    Caching would freeze random augmentation, so random datasets are refused. A dataset counts as random if evaluating
    samples moves a global generator of torch, ``random`` or NumPy, or a generator in its attributes. It also counts as
    random if a second evaluation of 16 samples, spread over the dataset, gives other bits. Other randomness is not
    detected.

    A sample may later move a generator, or have another layout than the first sample. Then the dataset warns once, and
    all processes take this sample and later ones from ``dataset``. Their random numbers are those of an uncached
    dataset. Other threads must not draw random numbers while a sample is evaluated.

    Args:
        dataset: map-style. Samples are tensors, arrays and numbers of constant shape in dicts, lists, (named) tuples.
        byte_budget: largest number of bytes of all samples together. Default: a quarter of the available memory.
        force: skip the checks for randomness. The first evaluation of a sample is kept, so augmentation is frozen.

    Attributes:
        dataset: the wrapped dataset.
        on_change: called with the change, as a clause, when a change ends the cache. None: warn.
        why_unsure: reason why some changes of ``dataset`` cannot be seen, as a clause; empty if all can.

    Raises:
        NotCacheable: the dataset cannot be cached. The message says why. Generators are restored, as on success.
    """

    _table: Table

    def __init__(self, dataset: Any, *, byte_budget: int | None = None, force: bool = False) -> None:
        super().__init__(dataset)
        self._watch = None if force else Watch(dataset, self._holds)
        self.why_unsure = "" if self._watch is None else self._watch.opaque
        self._force = force
        budget = available_memory() // 4 if byte_budget is None else byte_budget
        with RandomState.of(self._generators or []).restored(), files_opened() as files:
            before = self._random_state()
            (sample,) = samples_of(dataset, [0])
            _refuse_moved(before, [0])  # early, as most random datasets draw for the first sample
            layout, values = _taken_apart(0, sample)
            self._table = _table(layout, len(dataset), budget)
            self._table.put(0, values)
            if not force:
                self._look_twice()
        self._was_read(files)

    def __getitem__(self, index: Any) -> Any:
        row = self._row(index)
        if row is None or not self._still_holds(1):
            return self.dataset[index]
        if self._table.has(row):
            return self._table.take(row)
        before = self._random_state()
        sample = self.dataset[row]
        self._sample_was_read()
        try:
            self._keep(before, [row], [sample])
        except NotCacheable as reason:
            self._give_up(reason)
            return sample
        return self._table.take(row) if self._table.has(row) else sample

    def __getitems__(self, indices: Sequence[Any]) -> list[Any]:
        """Return the samples of many indices. ``dataset.__getitems__``, if it exists, decodes all missing samples."""
        batched = getattr(self.dataset, "__getitems__", None)
        if not batched:
            return [self[index] for index in indices]
        rows = [row for row in map(self._row, indices) if row is not None]
        if len(rows) < len(indices) or not self._still_holds(len(rows)):
            return batched(indices)
        missing = [row for row in dict.fromkeys(rows) if not self._table.has(row)]
        made: dict[Any, Any] = {}
        if missing:
            before = self._random_state()
            samples = batched(missing)
            self._sample_was_read()
            try:
                self._keep(before, missing, samples)
            except NotCacheable as reason:
                self._give_up(reason)
                if before is not None:
                    before.restore()  # so that the call below draws the numbers of an uncached batch
                return batched(indices)
            made = dict(zip(missing, samples, strict=True))
        return [self._table.take(row) if self._table.has(row) else made[row] for row in rows]

    def fill(self, *, num_workers: int = 0, multiprocessing_context: Any = None) -> None:
        """Decode all samples that are missing.

        Args:
            num_workers: number of processes that decode; 0: decode on the calling thread, in order.
            multiprocessing_context: start method of the processes, as in ``DataLoader``.

        Raises:
            NotCacheable: a sample raised an exception, moved a generator, or has another layout than the first. Or
                samples are no longer cached (see ``given_up``).
            WorkerError: a worker process died.
        """
        if self.given_up is not None:
            raise NotCacheable(self.given_up)
        missing = self._table.missing()
        size = min(_CHUNK, max(1, len(missing) // (_CHUNKS * max(1, num_workers))))
        chunks = [missing[start : start + size] for start in range(0, len(missing), size)]
        if self._watch is not None and not self._holds_after(self._watch.seen_in_contents()):
            raise NotCacheable(str(self.given_up))
        with RandomState.capture(self.dataset).restored(), files_opened() as files:
            if num_workers == 0:
                for chunk in chunks:
                    self._decode(chunk)
            elif chunks:
                for opened in self._decoded_in_workers(chunks, num_workers, multiprocessing_context):
                    files.update(dict.fromkeys(opened))
        self._was_read(files)

    def _was_read(self, files: Iterable[str]) -> None:
        if self._watch is not None:
            self._watch.samples_were_read(files)

    def _holds(self, row: int) -> bool:
        """Make a sample again, and return True if it equals the one in memory."""
        sample = self.dataset[row]
        try:
            layout, values = _taken_apart(row, sample)
        except NotCacheable:
            return False
        return layout == self._table.layout and (not self._table.has(row) or self._table.holds(row, values))

    def _decoded_in_workers(self, chunks: list[list[int]], workers: int, context: Any) -> Iterator[list[str]]:
        """Decode samples in worker processes, and yield the files that these have opened."""
        loader: DataLoader = DataLoader(
            _Decoding(self),
            batch_size=None,
            sampler=chunks,
            num_workers=min(workers, len(chunks)),
            multiprocessing_context=context,
        )
        decoded = Prefetcher(loader, "cpu")
        try:
            yield from decoded
        finally:
            decoded.close()

    def _random_state(self) -> RandomState | None:
        """Return the states of the generators that must not move while a sample is made; ``None`` if forced."""
        if self._force:
            return None
        if self._generators is None:
            self._generators = generators_in(self.dataset)
        return RandomState.of(self._generators)

    def _decode(self, rows: list[int]) -> None:
        if not rows:
            return
        before = self._random_state()
        self._keep(before, rows, list(map(cloned, samples_of(self.dataset, rows))))  # the dataset may reuse its memory

    def _keep(self, before: RandomState | None, rows: Sequence[int], samples: Any) -> None:
        """Write samples to their rows, unless a generator has moved since ``before``."""
        _refuse_moved(before, rows)
        _check_count(samples, len(rows))
        for row, sample in zip(rows, samples, strict=True):
            layout, values = _taken_apart(row, sample)
            if layout != self._table.layout:
                raise NotCacheable(f"dataset[{row}] {self._table.layout.difference(layout)}")
            self._table.put(row, values)

    def _look_twice(self) -> None:
        last = self._table.rows - 1
        spread = sorted({round(i * last / (_SECOND_LOOK - 1)) for i in range(_SECOND_LOOK)})
        self._decode([row for row in spread if not self._table.has(row)])
        before = self._random_state()
        for row, sample in zip(spread, samples_of(self.dataset, spread), strict=True):
            layout, values = _taken_apart(row, sample)
            if layout != self._table.layout or not self._table.holds(row, values):
                raise NotCacheable(f"dataset[{row}] gave two different results: the dataset is random")
        _refuse_moved(before, spread)


class _Decoding(Dataset):
    """Dataset whose items are lists of opened files. Fetching an item decodes a chunk of samples into the cache."""

    def __init__(self, cached: CachedDataset) -> None:
        self._cached = cached

    def __getitem__(self, chunk: list[int]) -> list[str]:
        with files_opened() as files:
            self._cached._decode(chunk)
        return sorted(files)


def cache_in_memory(
    loader: DataLoader,
    *,
    byte_budget: int | None = None,
    force: bool = False,
    depth: int = 2,
    threads: int | None = None,
) -> InMemoryLoader:
    """Decode every sample of a deterministic map-style dataset once, and gather batches from memory.

    Batches equal those of ``loader`` with ``num_workers=0``, in the same order. They have the types of default collate:
    ints become int64, floats float64, tuples lists, and NumPy arrays tensors. :meth:`CachedDataset.fill` decodes the
    samples, in worker processes if ``loader`` has some, else on the calling thread. Each sample is decoded once, except
    for 16 samples that are evaluated twice.

    Args:
        loader: a loader with default collate, over any map-style dataset. If this is a :class:`CachedDataset`, batches
            are gathered from its memory.
        byte_budget: as in :class:`CachedDataset`, which also defines the datasets that are refused.
        force: as in :class:`CachedDataset`. Augmentation is frozen.
        depth: batches gathered ahead.
        threads: gathering threads, as in :class:`InMemoryLoader`.

    Returns:
        A loader that reads the dataset only to look for changes, as in :class:`CachedDataset`. After a change its
        batches come from the dataset, as in ``loader``.

    Raises:
        NotCacheable: the samples cannot be cached. The message says why. Generators are restored, as on success.
        WorkerError: a worker process died.
    """
    reason = why_not_collated(loader) or why_not_map_style(loader.dataset) or why_not_ordered(loader)
    if reason is not None:
        raise NotCacheable(reason)
    cached = loader.dataset
    if type(cached) is not CachedDataset:
        cached = CachedDataset(cached, byte_budget=byte_budget, force=force)
    return _gathered(loader, cached, depth=depth, threads=threads)


def _gathered(loader: DataLoader, cached: CachedDataset, *, depth: int, threads: int | None) -> InMemoryLoader:
    """Decode the missing samples of ``cached`` and return a loader that gathers the batches of ``loader`` from them."""
    cached.fill(num_workers=loader.num_workers, multiprocessing_context=loader.multiprocessing_context)
    table = cached._table
    lost = next((row for row in range(table.rows) if not table.has(row)), None)
    if lost is not None:
        raise NotCacheable(f"dataset[{lost}] is being written, or was when its process ended")
    try:
        batch = default_collate([table.take(0)])  # has the containers of all batches
    except (TypeError, RuntimeError, ValueError) as error:
        raise NotCacheable(f"dataset[0] cannot be collated: {error}") from error
    skeleton = map_tensors(lambda _: torch.empty(0), batch)

    def assemble(tensors: list[Tensor]) -> Any:
        left = iter(tensors)
        return map_tensors(lambda _: next(left), skeleton)

    made_by = (_gathered, loader, cached)
    return InMemoryLoader.over(
        loader, table.columns, assemble, depth=depth, threads=threads, made_by=made_by, cached=cached
    )


def why_not_map_style(dataset: Any) -> str:
    """Return why the samples of a dataset cannot be requested by their indices; empty if they can."""
    if isinstance(dataset, (IterableDataset, MapDataPipe)):
        return f"the dataset is a {type(dataset).__name__}, not map-style"
    if not hasattr(dataset, "__len__"):
        return f"the dataset, a {type(dataset).__name__}, has no length"
    return "the dataset is empty" if len(dataset) == 0 else ""


def _table(layout: SampleLayout, rows: int, byte_budget: int) -> Table:
    if not layout.leaves:
        raise NotCacheable("dataset[0] holds no tensor, array or number")
    needed = rows * layout.nbytes
    if needed > byte_budget:
        raise NotCacheable(f"the samples take {needed:,} bytes, the budget is {byte_budget:,}")
    try:
        return Table(layout, rows)
    except OSError as error:
        raise NotCacheable(f"no {needed:,} bytes of shared memory for the samples: {error}") from error


def _taken_apart(index: int, sample: Any) -> tuple[SampleLayout, list[Any]]:
    try:
        return taken_apart(sample)
    except NotCacheable as reason:
        raise NotCacheable(f"dataset[{index}] {reason}") from None


def _refuse_moved(before: RandomState | None, indices: Sequence[int]) -> None:
    moved = before.moved() if before is not None else None
    if moved is not None:
        raise NotCacheable(f"evaluating {_named(indices)} moved {moved}: the dataset is random")


def _check_count(samples: Any, count: int) -> None:
    if not isinstance(samples, (list, tuple)) or len(samples) != count:
        raise NotCacheable(f"__getitems__ does not return a list of {count} samples for as many indices")


def samples_of(dataset: Any, indices: Sequence[int]) -> Iterator[Any]:
    """Yield ``dataset[i]`` for each index, fetched as by ``DataLoader``."""
    batched = getattr(dataset, "__getitems__", None)
    for asked in [list(indices)] if batched else [[index] for index in indices]:
        try:
            samples = batched(asked) if batched else [dataset[index] for index in asked]
        except Exception as error:  # the user's own code, which raises again in the training
            raise NotCacheable(f"{_named(asked)} raised {type(error).__name__}: {error}") from error
        _check_count(samples, len(asked))
        yield from samples


def _named(indices: Sequence[int]) -> str:
    return f"dataset[{indices[0]}]" if len(indices) == 1 else f"dataset[{indices[0]}..{indices[-1]}]"
