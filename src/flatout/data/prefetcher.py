"""``Prefetcher``: the batches of any loader, on the device before they are asked for."""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader

from flatout.data.batch import map_tensors, move_object, tensors_of
from flatout.data.loaders import set_epoch
from flatout.data.memory import InMemoryLoader
from flatout.data.remote import WorkerError, death_of_a_worker, watch, with_whole_exceptions
from flatout.data.transfer import Copier, Copy, make_copier, make_ring

_PASSED_THROUGH = (
    "dataset",
    "sampler",
    "batch_sampler",
    "batch_size",
    "drop_last",
    "num_workers",
    "generator",
)


class Prefetcher:
    """Same batches, in the same order, as ``loader``; on ``device``, and ``depth`` of them ahead.

    On a CUDA device host batches are copied into reused pinned memory by a native thread and from there to
    the device on a stream of their own, while the current step computes. ``iter`` and ``next`` of ``loader``
    are called on the thread that iterates the prefetcher, in order, up to ``depth`` batches early: with
    ``num_workers=0`` the dataset's code runs where it always did. On a CPU device batches pass as they are:
    :class:`InMemoryLoader` gathers ahead by itself, and so do worker processes.

    An exception of ``loader`` reaches the user where it would without the prefetcher, behind the batches that
    precede it, as the same object; from a worker process of a ``DataLoader`` with its arguments, its cause and the
    worker's traceback as text. A worker that has died is a :class:`WorkerError` when its batch is asked for.

    A batch is the user's: it stays valid for as long as it is held. It may be used on the stream that is current when
    it is taken; use on a further stream needs ``record_stream``, as ever.

    Args:
        loader: any iterable of batches (see :func:`map_tensors` for what a batch may be).
        device: where the batches are to be.
        depth: batches copied ahead, >= 1.

    Attributes:
        loader: the wrapped loader.
        stall_seconds: seconds that ``next`` has spent waiting for data, all epochs together.
        batches: batches handed out, all epochs together.
    """

    def __init__(self, loader: Iterable[Any], device: torch.device | str | int, depth: int = 2) -> None:
        if depth < 1:
            raise ValueError(f"depth must be >= 1, got {depth}")
        if isinstance(loader, Iterator):
            raise TypeError(f"loader must be iterable more than once, got the iterator {type(loader).__name__}")
        self.loader = loader
        self.device = torch.device(device)
        self.depth = depth
        self.reset_stall()
        self._ring: Any = None
        self._twin: DataLoader | None = None
        self._live: weakref.WeakSet[_PassThrough] = weakref.WeakSet()

    def __iter__(self) -> Iterator[Any]:
        iterator: _PassThrough
        if self.device.type == "cpu":
            iterator = _PassThrough(self, iter(self._source()))
        else:
            if self._ring is None:
                self._ring = make_ring(self.device, self.depth)
            # Pinned batches of which we know that nobody writes to them need no further copy on the host.
            memory = self.loader if type(self.loader) is InMemoryLoader else None
            fresh = memory is not None or (type(self.loader) is DataLoader and self.loader.pin_memory)
            if memory is None or self._ring is None:
                batches = iter(self._source())
            else:
                batches = memory.iterate_pinned(self._ring.device)
            iterator = _Ahead(self, batches, make_copier(self.device, self.depth, self._ring, fresh=fresh))
        self._live.add(iterator)
        return iterator

    def _source(self) -> Iterable[Any]:
        """The loader, or a twin of a ``DataLoader`` with workers: one as long as its workers live."""
        loader = self.loader
        if type(loader) is not DataLoader or loader.num_workers == 0:
            return loader
        if self._twin is None or not loader.persistent_workers:
            self._twin = with_whole_exceptions(loader)
        return self._twin

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name in _PASSED_THROUGH:
            return getattr(self.loader, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def set_epoch(self, epoch: int) -> None:
        """Pass ``epoch`` to the loader, or to whatever of it has a ``set_epoch``."""
        set_epoch(self.loader, epoch)

    @property
    def stall_fraction(self) -> float:
        """Share of the time since the first batch was asked for that went into waiting for data; 0 before."""
        if self._first_asked is None or self._last_given <= self._first_asked:
            return 0.0
        return self.stall_seconds / (self._last_given - self._first_asked)

    def reset_stall(self) -> None:
        """Set the counters back to 0."""
        self.stall_seconds = 0.0
        self.batches = 0
        self._first_asked: float | None = None
        self._last_given = 0.0

    def _waited(self, asked: float) -> None:
        given = time.perf_counter()
        if self._first_asked is None:
            self._first_asked = asked
        self._last_given = given
        self.stall_seconds += given - asked
        self.batches += 1

    def close(self) -> None:
        """End what iterators under way have running, and free the pinned memory; can be iterated again."""
        for iterator in list(self._live):
            iterator.close()
        if self._ring is not None:
            self._ring.clear()


class _PassThrough:
    """One epoch on the host: the loader's own batches, and the time that they took."""

    def __init__(self, prefetcher: Prefetcher, batches: Iterator[Any]) -> None:
        self._prefetcher = prefetcher
        self._batches: Iterator[Any] | None = batches
        watch(batches)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._batches is None:
            raise StopIteration
        asked = time.perf_counter()
        try:
            batch = self._fetch()
        except StopIteration:
            self.close()
            raise
        self._prefetcher._waited(asked)
        return batch

    def _fetch(self) -> Any:
        assert self._batches is not None
        try:
            return next(self._batches)
        except StopIteration:
            raise
        except Exception as error:
            if death := death_of_a_worker(self._batches, error):
                self._prefetcher._twin = None
                self.close()
                raise WorkerError(death) from error
            raise

    def close(self) -> None:
        """Drop the loader's iterator, and with it whatever it has running."""
        batches, self._batches = self._batches, None
        close = getattr(batches, "close", None)
        if callable(close):
            close()


@dataclass
class _Entry:
    """What came out of the loader: a batch and its copy, or an exception."""

    batch: Any = None
    copy: Copy | None = None
    error: BaseException | None = None


class _Ahead(_PassThrough):
    """One epoch on a device, ``depth`` batches ahead."""

    def __init__(self, prefetcher: Prefetcher, batches: Iterator[Any], copier: Copier) -> None:
        super().__init__(prefetcher, batches)
        self._copier = copier
        self._queue: deque[_Entry] = deque()
        self._exhausted = False

    def __next__(self) -> Any:
        if self._batches is None:
            raise StopIteration
        asked = time.perf_counter()
        self._top_up()
        if not self._queue:
            self.close()
            raise StopIteration
        entry = self._queue[0]
        if entry.error is not None:
            self._queue.popleft()
            raise entry.error
        if entry.copy is None:
            self._start(entry)  # what failed ahead of time may work now; if not, the batch stays first in line
        assert entry.copy is not None
        tensors = iter(entry.copy.tensors())
        self._queue.popleft()
        batch = map_tensors(
            lambda _: next(tensors), entry.batch, lambda leaf: move_object(leaf, self._prefetcher.device)
        )
        self._prefetcher._waited(asked)
        return batch

    def _top_up(self) -> None:
        """Start copies until ``depth`` batches are ahead of the one that is about to be handed out."""
        while len(self._queue) <= self._prefetcher.depth and not self._exhausted:
            if self._queue and (self._queue[-1].error is not None or self._queue[-1].copy is None):
                return  # nothing is fetched past an exception before the user has seen it
            try:
                if self._queue:
                    # A loader may fill the same memory again. Costs no time: the step lies in between.
                    self._queue[-1].copy.release_sources()  # type: ignore[union-attr]
            except Exception:
                return  # raised when the batch's turn comes
            try:
                entry = _Entry(self._fetch())
            except StopIteration:
                self._exhausted = True
                return
            except Exception as error:
                self._queue.append(_Entry(error=error))
                return
            self._queue.append(entry)
            try:
                self._start(entry)
            except torch.OutOfMemoryError:
                return  # raised when the batch's turn comes, if there is no room by then either

    def _start(self, entry: _Entry) -> None:
        entry.copy = self._copier.start(tensors_of(entry.batch))

    def close(self) -> None:
        """End the copying thread and drop what was fetched ahead."""
        self._queue.clear()
        self._copier.close()
        super().close()

    def __del__(self) -> None:
        if hasattr(self, "_copier"):
            self._copier.close()
