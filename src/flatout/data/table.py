"""Rows in memory that several processes share. Each row is written once."""

from __future__ import annotations

import errno
import functools
import itertools
import math
import mmap
import os
import weakref
from collections.abc import Callable
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


class Table:
    """Samples of one layout in :class:`SharedBytes`, with one column for each leaf.

    A pickle contains the memory as a pickle of ``SharedBytes`` does.

    Each row is written once, by one process. Other processes see a row only when it is complete.

    Args:
        layout: layout of every sample.
        rows: number of samples.

    Attributes:
        columns: tensors ``[rows, *shape]``, one per leaf.

    Raises:
        OSError: the shared memory cannot be allocated.
    """

    def __init__(self, layout: SampleLayout, rows: int) -> None:
        self.layout = layout
        self.rows = rows
        sizes = (rows + 1, 1 + _LONGEST_NOTE, *(rows * leaf.nbytes for leaf in layout.leaves))
        self._ends = list(itertools.accumulate(_ALIGNMENT * math.ceil(size / _ALIGNMENT) for size in sizes))
        self._memory = SharedBytes(self._ends[-1])
        self._lay_out()

    @torch.inference_mode(False)  # views from inference mode cannot be written outside of it
    def _lay_out(self) -> None:
        memory = self._memory.tensor
        self._flags = memory[: self.rows]
        self._note = memory[self._ends[0] : self._ends[1]].numpy()
        self.columns = [
            memory[begin : begin + self.rows * leaf.nbytes].view(leaf.dtype).reshape(self.rows, *leaf.shape)
            for begin, leaf in zip(self._ends[1:], self.layout.leaves, strict=False)
        ]
        self._arrays = [
            None if leaf.kind is Tensor else column.numpy()
            for leaf, column in zip(self.layout.leaves, self.columns, strict=True)
        ]
        self._states = _host.RowStates(memory.data_ptr(), self.rows + 1, memory)  # one more, for the note
        self.has = self._states.is_complete
        """Function of a row's index that returns True if the row is complete."""

    def __getstate__(self) -> dict[str, Any]:
        return {name: vars(self)[name] for name in ("layout", "rows", "_ends", "_memory")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._lay_out()

    def missing(self) -> list[int]:
        """Return the rows that no process has begun to write."""
        return (self._flags == 0).nonzero().flatten().tolist()

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
