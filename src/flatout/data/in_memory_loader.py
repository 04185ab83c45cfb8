"""``InMemoryLoader``: batches of a dataset in memory, gathered ahead of time by native threads or by the device."""

from __future__ import annotations

import functools
import itertools
import os
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, Subset, TensorDataset, default_collate
from torch.utils.data._utils.collate import collate_tensor_fn, default_collate_fn_map
from torch.utils.data._utils.pin_memory import pin_memory

from flatout.core.batches import to_device
from flatout.core.contents import Contents
from flatout.core.machine import copy_threads
from flatout.core.torch_state import share_with
from flatout.data.exit_gate import opened
from flatout.data.forwarding import Forwarding
from flatout.data.loader_class import is_plain, why_not_plain
from flatout.data.loaders import set_epoch
from flatout.data.order import Order, Run, as_indices, why_not_ordered
from flatout.data.source import Epoch, IndexedSource, draw_seed
from flatout.native import _host

# DLPack type codes: 0 int, 1 uint, 2 float, 4 bfloat, 5 complex, 6 bool.
_DLPACK: dict[torch.dtype, tuple[int, int]] = {
    torch.bool: (6, 8),
    torch.int8: (0, 8),
    torch.int16: (0, 16),
    torch.int32: (0, 32),
    torch.int64: (0, 64),
    torch.uint8: (1, 8),
    torch.uint16: (1, 16),
    torch.uint32: (1, 32),
    torch.uint64: (1, 64),
    torch.float16: (2, 16),
    torch.float32: (2, 32),
    torch.float64: (2, 64),
    torch.bfloat16: (4, 16),
    torch.complex32: (5, 32),
    torch.complex64: (5, 64),
    torch.complex128: (5, 128),
}


def why_not_column(tensor: Tensor) -> str | None:
    """Return why batches cannot be gathered from rows of ``tensor``; ``None`` if they can."""
    if type(tensor) is not Tensor:
        return f"{type(tensor).__name__}, not a plain tensor"
    if tensor.device.type != "cpu":
        return f"a tensor on {tensor.device}"
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        return f"a tensor of layout {tensor.layout}"
    if tensor.dtype not in _DLPACK:
        return f"a tensor of {tensor.dtype}"
    if tensor.requires_grad or tensor.is_conj() or tensor.is_neg():
        return "a tensor that requires grad or is a lazy view"
    if tensor.dim() == 0:
        return "a 0-dim tensor"
    if tensor.size(0) > 0 and not tensor[0].is_contiguous():
        return "a tensor whose rows are not contiguous (call .contiguous() on it)"
    return None


class Gather(Protocol):
    """Makes the batches of one epoch."""

    def start(self, indices: Tensor | None, first: int, count: int, batches: int, ahead: int) -> Any:
        """Begin a series of batches of consecutive indices, and gather the first ones.

        Args:
            indices: rows of all batches, int64 ``[batches * count]``, contiguous. ``None``: ``first, first + 1, ...``.
            first: first row, if ``indices`` is ``None``.
            count: rows of each batch.
            batches: number of batches.
            ahead: number of batches to gather now.

        Returns:
            A handle of the series for :meth:`take`.
        """

    def take(self, started: Any, ahead: int) -> list[Tensor]:
        """Return the next batch, and gather ``ahead`` batches after it.

        Args:
            started: the result of :meth:`start`.
            ahead: number of batches to gather ahead.

        Returns:
            A tensor ``[count, ...]`` for each column, in memory that no other batch uses.
        """

    def close(self) -> None:
        """End the threads, and drop all batches that were started."""


class HostGather:
    """Gathers on native threads, and on the thread that waits, into reused memory of the host.

    Args:
        columns: the tensors whose concatenation is the column, for each column.
        ring: provides the memory.
        threads: number of gathering threads.
    """

    def __init__(self, columns: Sequence[tuple[Tensor, ...]], ring: Any, threads: int) -> None:
        self._columns = _host.Columns(list(map(_spec, columns)), columns)
        self._ring = ring
        self._threads = threads
        self._stager: Any = None

    def start(self, indices: Tensor | None, first: int, count: int, batches: int, ahead: int) -> Any:
        if self._stager is None:
            self._stager = _host.Stager(self._ring, threads=self._threads)
        address = 0 if indices is None else indices.data_ptr()
        started = self._stager.gather(self._columns, address, first, count, batches, indices)
        started.start(ahead)
        return started

    def take(self, started: Any, ahead: int) -> list[Tensor]:
        return [torch.from_dlpack(capsule) for capsule in started.take(ahead)]

    def close(self) -> None:
        if self._stager is not None:
            self._stager.close()

    def __del__(self) -> None:
        if getattr(self, "_stager", None) is not None:
            self._stager.close()


class DeviceGather:
    """Gathers on the device that holds the columns, on the current stream.

    Args:
        columns: tensors ``[N, ...]``, contiguous.
        home: the stream on which the columns were allocated; None without CUDA.
    """

    def __init__(self, columns: Sequence[Tensor], home: torch.cuda.Stream | None) -> None:
        self._columns = columns
        self._home = home
        self._words = [_words(column) for column in columns]

    def start(self, indices: Tensor | None, first: int, count: int, batches: int, ahead: int) -> Any:
        current = None
        if self._home is not None:
            current = torch.cuda.current_stream(self._home.device)
            if current != self._home:
                current.wait_stream(self._home)
        if indices is None:
            stop = first + count * batches
            return ((slice(begin, begin + count), current) for begin in range(first, stop, count))
        if current is not None:
            indices = indices.pin_memory()  # a copy from pageable memory waits for the stream
        rows = indices.to(self._words[0].device, non_blocking=True).split(count)
        return zip(rows, itertools.repeat(current))

    def take(self, started: Any, ahead: int) -> list[Tensor]:
        rows, begun_on = next(started)
        if self._home is not None:
            current = torch.cuda.current_stream(self._home.device)
            if current != begun_on:
                current.wait_stream(begun_on)
                share_with(current, rows)
            if current != self._home:
                share_with(current, self._words)
        if isinstance(rows, slice):
            gathered = [words[rows].clone() for words in self._words]
        else:
            gathered = [words.index_select(0, rows) for words in self._words]
        return [_rows_like(column, words) for column, words in zip(self._columns, gathered, strict=True)]

    def close(self) -> None:
        pass


def _words(column: Tensor) -> Tensor:
    """Return a view ``[N, k]`` as the widest integers that divide a row, because fewer elements are faster to copy."""
    rows = column.reshape(column.size(0), column.shape[1:].numel())
    row_bytes = rows.size(1) * rows.element_size()
    for word in (torch.int64, torch.int32, torch.int16):
        if row_bytes and row_bytes % word.itemsize == 0:
            return rows.view(word)
    return rows.view(torch.uint8)


def _rows_like(column: Tensor, words: Tensor) -> Tensor:
    rows = words.view(column.dtype) if words.numel() else words.new_empty(0, dtype=column.dtype)
    return rows.view(words.size(0), *column.shape[1:])


def _spec(parts: tuple[Tensor, ...]) -> tuple[list[tuple[int, int, int]], int, int, int, list[int]]:
    item = parts[0].element_size()
    code, bits = _DLPACK[parts[0].dtype]
    row_shape = list(parts[0].shape[1:])
    row_bytes = item * int(torch.Size(row_shape).numel())
    return [(p.data_ptr(), p.size(0), item * p.stride(0)) for p in parts], row_bytes, code, bits, row_shape


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


class InMemoryLoader(Forwarding, IndexedSource):
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

    _OWN = frozenset({"loader", "depth", "threads", "device"})
    is_fresh = True

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
        vars(clone).update(vars(self), _live=weakref.WeakSet())
        for name in ("_place", "_begun", "_newest", "_loaded"):
            vars(clone).pop(name, None)
        IndexedSource.__init__(clone, self.loader)
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
        IndexedSource.__init__(self, loader)
        self.loader = loader
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
        self._live: weakref.WeakSet[_InMemoryEpoch] = weakref.WeakSet()

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
        return self.open()

    def open(self, pinned_for: int | None = None) -> Epoch:
        """Return an iterator over one epoch.

        Args:
            pinned_for: index of a CUDA device. The batches are then in flatout's pinned memory, which only a
                :class:`NativeCopier` may read. torch does not track this memory. During
                ``tensor.cuda(non_blocking=True)``, the next batch could overwrite the batch that is being copied.
        """
        on_host = self.device is None
        pin = on_host and pinned_for is None and bool(self.loader.pin_memory) and torch.cuda.is_available()
        device = pinned_for if on_host and pinned_for is not None else -1
        if not self.is_off:
            self._is_as_before(at_epoch=True)
        iterator = _InMemoryEpoch(self, functools.partial(self._gather, device), pin)
        self._live.add(iterator)
        return self._begin(iterator)

    def _place_in(self, epoch: Epoch) -> Any:
        return None if epoch.has_ended else epoch.at

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
        return self.state_now()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume in the next epoch where ``state`` was saved, by this kind of loader or by a ``Prefetcher``.

        Raises:
            ValueError: ``state`` was saved by a loader of another kind. The message names the difference.
        """
        super().load_state_dict(state)

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
    run: Run
    batches: Any
    taken: int = 0


class _InMemoryEpoch(Epoch):
    """One epoch of an :class:`InMemoryLoader`. The gathering threads end with the epoch."""

    def __init__(self, loader: InMemoryLoader, make_gather: Callable[[], Gather], pin: bool) -> None:
        super().__init__(loader)
        self._pin = pin
        self._memory = loader
        self._order = self._begin_order()
        self.at = (self._order, self._order.begun, 0)
        self._make_gather = make_gather
        self._gather = make_gather()
        self._lists: Iterator[tuple[Run, int, Any]] | None = None
        """Indices of the batches that are read from the dataset. None while batches are gathered."""
        self._started: deque[_Started] = deque()
        self._left = 0  # batches of the started runs that are not yet yielded

    def _begin_order(self) -> Order:
        """Begin an epoch and advance the random generators as ``iter`` of the plain loader does."""
        memory, loader = self._memory, self._memory.loader
        draws_seed = memory._loaded is None and not memory._draws_no_seed
        with memory._opening():
            order = memory._order(len(loader.dataset))  # type: ignore[arg-type]
            if draws_seed:
                draw_seed(loader.generator)
        if loader.num_workers > 0 and order.is_torchs:
            order.draw()  # `iter` of a DataLoader with workers draws the first indices at once
        return order

    def next(self, *, waits: bool = True) -> Any:
        """Return the next batch."""
        if self.has_ended:
            raise StopIteration
        if not self._memory._is_off and not self._memory._is_as_before(at_epoch=False):
            self._gather_again()
        if self._memory._is_off:
            return self._read()
        depth = self._memory.depth
        while self._left <= depth:
            run = self._order.next(asked=self._left == 0)
            if run is None:
                break
            if run.count is None:  # only returned when `_left` is 0, so no other batch is running
                return self._reached(self._fetch(run.indices), run, 1)
            self._started.append(_Started(run, self._start(run, depth + 1 - self._left)))
            self._left += run.batches
        if self._left == 0:
            self._end()
        first = self._started[0]
        first.taken += 1
        self._left -= 1
        if first.taken == first.run.batches:
            self._started.popleft()
        batch = self._placed(self._memory._assemble(self._gather.take(first.batches, depth)))
        return self._reached(batch, first.run, first.taken)

    def _reached(self, batch: Any, run: Run, number: int) -> Any:
        self.share, self.at = run.share, (self._order, run, number)
        self._moved()
        return batch

    def _end(self) -> NoReturn:
        self.has_ended = True
        self._moved()
        self.close()
        raise StopIteration

    def _placed(self, batch: Any) -> Any:
        if self._memory.device is not None:
            return to_device(batch, self._memory.device)
        return pin_memory(batch) if self._pin else batch

    def _start(self, run: Run, ahead: int) -> Any:
        assert run.count is not None
        indices, first, rows = run.indices, 0, self._memory._rows
        if isinstance(indices, range):
            indices, first = None, run.indices.start
        if rows is not None:
            indices = (
                rows[first : first + run.count * run.batches] if indices is None else rows.index_select(0, indices)
            )
        return self._gather.start(indices, first, run.count, run.batches, ahead)

    def _gather_again(self) -> None:
        """Gather the batches again that were gathered ahead of a change."""
        self._gather.close()
        if self._memory.is_off:
            return
        self._gather = self._make_gather()
        left, self._left = list(self._started), 0
        self._started.clear()
        for started in left:
            rest = started.run.after(started.taken)
            self._started.append(_Started(rest, self._start(rest, self._memory.depth + 1 - self._left)))
            self._left += rest.batches

    def _read(self) -> Any:
        """Return the next batch in the same order, read from the dataset as ``DataLoader`` does."""
        if self._lists is None:
            self._lists = itertools.chain.from_iterable(
                started.run.after(started.taken).numbered() for started in self._started
            )
            self._left = 0
        found = next(self._lists, None)
        if found is None:
            run = self._order.next()
            if run is None:
                self._end()
            self._lists = run.numbered()
            found = next(self._lists)
        run, number, indices = found
        return self._reached(self._fetch(indices), run, number)

    def _fetch(self, indices: Any) -> Any:
        """Fetch a batch as ``DataLoader`` does. The dataset interprets the indices, and may refuse them."""
        loader = self._memory.loader
        dataset: Any = loader.dataset
        samples = dataset.__getitems__(indices) if hasattr(dataset, "__getitems__") else [dataset[i] for i in indices]
        return self._placed(loader.collate_fn(samples))

    def close(self) -> None:
        """End the threads and drop the batches that were gathered ahead."""
        self.has_ended = True
        self._gather.close()
