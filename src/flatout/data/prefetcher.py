"""``Prefetcher``: the batches of any loader, copied to the device ahead of time."""

from __future__ import annotations

import contextlib
import copy
import functools
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from flatout.core.batches import cloned, map_tensors, move_object
from flatout.data.exit_gate import opened
from flatout.data.feedback import why_not_ahead
from flatout.data.forwarding import Forwarding
from flatout.data.loaders import check_reiterable, set_epoch
from flatout.data.order import BatchShare
from flatout.data.remote import NotReady, WorkerError
from flatout.data.source import Epoch, source_of
from flatout.data.transfer import Copier, Copy, make_copier, make_ring


class Prefetcher(Forwarding):
    """Loader that yields the batches of ``loader`` in the same order on ``device``, prefetched ``depth`` batches ahead.

    On a CUDA device a native thread copies host batches into reused pinned memory. From there they are copied to the
    device on a separate stream, while the current step computes. ``iter`` and ``next`` of ``loader`` are called in
    order, up to ``depth`` batches early, on the thread that iterates the prefetcher. So with ``num_workers=0`` the
    dataset's code runs on the same thread as without a prefetcher. A batch that worker processes of a ``DataLoader``
    have not loaded yet does not delay the batches that are ready. A sampler that may read results of the training is
    not called early (:func:`flatout.data.feedback.why_not_ahead`). On a CPU device batches are passed on unchanged,
    because :class:`InMemoryLoader` and worker processes already work ahead.

    An exception of ``loader`` is raised as the same object, after the batches that precede it. From a worker process of
    a ``DataLoader`` it has its arguments, its cause and the worker's traceback as text. The batch of a worker that has
    died raises a :class:`WorkerError`.

    ``loader`` may reuse the memory, the containers and the objects of a batch for the next batch. A batch on a CUDA
    device stays valid for as long as the user holds it. It may be used on the stream that is current when it is taken.
    Use on another stream needs ``record_stream``, as for any tensor.

    Args:
        loader: any iterable of batches (see :func:`map_tensors` for what a batch may be).
        device: the device of the batches.
        depth: batches copied ahead, >= 1.
        transform: called with each batch on the device. Its result is yielded. On a CUDA device the stream of the
            copies is current during the call, so that work overlaps the running step. An exception is raised when
            the batch is due, and the epoch can continue after the batch.
        copying: called on a CUDA device before the current stream waits for the copy of a batch.

    Attributes:
        loader: the wrapped loader.
        stall_seconds: seconds that ``next`` has waited for data, in all epochs together.
        batches: number of batches yielded, in all epochs together.
        share: share of this rank in the batch that was yielded last; None if the loader is not sliced.

    Reading or setting any other public attribute reaches ``loader``.
    """

    _OWN = frozenset({"loader", "device", "depth", "transform", "stall_seconds", "batches", "share"})

    def __init__(
        self,
        loader: Iterable[Any],
        device: torch.device | str | int,
        depth: int = 2,
        *,
        transform: Callable[[Any], Any] | None = None,
        copying: Callable[[], object] | None = None,
    ) -> None:
        if depth < 1:
            raise ValueError(f"depth must be >= 1, got {depth}")
        check_reiterable(loader)
        self.loader = loader
        self.device = torch.device(device)
        self.depth = depth
        self.transform = transform
        self.share: BatchShare | None = None
        self._copying = copying
        self.reset_stall()
        self._source = source_of(loader)
        self._ring: Any = None
        self._live: weakref.WeakSet[_PassThrough] = weakref.WeakSet()

    def __iter__(self) -> Iterator[Any]:
        return opened(self._epoch)

    def _epoch(self) -> Iterator[Any]:
        iterator: _PassThrough
        if self.device.type == "cpu":
            iterator = _PassThrough(self, self._source.open())
        else:
            if self._ring is None:
                self._ring = make_ring(self.device)
            fresh, transforms = self._source.is_fresh, self.transform is not None
            copier = make_copier(self.device, self.depth, self._ring, fresh=fresh, transforms=transforms)
            epoch = self._source.open(None if self._ring is None else self._ring.device)
            iterator = _Ahead(self, epoch, copier, depth=0 if why_not_ahead(self.loader) else self.depth)
        self._live.add(iterator)
        return iterator

    def __reduce__(self) -> tuple[Callable[..., Prefetcher], tuple[Any, ...]]:
        """Pickle the arguments of the constructor. The copy begins with a new epoch."""
        make = functools.partial(type(self), transform=self.transform, copying=self._copying)
        return make, (self.loader, self.device, self.depth)

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    @property
    def _wrapped(self) -> Any:
        return self.loader

    def set_epoch(self, epoch: int) -> None:
        """Pass ``epoch`` to the loader, or else to each part of the loader that has a ``set_epoch`` method."""
        set_epoch(self.loader, epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the state to resume from after the last batch that was yielded, in this process or another.

        Works for:

        - a ``DataLoader`` over a map-style dataset with any sampler, an :class:`InMemoryLoader`, and lists of batches;
        - a ``DataLoader`` (``num_workers=0``) over an ``IterableDataset`` that has ``state_dict`` and
          ``load_state_dict``;
        - any loader that has these two methods.

        With ``num_workers=0`` the state of a map-style dataset that has both methods is saved, too. Worker processes
        have copies of the dataset, whose states are not saved. torchdata's ``StatefulDataLoader`` saves them.

        The rest of the epoch has exactly the same samples, with any number of workers. Generators of the loader and
        its samplers get the same states. Exception: a sampler of the user may draw in mid-epoch from a generator that
        other code uses, too. Then the samples are the same, but this generator may have another state. The user saves
        the global generators (torch's, NumPy's, Python's) and, between epochs, the state of a custom sampler or
        dataset. Random augmentation in worker processes continues with other random numbers. A sampler's
        ``state_dict`` is called for every batch.

        Raises:
            TypeError: the loader is none of these. The message says what is missing.
        """
        return self._source.state_now()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume in the next epoch where ``state`` was saved. Running iterators do not change.

        A sampler with ``state_dict`` and ``load_state_dict`` restores its position. Any other sampler draws the indices
        of the epoch again, from the saved states of the generators, and the batches that were read are dropped. Samples
        that were read are never loaded again.

        Raises:
            TypeError: see :meth:`state_dict`.
            ValueError: the state was saved by a loader of another kind. The message names the difference. Or, when the
                epoch begins: a sampler without ``state_dict`` does not draw the same batches again.
        """
        self._source.load_state_dict(state)

    @property
    def stall_fraction(self) -> float:
        """Share of the time from the first request to the last batch that ``next`` has waited for data; 0 before."""
        if self._first_asked is None or self._last_given <= self._first_asked:
            return 0.0
        return self.stall_seconds / (self._last_given - self._first_asked)

    def reset_stall(self) -> None:
        """Reset the counters to 0."""
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
        """End running iterators and free the pinned memory. The prefetcher can be iterated again."""
        for iterator in list(self._live):
            iterator.close()
        if self._ring is not None:
            self._ring.clear()


class _PassThrough:
    """One epoch on the host, which yields the loader's own batches and measures the time of each."""

    def __init__(self, prefetcher: Prefetcher, epoch: Epoch) -> None:
        self._prefetcher = prefetcher
        self._epoch: Epoch | None = epoch

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        epoch = self._epoch
        if epoch is None:
            raise StopIteration
        asked = time.perf_counter()
        try:
            batch = next(epoch)
        except (StopIteration, WorkerError):
            self.close()
            raise
        if self._prefetcher.transform is not None:
            batch = self._prefetcher.transform(batch)
        self._prefetcher.share = epoch.share
        self._prefetcher._waited(asked)
        return batch

    def close(self) -> None:
        """Drop the loader's iterator, and its worker processes."""
        epoch, self._epoch = self._epoch, None
        if epoch is not None:
            epoch.close()


@dataclass
class _Entry:
    """Batch of the loader with its share and copy, or an exception, and the loader's position after this batch."""

    place: Any
    batch: Any = None
    share: BatchShare | None = None
    copy: Copy | None = None
    is_transformed: bool = False
    error: Exception | None = None


class _Ahead(_PassThrough):
    """One epoch on a device, ``depth`` batches ahead."""

    def __init__(self, prefetcher: Prefetcher, epoch: Epoch, copier: Copier, depth: int) -> None:
        super().__init__(prefetcher, epoch)
        self._depth = depth
        self._copier = copier
        self._queue: deque[_Entry] = deque()
        self._exhausted = False
        self._place = epoch.place

    def __next__(self) -> Any:
        epoch, queue = self._epoch, self._queue  # another thread may close meanwhile
        if epoch is None:
            raise StopIteration
        asked = time.perf_counter()
        self._top_up(epoch, queue)
        if not queue:
            self._prefetcher._source.move(epoch, epoch.place)
            self.close()
            raise StopIteration
        source, entry = self._prefetcher._source, queue[0]
        source.move(epoch, self._place)  # not that of the batches that were fetched ahead
        if entry.error is None:
            # A copy that failed ahead of time may succeed now. Otherwise the batch stays first in the queue.
            self._start(entry)
            self._transform(entry)
        batch = None if entry.error else self._taken(entry)
        queue.popleft()
        self._place = entry.place
        source.move(epoch, self._place)
        if entry.error is not None:
            if isinstance(entry.error, WorkerError):
                self.close()
            raise entry.error
        self._prefetcher.share = entry.share
        self._prefetcher._waited(asked)
        return batch

    def _top_up(self, epoch: Epoch, queue: deque[_Entry]) -> None:
        """Start copies until ``depth`` batches are ahead of the batch that is about to be yielded."""
        while len(queue) <= self._depth and not self._exhausted:
            if queue and (queue[-1].error is not None or queue[-1].copy is None):
                return  # no batch after an exception is fetched before the user has seen the exception
            try:
                if queue:
                    # A loader may reuse the memory of a batch. The wait is short, because a step ran meanwhile.
                    queue[-1].copy.release_sources()  # type: ignore[union-attr]
            except Exception:
                return  # raised when the batch is due
            if queue:
                self._transform(queue[-1])
                if queue[-1].error is not None:
                    return
            try:
                batch = epoch.next(waits=not queue)
            except NotReady:
                return  # a batch that is ready does not wait for a later one
            except StopIteration:
                self._exhausted = True
                return
            except Exception as error:
                queue.append(_Entry(epoch.place, error=error))
                return
            entry = _Entry(epoch.place, batch, epoch.share)
            queue.append(entry)
            try:
                self._start(entry)
            except Exception:
                return  # tried again when the batch is due, and raised if it fails again

    def _start(self, entry: _Entry) -> None:
        if entry.copy is None:
            # A copy of containers and objects, because the loader may reuse them for the next batch.
            entry.batch = map_tensors(self._kept, entry.batch, self._moved)
            entry.copy = self._copier.start(entry.batch)

    def _kept(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a clone of a device tensor that the loader may overwrite: the copier passes it on without a copy."""
        is_refilled = tensor.device.type != "cpu" and not self._prefetcher._source.is_fresh
        return tensor.clone() if is_refilled else tensor

    def _moved(self, leaf: Any) -> Any:
        if not callable(getattr(leaf, "to", None)):
            return cloned(leaf)
        with contextlib.suppress(Exception):  # not every object can be copied
            leaf = copy.copy(leaf)  # the `to` method of some objects moves in place
        return move_object(leaf, self._prefetcher.device)

    def _transform(self, entry: _Entry) -> None:
        """Run the user's transform after the copy, on the stream of the copies."""
        transform = self._prefetcher.transform
        if transform is None or entry.is_transformed or entry.copy is None:
            return
        try:
            entry.copy.apply(transform)
            entry.is_transformed = True
        except Exception as error:
            entry.error = error

    def _taken(self, entry: _Entry) -> Any:
        assert entry.copy is not None
        if self._prefetcher._copying is not None:
            self._prefetcher._copying()
        return entry.copy.take()

    def close(self) -> None:
        """End the copying thread and drop the batches that were fetched ahead."""
        self._queue = deque()
        self._copier.close()
        super().close()

    def __del__(self) -> None:
        if hasattr(self, "_copier"):
            self._copier.close()
