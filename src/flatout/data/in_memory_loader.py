"""``InMemoryLoader``: batches of a dataset in memory, gathered ahead of time by native threads."""

from __future__ import annotations

import functools
import itertools
import os
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, Subset, TensorDataset, default_collate
from torch.utils.data._utils.collate import collate_tensor_fn, default_collate_fn_map
from torch.utils.data._utils.pin_memory import pin_memory

from flatout.core.batches import to_device
from flatout.core.contents import Contents
from flatout.core.machine import copy_threads
from flatout.data.exit_gate import opened
from flatout.data.forwarding import Forwarding
from flatout.data.gather import DeviceGather, Gather, HostGather, why_not_column
from flatout.data.loader_class import is_plain, why_not_plain
from flatout.data.loaders import seeds_workers_once, set_epoch
from flatout.data.order import (
    BatchShare,
    IndexSpan,
    OpaqueBatch,
    Order,
    RecordedOrder,
    as_indices,
    index_lists,
    why_not_ordered,
)
from flatout.data.position import Progress
from flatout.native import _host


class Cached(Protocol):
    """Samples in memory that know when their dataset has changed."""

    on_change: Callable[[str], object] | None

    @property
    def given_up(self) -> str | None:
        """Reason why samples now come from the dataset; None while they are those in memory."""

    def check(self) -> bool:
        """Look for changes of the dataset at the start of an epoch. Return False if samples come from the dataset."""

    def check_nearby(self) -> bool:
        """Look for changes that take about 2 microseconds to see. Return False if samples come from the dataset."""


def _leaves_of(dataset: Any) -> tuple[list[Any], Tensor | None]:
    """Resolve nested ``Subset`` and ``ConcatDataset`` objects (exact types).

    Returns:
        The innermost datasets, and for each sample its row in their concatenation, int64 ``[len(dataset)]``. ``None``
        instead of rows means that each sample's row is its index.

    Raises:
        ValueError: the indices of a ``Subset`` are not integers within range.
    """
    leaves: list[Any] = []
    if type(dataset) is Subset:
        leaves, rows = _leaves_of(dataset.dataset)
        indices = as_indices(dataset.indices, len(dataset.dataset))  # type: ignore[arg-type]
        if indices is None:
            raise ValueError(f"they must be ints in [-n, n) for a dataset of n = {len(dataset.dataset)}")  # type: ignore[arg-type]
        return leaves, indices if rows is None else rows[indices]
    if type(dataset) is not ConcatDataset:
        return [dataset], None
    parts: list[Tensor] = []
    moved, first = False, 0
    for part in dataset.datasets:
        found, rows = _leaves_of(part)
        leaves += found
        parts.append((torch.arange(len(part)) if rows is None else rows) + first)  # type: ignore[arg-type]
        moved = moved or rows is not None
        first += sum(map(len, found))
    return leaves, torch.cat(parts) if moved else None


def why_not_in_memory(loader: Any) -> str | None:
    """Return why :class:`InMemoryLoader` cannot replace ``loader``; ``None`` if it can.

    Accepts datasets of exact types only, because a subclass may do anything.
    """
    reason = why_not_collated(loader)
    if reason is not None:
        return reason
    try:
        leaves, _ = _leaves_of(loader.dataset)
    except (TypeError, ValueError, RuntimeError) as error:
        return f"Subset.indices cannot be read: {error}"
    for leaf in leaves:
        if type(leaf) is not TensorDataset:
            return f"the dataset is a {type(leaf).__name__}, not a TensorDataset (or subsets, concatenations of such)"
        for tensor in leaf.tensors:
            reason = why_not_column(tensor)
            if reason is not None:
                return f"the dataset holds {reason}"
    if len({tuple((tensor.dtype, tensor.shape[1:]) for tensor in leaf.tensors) for leaf in leaves}) > 1:
        return "the datasets that are concatenated hold samples of different types"
    return why_not_ordered(loader)


def why_not_collated(loader: Any) -> str | None:
    """Return why batches of ``loader`` are not plain stacks of samples; ``None`` if they are."""
    if not is_plain(loader):
        return why_not_plain(loader)
    if loader.batch_sampler is None:
        return "batch_size=None: samples are not batched"
    if loader.collate_fn is not default_collate or default_collate_fn_map.get(Tensor) is not collate_tensor_fn:
        return "a custom collate_fn"
    return None


def _warn(seen: str) -> None:
    warnings.warn(f"batches are not gathered from memory any more: {seen}", stacklevel=6)


class InMemoryLoader(Forwarding):
    """Loader that gathers the batches of ``loader`` from memory with native threads, ``depth`` batches ahead.

    Batches, their order, dtypes and containers equal those of ``loader`` with ``num_workers=0``. Every generator has
    the same state after every batch, even after an early break. A batch stays valid for as long as the batch is held.
    The dataset's tensors and ``Subset.indices`` may change at any time, as with ``loader``. Writes that torch does not
    count, as through NumPy, appear ``depth`` batches later. If the dataset changes so that it is no longer such a
    dataset, the loader warns once, and batches come from the dataset. Reading or setting any other public attribute
    reaches ``loader``.

    Args:
        loader: a ``DataLoader`` over a ``TensorDataset``, or over subsets (``random_split``) and concatenations of
            such datasets, with default collate and any sampler. Its ``pin_memory`` applies when there is a GPU.
        depth: batches gathered ahead, >= 1. A user's own sampler is called only when a batch is requested, because its
            random draws are unknown. The same holds for torch's samplers where the next indices would advance a
            generator of the user's.
        threads: gathering threads besides the thread that waits for a batch. Default: one per two usable cores, at most
            four.
        device: copy the data to this device once and gather there, so that batches are on the device. The data is
            copied again after a change. Default: the data stays where it is.

    Raises:
        ValueError: ``loader`` is not such a loader. The message says why (see :func:`why_not_in_memory`). Or the data
            takes more than half of the free memory on ``device``. Or ``depth`` is less than 1.
    """

    _OWN = frozenset({"loader", "progress", "depth", "threads", "device"})

    def __init__(
        self,
        loader: DataLoader,
        *,
        depth: int = 2,
        threads: int | None = None,
        device: torch.device | str | int | None = None,
    ) -> None:
        reason = why_not_in_memory(loader)
        if reason is not None:
            raise ValueError(f"InMemoryLoader cannot serve this loader: {reason}")
        self._made_by: tuple[Any, ...] = (functools.partial(type(self), device=device), loader)
        # DataLoader's collate turns the tuple of a sample into a list.
        self._set_up(loader, list, depth, threads, device)
        self._resolve()

    @classmethod
    def over(
        cls,
        loader: DataLoader,
        columns: list[Tensor],
        assemble: Callable[[list[Tensor]], Any],
        *,
        depth: int = 2,
        threads: int | None = None,
        device: torch.device | str | int | None = None,
        made_by: tuple[Any, ...],
        cached: Cached,
    ) -> InMemoryLoader:
        """Make an ``InMemoryLoader`` that gathers rows of ``columns`` in the order of ``loader``.

        Args:
            loader: decides the order, and provides ``dataset``, ``sampler`` and other attributes.
            columns: tensors ``[len(loader.dataset), ...]``.
            assemble: puts a batch's tensors, one per column, into the containers that the user expects.
            depth: batches gathered ahead, >= 1.
            threads: as in the constructor.
            device: as in the constructor.
            made_by: a function and its arguments, for pickles. Called with these, ``depth`` and ``threads``, it makes
                the same loader in another process.
            cached: the columns' samples, which looks for changes of the dataset.
        """
        made = cls.__new__(cls)
        made._made_by = made_by
        made._set_up(loader, assemble, depth, threads, device)
        made._cached, made._columns = cached, [(column,) for column in columns]
        if made.device is not None:
            made._move(made.device)
        return made

    def clone(self) -> InMemoryLoader:
        """Return a loader over the same memory in which no epoch has begun."""
        clone = type(self).__new__(type(self))
        vars(clone).update(vars(self), progress=Progress(self.loader), _live=weakref.WeakSet())
        return clone

    __copy__ = clone

    def __reduce__(self) -> tuple[Callable[..., InMemoryLoader], tuple[Any, ...]]:
        """Pickle the arguments that the loader was made with. The copy begins with a new epoch."""
        make, *arguments = self._made_by
        return functools.partial(make, depth=self.depth, threads=self.threads), tuple(arguments)

    def _set_up(
        self,
        loader: DataLoader,
        assemble: Callable[[list[Tensor]], Any],
        depth: int,
        threads: int | None,
        device: torch.device | str | int | None,
    ) -> None:
        if depth < 1:
            raise ValueError(f"depth must be >= 1, got {depth}")
        self.loader = loader
        self.progress = Progress(loader)
        self.depth = depth
        self.threads = copy_threads() if threads is None else threads
        self._columns: list[tuple[Tensor, ...]] = []
        self._assemble = assemble
        self._rows: Tensor | None = None
        self._cached: Cached | None = None
        self._contents: Contents | None = None
        self._written: list[int] = []  # versions of the columns
        self._is_off = False
        self._on_change: Callable[[str], object] | None = None
        self.device = None if device is None else torch.device(device)
        self._on_device: list[Tensor] = []
        self._home: torch.cuda.Stream | None = None  # the stream that allocated the data
        self._rings: dict[tuple[int, int], Any] = {}
        self._live: weakref.WeakSet[_InMemoryIterator] = weakref.WeakSet()

    def _resolve(self) -> None:
        """Find the tensors of the dataset, and the row of each sample.

        Raises:
            ValueError: the dataset is none of tensors any more, or the device has no room.
        """
        if (reason := why_not_in_memory(self.loader)) is not None:
            raise ValueError(reason)
        leaves, self._rows = _leaves_of(self.loader.dataset)
        self._columns = list(zip(*(leaf.tensors for leaf in leaves), strict=True))
        tensors = [tensor for column in self._columns for tensor in column]
        if self.device is not None:
            self._move(self.device)
        # Tensors on the host are gathered as they are. Of these, only the batches gathered ahead can be old.
        self._contents = Contents(self.loader.dataset, without=tensors if self.device is None else ())
        self._written = [tensor._version for tensor in tensors if not tensor.is_inference()]

    def report_change(self, on_change: Callable[[str], object]) -> None:
        """Call ``on_change`` with the change, as a clause, when a change of the dataset ends the gathering.

        The default is a warning.
        """
        self._on_change = on_change
        if self._cached is not None:
            self._cached.on_change = on_change

    @property
    def is_off(self) -> bool:
        """True if the dataset has changed so that its batches can only be read from it, as ``loader`` does."""
        if self._cached is not None and not self._is_off:
            self._is_off = self._cached.given_up is not None
        return self._is_off

    def _is_as_before(self, *, at_epoch: bool) -> bool:
        """Look for changes of the dataset. Return False if batches that were gathered ahead may be old.

        Args:
            at_epoch: compare everything that the dataset can reach, and not only what takes 2 microseconds.
        """
        if self._cached is not None:
            self._is_off = not (self._cached.check() if at_epoch else self._cached.check_nearby())
            return not self._is_off
        assert self._contents is not None
        written = [t._version for column in self._columns for t in column if not t.is_inference()]
        if seen := self._contents.changed() if at_epoch else self._contents.changed_nearby():
            try:
                self._resolve()
            except ValueError as error:
                self._is_off = True
                report = self._on_change or _warn
                report(f"{seen}, and {error}")
            return False
        if written != self._written:
            self._written = written
            return False
        return True

    def _move(self, device: torch.device) -> None:
        columns = self._columns
        needed = sum(tensor.nbytes for column in columns for tensor in column)
        room = torch.cuda.mem_get_info(device)[0] // 2 if device.type == "cuda" else needed
        if needed > room:
            raise ValueError(f"the data takes {needed:,} bytes, half of what is free on {device} is {room:,}")
        self._home = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._on_device = [torch.cat([tensor.to(device) for tensor in column]).contiguous() for column in columns]

    def __iter__(self) -> Iterator[Any]:
        return opened(self._epoch)

    def _epoch(self) -> Iterator[Any]:
        return self._iterate(-1, pin=self.device is None and bool(self.loader.pin_memory) and torch.cuda.is_available())

    def iterate_pinned(self, device: int) -> Iterator[Any]:
        """Return an iterator over one epoch in flatout's pinned memory. Only :class:`NativeCopier` may read it.

        torch does not track this memory. During ``tensor.cuda(non_blocking=True)``, the next batch could overwrite the
        batch that is being copied.
        """
        return self._iterate(device, pin=False)

    def _iterate(self, device: int, *, pin: bool) -> Iterator[Any]:
        if not self.is_off:
            self._is_as_before(at_epoch=True)
        iterator = _InMemoryIterator(self, functools.partial(self._gather, device), pin)
        self._live.add(iterator)
        return iterator

    def _gather(self, device: int) -> Gather:
        if self.device is not None:
            return DeviceGather(self._on_device, self._home)
        return HostGather(self._columns, self._ring(device, len(self._columns)), self.threads)

    def __len__(self) -> int:
        return len(self.loader)

    @property
    def _wrapped(self) -> Any:
        return self.loader

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("collate_fn", "worker_init_fn"):
            raise ValueError(f"{name} attribute should not be set after {type(self).__name__} is initialized")
        super().__setattr__(name, value)

    def set_epoch(self, epoch: int) -> None:
        """Pass ``epoch`` to each part of the wrapped loader that has a ``set_epoch`` method."""
        set_epoch(self.loader, epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the state to resume from after the last batch that was yielded. See :meth:`Prefetcher.state_dict`."""
        return self.progress.state_dict(self.progress.position)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume in the next epoch where ``state`` was saved, by this kind of loader or by a ``Prefetcher``.

        Raises:
            ValueError: ``state`` was saved by a loader of another kind. The message names the difference.
        """
        self.progress.load_state_dict(state)

    def close(self) -> None:
        """End running iterators and free idle buffers. The loader can be iterated again."""
        for iterator in list(self._live):
            iterator.close()
        for ring in self._rings.values():
            ring.clear()

    def _ring(self, device: int, columns: int) -> Any:
        key = os.getpid(), device  # a forked child cannot use its parent's ring
        if key not in self._rings:
            # Batches in use at a time: `depth` ahead, the one being taken, and two that the user's loop holds.
            self._rings[key] = _host.Ring(device=device, max_idle=(self.depth + 3) * columns)
        return self._rings[key]


@dataclass
class _Started:
    span: IndexSpan
    batches: Any
    taken: int = 0


class _InMemoryIterator:
    """Iterator over one epoch of an :class:`InMemoryLoader`. The gathering threads end with the epoch."""

    def __init__(self, loader: InMemoryLoader, make_gather: Callable[[], Gather], pin: bool) -> None:
        self._pin = pin
        self._loader = loader
        self._order = self._begin()
        self._make_gather = make_gather
        self._gather = make_gather()
        self._lists: Iterator[tuple[IndexSpan | OpaqueBatch, int, Any]] | None = None
        """Indices of the batches that are read from the dataset. None while batches are gathered."""
        self._started: deque[_Started] = deque()
        self._left = 0  # batches of the started spans that are not yet yielded
        self.share: BatchShare | None = None
        self._ended = False

    def _begin(self) -> Order:
        """Begin an epoch and advance the random generators as ``iter`` of the plain loader does."""
        progress, loader = self._loader.progress, self._loader.loader
        with progress.opening():
            order = progress.begin(len(loader.dataset))  # type: ignore[arg-type]
            # `iter(DataLoader)` draws a seed for its workers. Persistent workers get their seed only once.
            if not progress.goes_on and not (progress.has_run and seeds_workers_once(loader)):
                torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
        progress.has_run = True
        if loader.num_workers > 0 and isinstance(order, RecordedOrder):
            order.draw()  # `iter` of a DataLoader with workers draws the first indices at once
        return order

    def __iter__(self) -> _InMemoryIterator:
        return self

    def __next__(self) -> Any:
        if self._ended:
            raise StopIteration
        if not self._loader._is_off and not self._loader._is_as_before(at_epoch=False):
            self._gather_again()
        if self._loader._is_off:
            return self._read()
        depth, progress = self._loader.depth, self._loader.progress
        while self._left <= depth:
            span = self._order.next_span(asked=self._left == 0)
            if span is None:
                break
            if isinstance(span, OpaqueBatch):  # only returned when `_left` is 0, so no other batch is running
                batch = self._fetch(span.indices)
                self._reached(span, 1)
                return batch
            self._started.append(_Started(span, self._start(span, depth + 1 - self._left)))
            self._left += span.batches
        if self._left == 0:
            progress.ended(self._order)
            self.close()
            raise StopIteration
        first = self._started[0]
        first.taken += 1
        self._left -= 1
        if first.taken == first.span.batches:
            self._started.popleft()
        batch = self._placed(self._loader._assemble(self._gather.take(first.batches, depth)))
        self._reached(first.span, first.taken)
        return batch

    def _reached(self, span: IndexSpan | OpaqueBatch, number: int) -> None:
        self.share = span.share
        self._loader.progress.reached(self._order, span, number)

    def _placed(self, batch: Any) -> Any:
        if self._loader.device is not None:
            return to_device(batch, self._loader.device)
        return pin_memory(batch) if self._pin else batch

    def _start(self, span: IndexSpan, ahead: int) -> Any:
        indices, rows, first = span.indices, self._loader._rows, span.first
        if rows is not None:
            samples = span.count * span.batches
            indices = rows[first : first + samples] if indices is None else rows.index_select(0, indices)
        return self._gather.start(indices, first, span.count, span.batches, ahead)

    def _gather_again(self) -> None:
        """Gather the batches again that were gathered ahead of a change."""
        self._gather.close()
        if self._loader.is_off:
            return
        self._gather = self._make_gather()
        left, self._left = list(self._started), 0
        self._started.clear()
        for started in left:
            span, taken = started.span, started.taken
            rest = replace(
                span,
                indices=None if span.indices is None else span.indices[taken * span.count :],
                first=span.first + taken * span.count,
                batches=span.batches - taken,
            )
            self._started.append(_Started(rest, self._start(rest, self._loader.depth + 1 - self._left)))
            self._left += rest.batches

    def _read(self) -> Any:
        """Return the next batch in the same order, read from the dataset as ``DataLoader`` does."""
        if self._lists is None:
            self._lists = itertools.chain.from_iterable(
                itertools.islice(index_lists(started.span), started.taken, None) for started in self._started
            )
            self._left = 0
        found = next(self._lists, None)
        if found is None:
            span = self._order.next_span(asked=True)
            if span is None:
                self._loader.progress.ended(self._order)
                self.close()
                raise StopIteration
            self._lists = index_lists(span)
            found = next(self._lists)
        span, number, indices = found
        batch = self._fetch(indices)
        self._reached(span, number)
        return batch

    def _fetch(self, indices: Any) -> Any:
        """Fetch a batch as ``DataLoader`` does. The dataset interprets the indices, and may refuse them."""
        loader = self._loader.loader
        dataset: Any = loader.dataset
        samples = dataset.__getitems__(indices) if hasattr(dataset, "__getitems__") else [dataset[i] for i in indices]
        return self._placed(loader.collate_fn(samples))

    def close(self) -> None:
        """End the threads and drop the batches that were gathered ahead."""
        self._ended = True
        self._gather.close()
