"""Batches from rows of tensors, gathered by native threads on the host or by the device that holds the rows."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from flatout.core.torch_state import share_with
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
