"""Writes states to files, beside the training where that is asked for."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from flatout.training.checkpoint import file
from flatout.training.checkpoint.copies import HostCopies, mapped


class Writer:
    """Writes one state at a time. A process that ends finishes what it writes."""

    def __init__(self) -> None:
        self._copies = HostCopies()
        self._thread: ThreadPoolExecutor | None = None
        self._under_way: Future[None] | None = None

    def write(
        self, path: str | Path, state: Any, *, asynchronous: bool = False, then: Callable[[], object] | None = None
    ) -> None:
        """Write a state as it is now; waits for the one before.

        Args:
            path: of the file.
            state: see :func:`flatout.training.checkpoint.file.write`.
            asynchronous: copy the state into host memory, and write it while training goes on.
            then: called when it is on disk, by the thread that wrote it.

        Raises:
            TypeError: the state holds what cannot be written.
            OSError: this write failed or, where it goes on beside the training, the one before: this one is on its way.
        """
        failed = self._failure()
        if not asynchronous:
            _write(path, mapped(state, lambda tensor: tensor.detach()), then)
        else:
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, "flatout-checkpoint")
            self._under_way = self._thread.submit(self._write_copy, path, self._copies.copy(state), then)
        if failed is not None:
            raise failed

    def wait(self) -> None:
        """Wait until what was written last is on disk; raises what went wrong with it."""
        failed = self._failure()
        if failed is not None:
            raise failed

    def _failure(self) -> BaseException | None:
        """Wait; what went wrong. An interrupted wait leaves the write under way, whose memory nobody may take."""
        if self._under_way is None:
            return None
        failed = self._under_way.exception()
        self._under_way = None
        return failed

    def _write_copy(self, path: str | Path, copy: Any, then: Callable[[], object] | None) -> None:
        try:
            self._copies.wait()
            _write(path, copy, then)
        except Exception as error:  # raised by the next call, if there is one
            warnings.warn(f"the checkpoint {path} was not written: {error}", RuntimeWarning, stacklevel=1)
            raise


def _write(path: str | Path, state: Any, then: Callable[[], object] | None) -> None:
    file.write(path, state)
    if then is not None:
        then()
