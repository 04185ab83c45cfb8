"""Where a ``Prefetcher`` takes its batches from: any loader, and what it takes to come back to a place in it."""

from __future__ import annotations

import copy
import itertools
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, IterDataPipe, MapDataPipe, SubsetRandomSampler

from flatout.core.kinds import check_number
from flatout.data.in_memory_loader import InMemoryLoader
from flatout.data.loaders import clone_loader, seeds_workers_once
from flatout.data.order import IndexSpan, OpaqueBatch, Order
from flatout.data.position import Progress
from flatout.data.remote import InWorker, WorkerError, death_of_a_worker, watch


class Source:
    """Batches of a loader that cannot say where it is."""

    def __init__(self, loader: Iterable[Any], reason: str) -> None:
        self._loader = loader
        self._reason = reason
        self.is_fresh = False  # whether nobody writes to the memory of a batch again

    def open(self, pinned_for: int | None = None) -> Epoch:
        """An epoch, or the rest of the one that a loaded state was saved in.

        Args:
            pinned_for: a CUDA device; batches may lie in pinned memory that torch does not know, and have to be copied
                to that device by a :class:`NativeCopier`.
        """
        batches = iter(self._loader)
        return Epoch(batches, closes=batches is not self._loader)

    def mark(self) -> Any:
        """A place behind the batch that an epoch yielded last; cheap enough to be asked for behind each."""
        return None

    def state_dict(self, mark: Any) -> dict[str, Any]:
        """What it takes to go on behind ``mark``.

        Raises:
            TypeError: this loader cannot; the message says why.
        """
        raise TypeError(f"a {type(self._loader).__name__} cannot go on in mid-epoch: {self._reason}")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Have the next epoch go on where ``state`` was saved.

        Raises:
            TypeError: as in :meth:`state_dict`.
            ValueError: the state does not fit.
        """
        self.state_dict(None)


class Epoch:
    """One pass over a loader. The batch of a worker process that has died raises a :class:`WorkerError`.

    Args:
        batches: yields the batches.
        closes: whether to close ``batches`` at the end. False for an iterator that is the loader itself.
    """

    def __init__(self, batches: Iterator[Any], *, closes: bool = True) -> None:
        self._batches: Iterator[Any] | None = batches
        self._closes = closes
        watch(batches)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        batches = self._batches
        if batches is None:
            raise StopIteration
        try:
            batch = next(batches)
        except StopIteration:
            self._ended()
            self.close()
            raise
        except Exception as error:
            self._passed()
            if death := death_of_a_worker(batches, error):
                self._died()
                self.close()
                raise WorkerError(death) from error
            raise
        self._passed()
        return batch

    def close(self) -> None:
        """Drop the loader's iterator, and with it whatever it has running."""
        batches, self._batches = self._batches, None
        close = getattr(batches, "close", None)
        if self._closes and callable(close):
            close()

    def _passed(self) -> None:
        """A batch was yielded, or an exception in its place."""

    def _ended(self) -> None:
        """There is no further batch."""

    def _died(self) -> None:
        """The workers are gone."""


def source_of(loader: Iterable[Any] | Source) -> Source:
    """What is known of loaders of this kind."""
    if isinstance(loader, Source):
        return loader
    if type(loader) is InMemoryLoader:
        return _InMemory(loader)
    if type(loader) is DataLoader and not isinstance(loader.dataset, (IterDataPipe, MapDataPipe)):
        if not isinstance(loader.dataset, IterableDataset):
            return _MapStyle(loader)
        return _Streamed(loader)
    if isinstance(loader, (list, tuple)):
        return _Listed(loader)
    if callable(getattr(loader, "state_dict", None)) and callable(getattr(loader, "load_state_dict", None)):
        return _Stateful(loader)
    return Source(loader, "it has no state_dict() and load_state_dict()")


def _check_keys(state: dict[str, Any], *names: str) -> None:
    if set(state) != set(names):
        raise ValueError(f"the state was saved by a loader of another kind: it holds {', '.join(state)}")


class _InMemory(Source):
    def __init__(self, loader: InMemoryLoader) -> None:
        super().__init__(loader, "")
        self._memory = loader
        self._progress = loader.progress
        self.is_fresh = True

    def open(self, pinned_for: int | None = None) -> Epoch:
        if pinned_for is None or self._memory.device is not None:
            return Epoch(iter(self._memory))
        return Epoch(self._memory.iterate_pinned(pinned_for))

    def mark(self) -> Any:
        return self._progress.position

    def state_dict(self, mark: Any) -> dict[str, Any]:
        return self._progress.state_dict(mark)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._progress.load_state_dict(state)


class _Stateful(Source):
    """A loader with a state of its own."""

    def __init__(self, loader: Any) -> None:
        super().__init__(loader, "")
        self._stateful = loader

    def mark(self) -> Any:
        try:
            return copy.deepcopy(self._stateful.state_dict())
        except Exception as error:  # raised where the state is asked for
            return error

    def state_dict(self, mark: Any) -> dict[str, Any]:
        if isinstance(mark, Exception):
            raise mark
        return mark

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._stateful.load_state_dict(state)


class _Listed(Source):
    """Batches in a list."""

    def __init__(self, batches: list[Any] | tuple[Any, ...]) -> None:
        super().__init__(batches, "")
        self._list = batches
        self.first = 0
        """Position at which the next epoch begins."""
        self.passed = 0
        self.loads = 0
        """Number of states that were loaded. An epoch that began before the last load does not move the position."""

    def open(self, pinned_for: int | None = None) -> Epoch:
        return _ListedEpoch(itertools.islice(self._list, self.first, None), self)

    def mark(self) -> Any:
        return self.passed

    def state_dict(self, mark: Any) -> dict[str, Any]:
        return {"batches": mark}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        _check_keys(state, "batches")
        self.passed = self.first = check_number(state["batches"], "batches")
        self.loads += 1


class _ListedEpoch(Epoch):
    def __init__(self, batches: Iterator[Any], source: _Listed) -> None:
        super().__init__(batches)
        self._source, self._loads, self._count = source, source.loads, source.first

    def _passed(self) -> None:
        self._count += 1
        self._is_at(self._count)

    def _ended(self) -> None:
        self._is_at(0)

    def _is_at(self, place: int) -> None:
        if self._source.loads == self._loads:
            self._source.passed, self._source.first = place, 0


class _FromDataLoader(Source):
    """A twin of the user's ``DataLoader``: its exceptions come from workers whole, and it can begin in mid-epoch."""

    def __init__(self, loader: DataLoader) -> None:
        super().__init__(loader, "")
        self._dataloader = loader
        self._persistent: DataLoader | None = None
        self.is_fresh = loader.pin_memory

    def _iterate(self) -> tuple[DataLoader, Any]:
        """Return a twin of the loader and an iterator over the twin. A twin with persistent workers is reused."""
        twin = self._make_twin() if self._persistent is None else self._persistent  # `or` would call the twin's len()
        self._persistent = twin if twin.persistent_workers else None
        # Lets the twin warn, as torch does, when it yields more batches than `len(loader)`.
        twin._IterableDataset_len_called = self._dataloader._IterableDataset_len_called
        return twin, iter(twin)

    def _make_twin(self, worker_seed: int | None = None, **changes: Any) -> DataLoader:
        loader = self._dataloader
        if loader.num_workers:
            changes["worker_init_fn"] = InWorker(loader.worker_init_fn)
        if worker_seed is not None:
            # An epoch's begin draws a seed for the workers: the user's generator has given it before.
            changes["generator"] = torch.Generator().manual_seed(worker_seed)
        return clone_loader(loader, **changes)

    def forget_workers(self) -> None:
        """Persistent workers have ended."""
        self._persistent = None


class _Streamed(_FromDataLoader):
    """A ``DataLoader`` over an iterable dataset, which alone can say where it is."""

    def __init__(self, loader: DataLoader) -> None:
        super().__init__(loader)
        self._stateful: Any = loader.dataset
        self.is_under_way = False
        self.was_last = False  # the batch that was yielded last
        self.goes_on = False
        """True from ``load_state_dict`` until the resumed epoch yields a batch."""

    def open(self, pinned_for: int | None = None) -> Epoch:
        _, batches = self._iterate()
        if self.goes_on and self.was_last:
            batches = iter(())
        self.is_under_way, self.was_last = True, self.goes_on and self.was_last
        return _StreamedEpoch(batches, self)

    def _make_twin(self, worker_seed: int | None = None, **changes: Any) -> DataLoader:
        return super()._make_twin(0 if self.goes_on else None, **changes)

    def mark(self) -> Any:
        if self._why_not():
            return None
        return copy.deepcopy(self._stateful.state_dict()), self.is_under_way, self.was_last

    def state_dict(self, mark: Any) -> dict[str, Any]:
        if reason := self._why_not():
            raise TypeError(f"a DataLoader over a {type(self._stateful).__name__} cannot go on in mid-epoch: {reason}")
        return dict(zip(("dataset", "is_under_way", "was_last"), mark, strict=True))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state_dict((None, None, None))
        _check_keys(state, "dataset", "is_under_way", "was_last")
        self._stateful.load_state_dict(state["dataset"])
        self.is_under_way = self.goes_on = state["is_under_way"]
        self.was_last = state["was_last"]

    def _why_not(self) -> str:
        if not hasattr(self._stateful, "state_dict") or not hasattr(self._stateful, "load_state_dict"):
            return "an iterable dataset needs state_dict() and load_state_dict() of its own"
        if self._dataloader.num_workers:
            return "its state is in worker processes (num_workers=0, or torchdata's StatefulDataLoader, would do)"
        return ""


class _StreamedEpoch(Epoch):
    def __init__(self, batches: Iterator[Any], source: _Streamed) -> None:
        super().__init__(batches)
        self._source = source

    def _passed(self) -> None:
        # Less than a batch: the dataset has been asked for more, in vain.
        fetcher = getattr(self._batches, "_dataset_fetcher", None)
        self._source.was_last, self._source.goes_on = getattr(fetcher, "ended", False), False

    def _ended(self) -> None:
        self._source.is_under_way = self._source.goes_on = False

    def _died(self) -> None:
        self._source.forget_workers()


class _MapStyle(_FromDataLoader):
    """A ``DataLoader`` whose sampler says where it is."""

    def __init__(self, loader: DataLoader) -> None:
        super().__init__(loader)
        self.progress = Progress(loader)
        self.worker_seed = 0

    def open(self, pinned_for: int | None = None) -> Epoch:
        if self.progress.goes_on:
            self._persistent = None  # made by an epoch that began but yielded no batch
        if self._persistent is not None and not seeds_workers_once(self._dataloader):
            _noted(self._persistent).draws_seed = True
        twin, batches = self._iterate()
        self.progress.has_run = True
        _noted(twin).has_order = False
        return _MapStyleEpoch(batches, self, _noted(twin))

    def _make_twin(self, worker_seed: int | None = None, **changes: Any) -> DataLoader:
        noted = _Noted(self._dataloader, self.progress)
        if self.progress.goes_on or self._had_workers:
            # The same worker seeds as before would draw the same augmentation as the first batches had.
            position = self.progress.position or {"taken": 0}
            worker_seed = position.get("worker_seed", self.worker_seed) + position["taken"]
            noted.begin()  # before there are workers: a sampler that draws other batches is an error
            noted.has_order = True
        role = "sampler" if self._dataloader.batch_sampler is None else "batch_sampler"
        return super()._make_twin(worker_seed, **{role: noted})

    @property
    def _had_workers(self) -> bool:
        """True if an earlier epoch drew the single seed of persistent workers, of this loader or of its original."""
        return self.progress.has_run and seeds_workers_once(self._dataloader)

    def mark(self) -> Any:
        position = self.progress.position
        return None if position is None else position | {"worker_seed": self.worker_seed} | self._dataset_state()

    def state_dict(self, mark: Any) -> dict[str, Any]:
        if self._dataloader.num_workers and not self._dataloader.in_order:
            raise TypeError("a DataLoader with in_order=False cannot go on in mid-epoch: any batch may be missing")
        position = None if mark is None else {name: value for name, value in mark.items() if name != "dataset"}
        dataset = self._dataset_state() if mark is None else {n: value for n, value in mark.items() if n == "dataset"}
        return dataset | self.progress.state_dict(position) | {"worker_seed": self.worker_seed}

    def _dataset_state(self) -> dict[str, Any]:
        """Return the dataset's state if it has one. States of its copies in worker processes are unknown."""
        dataset: Any = self._dataloader.dataset
        if self._dataloader.num_workers or not (hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")):
            return {}
        return {"dataset": copy.deepcopy(dataset.state_dict())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.progress.load_state_dict(state)
        dataset: Any = self._dataloader.dataset
        if "dataset" in state and hasattr(dataset, "load_state_dict"):
            dataset.load_state_dict(copy.deepcopy(state["dataset"]))
        self.worker_seed = state.get("worker_seed", 0)
        self._persistent = None


class _Noted:
    """The sampler of a twin: draws what the user's does, when it does, and notes where each batch ends."""

    def __init__(self, loader: DataLoader, progress: Progress) -> None:
        self._loader = loader
        self._progress = progress
        self.order: Order | None = None
        self.given: deque[tuple[IndexSpan | OpaqueBatch, int]] = deque()
        self.draws_seed = False
        """Whether an epoch's begin draws the seed of workers, which persistent ones have already."""
        self.has_order = False
        """Whether the order of the epoch that is about to begin is there."""

    def begin(self) -> None:
        self.order = self._progress.begin(None, reads_ahead=self._loader.num_workers > 0)
        self.given = deque()

    def __iter__(self) -> Iterator[Any]:
        # DataLoader iterates its sampler twice before its first workers load; the rest of an epoch is there once, and
        # so is an epoch that workers would have been there for.
        if not self.has_order:
            self.begin()
            if self.draws_seed:
                torch.empty((), dtype=torch.int64).random_(generator=self._loader.generator)
        assert self.order is not None
        return _NotedBatches(self._loader, self.order, self.given)

    def __len__(self) -> int:
        return len(self._loader)


class _NotedBatches:
    """Not a generator: one that raises has ended, a sampler need not have."""

    def __init__(self, loader: DataLoader, order: Order, given: deque[tuple[IndexSpan | OpaqueBatch, int]]) -> None:
        sampler = loader.sampler if loader.batch_sampler is None else getattr(loader.batch_sampler, "sampler", None)
        self._names = sampler.indices if type(sampler) is SubsetRandomSampler else None
        self._is_batched = loader.batch_sampler is not None
        self._order = order
        self._given = given
        self._lists: Iterator[tuple[IndexSpan | OpaqueBatch, int, Any]] = iter(())

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        found = next(self._lists, None)
        if found is None:
            span = self._order.next_span(asked=True)
            if span is None:
                raise StopIteration
            self._lists = _lists(span)
            found = next(self._lists)
        span, number, indices = found
        self._given.append((span, number))
        if self._names is not None and isinstance(span, IndexSpan):
            indices = [self._names[place] for place in indices]
        return indices if self._is_batched else indices[0]


def _noted(twin: DataLoader) -> _Noted:
    return twin.sampler if twin.batch_sampler is None else twin.batch_sampler  # type: ignore[return-value]


def _lists(span: IndexSpan | OpaqueBatch) -> Iterator[tuple[IndexSpan | OpaqueBatch, int, Any]]:
    """The batches of a span: its number in it, and its indices."""
    if isinstance(span, OpaqueBatch):
        yield span, 1, span.indices
        return
    for number in range(span.batches):
        begin = number * span.count
        if span.indices is None:
            yield span, number + 1, list(range(span.first + begin, span.first + begin + span.count))
        else:
            yield span, number + 1, span.indices[begin : begin + span.count].tolist()


class _MapStyleEpoch(Epoch):
    def __init__(self, batches: Any, source: _MapStyle, noted: _Noted) -> None:
        super().__init__(batches)
        assert noted.order is not None
        self._source, self._progress = source, source.progress
        self._order, self._given = noted.order, noted.given
        self._counted = 0
        source.worker_seed = batches._base_seed

    def _passed(self) -> None:
        # Workers have sent so many batches, or exceptions in their place; without workers what is drawn has passed.
        arrived = getattr(self._batches, "_rcvd_idx", self._counted + len(self._given))
        while self._counted < arrived and self._given:  # a sampler that raises has drawn no batch
            self._counted += 1
            self._progress.reached(self._order, *self._given.popleft())

    def _ended(self) -> None:
        self._progress.ended(self._order)

    def _died(self) -> None:
        self._source.forget_workers()
