"""Worker processes whose batches follow changes of the dataset, like a loader without workers."""

from __future__ import annotations

import os
import resource
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader
from torch.utils.data._utils.pin_memory import pin_memory
from torch.utils.data.dataloader import (
    _BaseDataLoaderIter,
    _DatasetKind,
    _MultiProcessingDataLoaderIter,
    _SingleProcessDataLoaderIter,
)

from flatout.core.batches import cloned, tensors_of
from flatout.core.contents import Contents
from flatout.data.cache import SampleCache
from flatout.data.in_memory_loader import InMemoryLoader
from flatout.data.loader_class import GET_ITERATOR, base_of
from flatout.data.loaders import clone_loader
from flatout.data.seeding import mixed

_SHARE = 0.5
"""Share of the permitted file descriptors from which batches are copied out of shared memory."""


class WorkersWatch:
    """Watch over the workers of a loader and of its clones.

    Workers load copies of the dataset, from the time of their start. Batches that they have loaded when the dataset
    changes are made again in this process. No workers are used from then on. Before each batch, ``watch`` compares
    what takes about 2 microseconds (``Contents.changed_nearby``). Before an epoch of persistent workers it compares
    everything, and starts new workers after a change.

    Each tensor of a batch from a worker holds a file descriptor. If the script keeps so many that the limit comes near,
    batches are copied.

    Args:
        on_change: called with the change, as a clause.
    """

    def __init__(self, on_change: Callable[[str], object]) -> None:
        self._on_change = on_change
        self.is_off = False
        self._contents: Contents | None = None
        self._copies = False
        self._left = 0  # batches until descriptors are counted again

    def begin(self, loader: DataLoader[Any]) -> bool:
        """Compare everything that the workers use with the last call. Return True if it is as before."""
        if self._contents is not None and not self._contents.changed():
            return True
        dataset = loader.dataset.dataset if isinstance(loader.dataset, SampleCache) else loader.dataset
        self._contents = Contents(dataset, loader.collate_fn)
        return False

    def look(self) -> None:
        """Turn the workers off if the dataset has changed since ``begin``."""
        if not self.is_off and self._contents is not None and (seen := self._contents.changed_nearby()):
            self.is_off = True
            self._on_change(seen)

    def kept(self, batch: Any) -> Any:
        """Return a batch, or its copy if shared memory holds too many descriptors."""
        self._left -= 1
        if self._left <= 0:
            self._count(batch)
        return cloned(batch) if self._copies else batch

    def _count(self, batch: Any) -> None:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if limit == resource.RLIM_INFINITY or not os.path.isdir("/proc/self/fd"):
            self._left = 1 << 30
            return
        room = int(_SHARE * limit) - len(os.listdir("/proc/self/fd"))
        held = max(1, len(tensors_of(batch)))
        self._copies = room < held
        self._left = max(1, room // (2 * held)) if room > 0 else 64


def watch_workers(loader: Any, on_change: Callable[[str], object]) -> Any:
    """Return ``loader``. Its workers and the workers of its clones are watched from now on.

    Args:
        loader: a loader with a base (``base_of``), with a map-style dataset.
        on_change: called with the change, as a clause, when a change of the dataset ends the workers.
    """
    base = base_of(loader)
    assert base is not None
    watched = WatchedIterators(WorkersWatch(on_change))
    for each in (loader, base):
        if isinstance(each, DataLoader):
            vars(each)[GET_ITERATOR] = watched.of(each)
    return loader


def check_epochs(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Return ``loader``. Its ``SampleCache``, also in clones, is checked at the start of each epoch from now on."""
    vars(loader)[GET_ITERATOR] = WatchedIterators(None).of(loader)
    return loader


def is_off(loader: Any) -> bool:
    """Return True if a change of the dataset has ended the watched workers or the cache of a loader."""
    if isinstance(loader, InMemoryLoader):
        return loader.is_off
    watched, dataset = getattr(loader, "__dict__", {}).get(GET_ITERATOR), getattr(loader, "dataset", None)
    ended = watched is not None and watched.watch is not None and watched.watch.is_off
    return ended or (isinstance(dataset, SampleCache) and dataset.given_up is not None)


class WatchedIterators:
    """``_get_iterator`` of a loader, in place of torch's.

    Args:
        watch: watch over the workers. None: they are the user's own.
    """

    def __init__(self, watch: WorkersWatch | None) -> None:
        self.watch = watch
        self._loader: Callable[[], DataLoader[Any] | None] = lambda: None

    def of(self, loader: DataLoader[Any]) -> WatchedIterators:
        """Return the same for another loader."""
        made = WatchedIterators(self.watch)
        made._loader = weakref.ref(loader)  # a strong one would keep loader and workers alive
        return made

    def __call__(self) -> _BaseDataLoaderIter:
        """Return an iterator over a new epoch."""
        loader = self._loader()
        assert loader is not None
        if isinstance(loader.dataset, SampleCache):
            loader.dataset.check()
        if self.watch is None or loader.num_workers == 0:
            return DataLoader._get_iterator(loader)
        if self.watch.is_off:
            return _SingleProcessDataLoaderIter(clone_loader(base_of(loader), num_workers=0))
        loader.check_worker_number_rationality()
        return WatchedWorkers(loader, self.watch)


class WatchedWorkers(_MultiProcessingDataLoaderIter):
    """Iterator over a loader with workers, which continues without workers after a change of the dataset.

    Args:
        loader: the loader.
        watch: watch over the workers.
    """

    def __init__(self, loader: DataLoader[Any], watch: WorkersWatch) -> None:
        self._watch = watch
        self._sent: dict[int, Any] = {}
        self._again: deque[Any] = deque()
        self._is_alone = False
        watch.begin(loader)
        super().__init__(loader)
        self._fetcher = _DatasetKind.create_fetcher(
            self._dataset_kind, self._dataset, self._auto_collation, self._collate_fn, self._drop_last
        )

    def _reset(self, loader: DataLoader[Any], first_iter: bool = False) -> None:
        self._sent.clear()
        self._again.clear()
        if first_iter:
            super()._reset(loader, first_iter)
        elif self._watch.is_off:
            self._go_on_alone()
            _BaseDataLoaderIter._reset(self, loader, first_iter)
            self._send_idx = self._rcvd_idx = 0
        elif self._watch.begin(loader):
            super()._reset(loader, first_iter)
        else:
            self._start_again(loader)

    def _start_again(self, loader: DataLoader[Any]) -> None:
        """Start new workers, which get the present dataset. This draws nothing from the user's generators."""
        self._shutdown_workers()
        seeded = torch.Generator().manual_seed(mixed(int(self._base_seed), 1) >> 1)
        without_order = clone_loader(base_of(loader), generator=seeded)
        vars(without_order)["batch_sampler" if loader.batch_sampler is not None else "sampler"] = ()
        super().__init__(without_order)
        self._index_sampler = loader._index_sampler
        super()._reset(loader, True)

    def _next_index(self) -> Any:
        index = super()._next_index()
        self._sent[self._send_idx] = index
        return index

    def _next_data(self) -> Any:
        self._watch.look()
        if self._watch.is_off and not self._is_alone:
            self._again.extend(self._sent[number] for number in sorted(self._task_info))
            self._go_on_alone()
        if self._is_alone:
            return self._made_here()
        batch = self._watch.kept(super()._next_data())
        self._sent.pop(self._rcvd_idx - 1, None)
        return batch

    def _go_on_alone(self) -> None:
        """End the workers, and drop the batches that they have loaded."""
        self._shutdown_workers()
        self._workers, self._task_info, self._is_alone = [], {}, True

    def _made_here(self) -> Any:
        """Return the next batch in the same order, made in this process."""
        indices = self._again.popleft() if self._again else _BaseDataLoaderIter._next_index(self)
        self._rcvd_idx += 1
        batch = self._fetcher.fetch(indices)
        return pin_memory(batch, self._pin_memory_device) if self._pin_memory else batch
