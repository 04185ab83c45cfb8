"""Writer of states to files, in the background if requested."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from flatout.training.checkpoint import file
from flatout.training.checkpoint.copies import HostCopies, mapped


class Writer:
    """Writer of checkpoints in a thread, one at a time. At exit, the process waits for the last write."""

    def __init__(self) -> None:
        self._copies = HostCopies()
        self._thread: ThreadPoolExecutor | None = None
        self._under_way: Future[None] | None = None

    def write(
        self, path: str | Path, state: Any, *, asynchronous: bool = False, then: Callable[[], object] | None = None
    ) -> None:
        """Write the current state, after the previous write is complete.

        Args:
            path: the file.
            state: see :func:`flatout.training.checkpoint.file.write`.
            asynchronous: True to copy the state into host memory, and to write the copy while training continues.
            then: called by the writing thread when the state is on disk.

        Raises:
            TypeError: the state holds an object that cannot be written.
            OSError: this write failed, or the previous asynchronous write failed. In the second case this write is
                complete, or has started if ``asynchronous``.
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
        """Wait until the last state is on disk, and raise the error of its write."""
        failed = self._failure()
        if failed is not None:
            raise failed

    def _failure(self) -> BaseException | None:
        """Wait for the write, and return its error. If the wait is interrupted, the next call waits again."""
        if self._under_way is None:
            return None
        failed = self._under_way.exception()
        self._under_way = None
        return failed

    def _write_copy(self, path: str | Path, copy: Any, then: Callable[[], object] | None) -> None:
        try:
            self._copies.wait()
            _write(path, copy, then)
        except Exception as error:  # the next call raises the error, but there may be no next call
            warnings.warn(f"the checkpoint {path} was not written: {error}", RuntimeWarning, stacklevel=1)
            raise


def _write(path: str | Path, state: Any, then: Callable[[], object] | None) -> None:
    file.write(path, state)
    if then is not None:
        then()
