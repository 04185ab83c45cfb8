"""``InMemoryLoader``: batches of a dataset in memory, gathered ahead by native threads."""

from __future__ import annotations

import functools
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, Subset, TensorDataset, default_collate
from torch.utils.data._utils.collate import collate_tensor_fn, default_collate_fn_map
from torch.utils.data._utils.pin_memory import pin_memory

from flatout import _host
from flatout.data.batch import to_device
from flatout.data.forwarding import Forwarding
from flatout.data.gather import DeviceGather, Gather, HostGather, why_not_column
from flatout.data.loaders import seeds_workers_once, set_epoch
from flatout.data.order import Foreign, Order, Replayed, Span, as_indices, why_not_ordered
from flatout.data.progress import Progress


def _leaves_of(dataset: Any) -> tuple[list[Any], Tensor | None]:
    """The datasets that ``dataset`` is made of, and of which row in all of them, one behind the other, each sample is.

    Returns:
        What is no ``Subset`` or ``ConcatDataset`` (exact types); and int64 ``[len(dataset)]``, ``None``: the same.

    Raises:
        ValueError: indices of a ``Subset`` that are not integers within range.
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
    """Why :class:`InMemoryLoader` cannot stand in for ``loader``; ``None`` if it can.

    Looks at types only, exact ones: a subclass may do anything.
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
    """Why batches of ``loader`` are not just stacked samples; ``None`` if they are."""
    if type(loader) is not DataLoader:
        return f"the loader is a {type(loader).__name__}, not torch's DataLoader"
    if loader.batch_sampler is None:
        return "batch_size=None: samples are not batched"
    if loader.collate_fn is not default_collate or default_collate_fn_map.get(Tensor) is not collate_tensor_fn:
        return "a custom collate_fn"
    return None


class InMemoryLoader(Forwarding):
    """What ``loader`` yields, gathered from memory by native threads, ``depth`` batches ahead.

    Equals iterating ``loader`` with ``num_workers=0``: same batches, order, dtypes and containers, and the
    same state of every generator after every batch, early breaks included. Batches are fresh memory, valid
    for as long as they are held. A change that you make to the dataset's tensors in mid-epoch is seen
    ``depth`` batches late; ``Subset.indices`` are read once, here. Public attributes that are not listed here are those
    of ``loader``, to read and to set.

    Args:
        loader: a ``DataLoader`` over a ``TensorDataset``, or subsets (``random_split``) and concatenations of such,
            with default collate and any sampler. Its ``pin_memory`` is honoured when there is a GPU.
        depth: batches gathered ahead, >= 1. A sampler that is not torch's own is asked for a batch when you are, as
            nobody else knows what it draws; so is torch's where the next indices would move a generator of yours.
        threads: gathering threads besides the one that waits for a batch; default: one per four cores, at most four.
        device: copy the data there, once, and gather there: batches are on the device then. Changes of the dataset's
            tensors are not seen. Default: the data stays where it is.

    Raises:
        ValueError: ``loader`` is none of these; the message says why (see :func:`why_not_in_memory`). Or the data
            takes more than half of the memory that is free on ``device``.
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
        leaves, rows = _leaves_of(loader.dataset)

        # DataLoader's collate turns the tuple of a sample into a list.
        def columns() -> Iterable[tuple[Tensor, ...]]:
            return zip(*(leaf.tensors for leaf in leaves), strict=True)

        self._made_by: tuple[Any, ...] | None = None
        self._set_up(loader, columns, list, rows, depth, threads, device)

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
        made_by: tuple[Any, ...] | None = None,
    ) -> InMemoryLoader:
        """An ``InMemoryLoader`` in the order of ``loader`` whose batches are made of rows of ``columns``.

        Args:
            loader: gives the order, and is the source of ``dataset``, ``sampler`` and the like.
            columns: tensors ``[len(loader.dataset), ...]``.
            assemble: puts a batch's tensors, one per column, into the containers that the user expects.
            depth: batches gathered ahead, >= 1.
            threads: as in the constructor.
            device: as in the constructor.
            made_by: a function and its arguments that make this loader again in another process, given ``depth`` and
                ``threads``; default: it cannot be pickled.
        """
        made = cls.__new__(cls)
        made._made_by = made_by
        made._set_up(loader, lambda: ((column,) for column in columns), assemble, None, depth, threads, device)
        return made

    def clone(self) -> InMemoryLoader:
        """A loader of the same memory that no epoch has been taken of."""
        clone = type(self).__new__(type(self))
        vars(clone).update(vars(self), progress=Progress(self.loader), _live=weakref.WeakSet())
        return clone

    __copy__ = clone

    def __reduce__(self) -> tuple[Callable[..., InMemoryLoader], tuple[Any, ...]]:
        """Pickle what the loader was made from. The copy has the depth and the device, and begins with an epoch."""
        if self._made_by is not None:
            make, *arguments = self._made_by
            return functools.partial(make, depth=self.depth, threads=self.threads), tuple(arguments)
        make = functools.partial(type(self), depth=self.depth, threads=self.threads, device=self.device)
        return make, (self.loader,)

    def _set_up(
        self,
        loader: DataLoader,
        columns: Callable[[], Iterable[tuple[Tensor, ...]]],
        assemble: Callable[[list[Tensor]], Any],
        rows: Tensor | None,
        depth: int,
        threads: int | None,
        device: torch.device | str | int | None,
    ) -> None:
        if depth < 1:
            raise ValueError(f"depth must be >= 1, got {depth}")
        self.loader = loader
        self.progress = Progress(loader)
        self.depth = depth
        self.threads = min(4, max(1, (os.cpu_count() or 1) // 4)) if threads is None else threads
        self._columns = columns
        self._assemble = assemble
        self._rows = rows
        self.device = None if device is None else torch.device(device)
        self._on_device: list[Tensor] = []
        if self.device is not None:
            self._move(self.device)
        self._rings: dict[tuple[int, int], Any] = {}
        self._live: weakref.WeakSet[_InMemoryIterator] = weakref.WeakSet()

    def _move(self, device: torch.device) -> None:
        columns = list(self._columns())
        needed = sum(tensor.nbytes for column in columns for tensor in column)
        room = torch.cuda.mem_get_info(device)[0] // 2 if device.type == "cuda" else needed
        if needed > room:
            raise ValueError(f"the data takes {needed:,} bytes, half of what is free on {device} is {room:,}")
        self._on_device = [torch.cat([tensor.to(device) for tensor in column]).contiguous() for column in columns]

    def __iter__(self) -> Iterator[Any]:
        if self.device is not None:
            return self._kept(_InMemoryIterator(self, DeviceGather(self._on_device), pin=False))
        return self._iterate(-1, pin=bool(self.loader.pin_memory) and torch.cuda.is_available())

    def iterate_pinned(self, device: int) -> Iterator[Any]:
        """One epoch in pinned memory of our own, for :class:`NativeCopier` alone.

        torch does not know this memory: a ``tensor.cuda(non_blocking=True)`` would not keep a batch from being
        overwritten while it is copied.
        """
        return self._iterate(device, pin=False)

    def _iterate(self, device: int, *, pin: bool) -> Iterator[Any]:
        columns = list(self._columns())
        gather = HostGather(columns, self._ring(device, len(columns)), self.threads)
        return self._kept(_InMemoryIterator(self, gather, pin))

    def _kept(self, iterator: _InMemoryIterator) -> Iterator[Any]:
        self._live.add(iterator)
        return iterator

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
        """Pass ``epoch`` to whatever of the wrapped loader has a ``set_epoch``."""
        set_epoch(self.loader, epoch)

    def state_dict(self) -> dict[str, Any]:
        """What it takes to go on behind the batch that was handed out last: see :meth:`Prefetcher.state_dict`."""
        return self.progress.state_dict(self.progress.position)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Have the next epoch go on where ``state`` was saved, by this kind of loader or by a ``Prefetcher``.

        Raises:
            ValueError: it was saved by a loader of another kind; the message names the difference.
        """
        self.progress.load_state_dict(state)

    def close(self) -> None:
        """End the iterators under way and free the idle buffers; the loader can be iterated again."""
        for iterator in list(self._live):
            iterator.close()
        for ring in self._rings.values():
            ring.clear()

    def _ring(self, device: int, columns: int) -> Any:
        key = os.getpid(), device  # a forked child cannot use its parent's
        if key not in self._rings:
            # In use at a time: `depth` ahead, the one being taken, and two that a loop holds while it asks.
            self._rings[key] = _host.Ring(device=device, max_idle=(self.depth + 3) * columns)
        return self._rings[key]


@dataclass
class _Started:
    span: Span
    batches: Any
    taken: int = 0


class _InMemoryIterator:
    """One epoch of an :class:`InMemoryLoader`. Its threads end with it."""

    def __init__(self, loader: InMemoryLoader, gather: Gather, pin: bool) -> None:
        self._pin = pin
        self._loader = loader
        self._order = self._begin()
        self._gather = gather
        self._started: deque[_Started] = deque()
        self._left = 0  # batches that were started, or will be with those before them, and are not handed out
        self._ended = False

    def _begin(self) -> Order:
        """What ``iter`` of the plain loader is to the generators."""
        progress, loader = self._loader.progress, self._loader.loader
        order = progress.begin(len(loader.dataset))  # type: ignore[arg-type]
        # The seed of workers, which persistent ones are given once.
        if not progress.goes_on and not (progress.has_run and seeds_workers_once(loader)):
            torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
        progress.has_run = True
        if loader.num_workers > 0 and isinstance(order, Replayed):
            order.draw()  # workers are given their first indices
        return order

    def __iter__(self) -> _InMemoryIterator:
        return self

    def __next__(self) -> Any:
        if self._ended:
            raise StopIteration
        depth, progress = self._loader.depth, self._loader.progress
        while self._left <= depth:
            span = self._order.next_span(asked=self._left == 0)
            if span is None:
                break
            if isinstance(span, Foreign):  # asked for, so nothing else is started
                batch = self._fetch(span)
                progress.reached(self._order, span, 1)
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
        progress.reached(self._order, first.span, first.taken)
        return batch

    def _placed(self, batch: Any) -> Any:
        if self._loader.device is not None:
            return to_device(batch, self._loader.device)
        return pin_memory(batch) if self._pin else batch

    def _start(self, span: Span, ahead: int) -> Any:
        indices, rows, first = span.indices, self._loader._rows, span.first
        if rows is not None:
            samples = span.count * span.batches
            indices = rows[first : first + samples] if indices is None else rows.index_select(0, indices)
        return self._gather.start(indices, first, span.count, span.batches, ahead)

    def _fetch(self, batch: Foreign) -> Any:
        """As DataLoader does it: what the indices mean, and whether they are an error, is the dataset's to say."""
        loader = self._loader.loader
        dataset: Any = loader.dataset
        if hasattr(dataset, "__getitems__"):
            samples = dataset.__getitems__(batch.indices)
        else:
            samples = [dataset[index] for index in batch.indices]
        return self._placed(loader.collate_fn(samples))

    def close(self) -> None:
        """End the threads; what was gathered ahead is dropped."""
        self._ended = True
        self._gather.close()
