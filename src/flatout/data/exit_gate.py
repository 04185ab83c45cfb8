"""Iteration in daemon threads, which must not be inside an operator of torch when the interpreter shuts down.

During a shutdown, Python before 3.14 ends a daemon thread as soon as the thread requests the GIL. Inside an operator of
torch, this unwinds through a C++ destructor and aborts the process. The gate covers ``next`` of flatout's loaders. Work
of the thread on a batch is not covered. torch requests the GIL when it frees a tensor, too.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

PATIENCE = 2.0
"""Seconds that the shutdown of the interpreter waits for daemon threads to finish fetching a batch."""


class _Gate:
    """Context in which daemon threads fetch batches. Once the gate is closed, a thread that enters waits forever."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._is_closed = False
        self._thread = threading.local()

    def __enter__(self) -> None:
        depth = getattr(self._thread, "depth", 0)
        if depth == 0:
            with self._changed:
                while self._is_closed:
                    self._changed.wait()
                self._inside += 1
        self._thread.depth = depth + 1

    def __exit__(self, *_: object) -> None:
        self._thread.depth -= 1
        if self._thread.depth == 0:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.wait_for(lambda: self._inside == 0, PATIENCE)


_GATE = _Gate()
atexit.register(_GATE.close)
os.register_at_fork(after_in_child=_GATE.reset)  # a child has none of the threads that are inside


class _Gated:
    """Iterator that a daemon thread advances inside the gate."""

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._iterator: Iterator[Any] | None = iterator

    def __iter__(self) -> _Gated:
        return self

    def __next__(self) -> Any:
        with _GATE:
            if self._iterator is not None:
                batch = next(self._iterator, self)
                if batch is not self:
                    return batch
                self._iterator = None  # the iterator holds tensors, so it is freed inside the gate
        raise StopIteration

    def close(self) -> None:
        iterator = self._iterator
        if iterator is not None:
            iterator.close()  # type: ignore[attr-defined]


def opened(iterate: Callable[[], Iterator[Any]]) -> Iterator[Any]:
    """Return ``iterate()``. A daemon thread gets an iterator that the shutdown of the interpreter does not interrupt.

    Args:
        iterate: makes an iterator that has a ``close`` method.
    """
    if not threading.current_thread().daemon:
        return iterate()
    with _GATE:
        return _Gated(iterate())
