"""Rows in memory that several processes share. Each row is written once."""

from __future__ import annotations

import errno
import functools
import itertools
import math
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import DupFd
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flatout.core.machine import free_shared_memory
from flatout.data.samples import Leaf, SampleLayout
from flatout.native import _host

_ALIGNMENT = 64  # bytes: a cache line
_LONGEST_NOTE = 511  # bytes
SEGMENT = 16 * 2**20
"""Bytes that a process claims at once. A page takes memory when it is written, so few of them are lost."""


class SharedBytes:
    """Zeroed memory that this process shares with the processes that it forks or starts. The last user frees it.

    A process that ``multiprocessing`` starts gets the same memory with its pickle. Any other pickle, and a deep copy,
    is new zeroed memory of the same size. On Linux, a page takes memory when it is first written, and the limit of
    /dev/shm does not apply.

    Args:
        size: bytes.

    Raises:
        OSError: the memory cannot be allocated.
    """

    tensor: Tensor
    """uint8 ``[size]``"""

    def __init__(self, size: int) -> None:
        if hasattr(os, "memfd_create"):
            self._hold(os.memfd_create("flatout"))
            os.ftruncate(self._descriptor, size)
            self._map(size)
        elif size > free_shared_memory():
            raise OSError(errno.ENOSPC, f"/dev/shm has no room for {size:,} bytes")
        else:
            self.tensor = torch.zeros(size, dtype=torch.uint8).share_memory_()

    def _hold(self, descriptor: int) -> None:
        self._descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)

    def _map(self, size: int) -> None:
        self.tensor = torch.frombuffer(mmap.mmap(self._descriptor, size), dtype=torch.uint8)

    def __reduce__(self) -> tuple[Callable[..., SharedBytes], tuple[Any, ...]]:
        if get_spawning_popen() is None:
            return SharedBytes, (self.tensor.numel(),)
        if not hasattr(self, "_descriptor"):
            return _of_tensor, (self.tensor,)
        return _of_descriptor, (DupFd(self._descriptor), self.tensor.numel())


def _of_descriptor(sent: Any, size: int) -> SharedBytes:
    made = SharedBytes.__new__(SharedBytes)
    made._hold(sent.detach())
    os.set_inheritable(made._descriptor, False)
    made._map(size)
    return made


def _of_tensor(tensor: Tensor) -> SharedBytes:
    made = SharedBytes.__new__(SharedBytes)
    made.tensor = tensor
    return made


class SharedRows:
    """Base of tables in :class:`SharedBytes`. Each row is written once, by one process.

    Other processes see a row only when it is complete. A pickle contains the memory as a pickle of ``SharedBytes``
    does.

    Args:
        rows: number of rows.
        sizes: bytes of each further part of the memory.

    Raises:
        OSError: the shared memory cannot be allocated.
    """

    def __init__(self, rows: int, sizes: Iterable[int]) -> None:
        self.rows = rows
        all_sizes = (rows + 1, 1 + _LONGEST_NOTE, *sizes)
        self._ends = list(itertools.accumulate(_ALIGNMENT * math.ceil(size / _ALIGNMENT) for size in all_sizes))
        self._memory = SharedBytes(self._ends[-1])
        self._lay_out()

    def _lay_out(self) -> None:
        memory = self._memory.tensor
        self._flags = memory[: self.rows]
        self._note = memory[self._ends[0] : self._ends[1]].numpy()
        self._states = _host.RowStates(memory.data_ptr(), self.rows + 1, memory)  # one more, for the note
        self.has = self._states.is_complete
        """Function of a row's index that returns True if the row is complete."""

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name in self._KEPT}

    _KEPT = frozenset({"rows", "_ends", "_memory"})

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._lay_out()

    def missing(self) -> list[int]:
        """Return the rows that no process has begun to write."""
        return (self._flags == 0).nonzero().flatten().tolist()

    @property
    def note(self) -> str | None:
        """Note that one of the processes has left; ``None`` if there is no note."""
        if not self.has(self.rows):
            return None
        return self._note.tobytes().rstrip(b"\0").decode(errors="ignore")

    def leave_note(self, text: str) -> bool:
        """Leave a note for all processes. Return False if there is a note already."""
        if not self._states.claim(self.rows):
            return False
        encoded = np.frombuffer(text.encode()[:_LONGEST_NOTE], np.uint8)
        self._note[: len(encoded)] = encoded
        self._states.complete(self.rows)
        return True


class Table(SharedRows):
    """Samples of one layout, with one column for each leaf.

    Args:
        layout: layout of every sample.
        rows: number of samples.

    Attributes:
        columns: tensors ``[rows, *shape]``, one per leaf.

    Raises:
        OSError: the shared memory cannot be allocated.
    """

    _KEPT = SharedRows._KEPT | {"layout"}

    def __init__(self, layout: SampleLayout, rows: int) -> None:
        self.layout = layout
        super().__init__(rows, (rows * leaf.nbytes for leaf in layout.leaves))

    @torch.inference_mode(False)  # views from inference mode cannot be written outside of it
    def _lay_out(self) -> None:
        super()._lay_out()
        memory = self._memory.tensor
        self.columns = [
            memory[begin : begin + self.rows * leaf.nbytes].view(leaf.dtype).reshape(self.rows, *leaf.shape)
            for begin, leaf in zip(self._ends[1:], self.layout.leaves, strict=False)
        ]
        self._arrays = [
            None if leaf.kind is Tensor else column.numpy()
            for leaf, column in zip(self.layout.leaves, self.columns, strict=True)
        ]

    def put(self, row: int, values: list[Any]) -> None:
        """Write a row, unless a process has written the row or is writing it.

        Args:
            row: index of the row.
            values: leaves of a sample that has the table's layout.
        """
        if not self._states.claim(row):
            return
        try:
            for column, array, value in zip(self.columns, self._arrays, values, strict=True):
                if array is None:
                    column[row].copy_(value)
                else:
                    array[row] = value
        except BaseException:
            self._states.give_up(row)
            raise
        self._states.complete(row)

    def take(self, row: int) -> Any:
        """Return a copy of the sample in a complete row."""
        return self.layout.build(map(_taken, self.layout.leaves, self.columns, self._arrays, itertools.repeat(row)))

    def holds(self, row: int, values: list[Any]) -> bool:
        """Return True if the leaves of a row equal ``values`` bit for bit."""
        return all(
            _bits(column[row]) == _bits(value) if array is None else _raw(array[row]) == _raw(value, array.dtype)
            for column, array, value in zip(self.columns, self._arrays, values, strict=True)
        )


class RaggedTable(SharedRows):
    """Rows of different numbers of bytes, as many as fit.

    A process claims a segment of the memory for itself, and places its rows there one after the other.

    Args:
        rows: number of rows.
        capacity: bytes of all rows together, at most. A row has at most ``SEGMENT`` bytes.

    Attributes:
        is_full: True if no segment is free any more.

    Raises:
        OSError: the shared memory cannot be allocated.
    """

    _KEPT = SharedRows._KEPT | {"_segment", "_segments"}

    def __init__(self, rows: int, capacity: int) -> None:
        self._segment = max(1, min(SEGMENT, capacity))
        self._segments = capacity // self._segment
        super().__init__(rows, (16 * rows, self._segments, self._segments * self._segment))

    def _lay_out(self) -> None:
        super()._lay_out()
        memory, ends = self._memory.tensor.numpy(), self._ends
        self._places = memory[ends[1] : ends[1] + 16 * self.rows].view(np.int64).reshape(self.rows, 2)
        self._bytes = memory[ends[3] :].data
        states = self._memory.tensor[ends[2] :]
        self._claims = _host.RowStates(states.data_ptr(), self._segments, states)
        self._lock = threading.Lock()
        self._process, self._next, self._end, self._searched = 0, 0, 0, 0
        self.is_full = False

    def put(self, row: int, parts: Sequence[bytes | memoryview]) -> bool:
        """Write a row, unless a process has written it or is writing it. Return False if there is no room for it."""
        size = sum(memoryview(part).nbytes for part in parts)
        if size > self._segment or self.is_full:
            return False
        if not self._states.claim(row):
            return True
        try:
            begin = self._place(size)
            if begin is not None:
                end = begin
                for part in parts:
                    view = memoryview(part).cast("B")
                    self._bytes[end : end + view.nbytes] = view
                    end += view.nbytes
                self._places[row] = begin, size
        except BaseException:
            self._states.give_up(row)
            raise
        (self._states.give_up if begin is None else self._states.complete)(row)
        return begin is not None

    def take(self, row: int) -> memoryview:
        """Return the bytes of a complete row. They must not be changed."""
        begin, size = self._places[row]
        return self._bytes[begin : begin + size]

    def forget(self, row: int) -> None:
        """Let a row be written again. Its memory stays in use."""
        self._states.give_up(row)

    def _place(self, size: int) -> int | None:
        """Return the first of ``size`` free bytes, in a segment of this process; None if there are none."""
        if (
            self._process != os.getpid()
        ):  # the segment, and perhaps the lock, belong to the process that forked this one
            self._process, self._next, self._end, self._lock = os.getpid(), 0, 0, threading.Lock()
        with self._lock:
            if self._end - self._next < size:
                free = (i for i in range(self._searched, self._segments) if self._claims.claim(i))
                segment = next(free, None)
                if segment is None:
                    self.is_full = True
                    return None
                self._searched = segment + 1
                self._next, self._end = segment * self._segment, (segment + 1) * self._segment
            begin, self._next = self._next, self._next + size
            return begin


def _taken(leaf: Leaf, column: Tensor, array: np.ndarray | None, row: int) -> Any:
    inverse = _inverse(leaf.order)
    if array is None:
        values = column.select(0, row)
        if leaf.order == tuple(range(len(inverse))):
            return values.clone()
        return values.permute(leaf.order).clone(memory_format=torch.contiguous_format).permute(inverse)
    if leaf.kind is np.ndarray:
        return array[row, ...].transpose(leaf.order).copy().transpose(inverse)
    value = array[row]
    return value.item() if leaf.kind in (int, float, bool) else value


@functools.lru_cache
def _inverse(order: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(range(len(order)), key=order.__getitem__))


def _bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _raw(value: Any, dtype: Any = None) -> bytes:
    return np.asarray(value, dtype).tobytes()
