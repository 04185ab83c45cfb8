"""What comes back from worker processes besides batches: their exceptions, whole, and the news of their death."""

from __future__ import annotations

import multiprocessing.connection
import pickle
import signal
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch.utils.data._utils.worker
from torch._utils import ExceptionWrapper
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

_SECONDS_BETWEEN_LOOKS = 0.25  # at the workers, while no batch comes
_SECONDS_TO_DIE = 0.2  # between the end of a process's pipes and the end of the process
_HINTS = {
    "SIGKILL": "as the kernel does when memory runs out",
    "SIGBUS": "as happens when shared memory (/dev/shm) runs out",
}


class WorkerError(RuntimeError):
    """A worker process of a ``DataLoader`` ended: its pid, and the signal or exit code."""


class RemoteTraceback(Exception):
    """The traceback of an exception, as text, from the process where it was raised."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class InWorker:
    """A ``worker_init_fn`` that has exceptions come back from the worker as they were raised.

    torch's come back with their type, and the traceback as their only argument.

    Args:
        users: the user's own ``worker_init_fn``, called behind it.
    """

    def __init__(self, users: Callable[[int], Any] | None) -> None:
        self._users = users

    def __call__(self, worker: int) -> None:
        torch.utils.data._utils.worker.ExceptionWrapper = _WholeException  # type: ignore[misc]
        if self._users is not None:
            self._users(worker)


class _WholeException(ExceptionWrapper):
    """Made in a worker, in place of torch's; raised again where batches are taken."""

    def __init__(self, exc_info: Any = None, where: str = "in background") -> None:
        super().__init__(exc_info, where)
        self._chain = _packed((exc_info or sys.exc_info())[1])
        try:
            pickle.dumps(self.exc_type)
        except Exception:  # a class made in a function: torch would wait for it forever
            self.exc_type = RuntimeError

    def reraise(self) -> None:
        """Raise it, with what it was raised from; behind that, the worker's traceback as text."""
        try:
            chain = list(map(pickle.loads, self._chain))
        except Exception:  # its module, or what it holds, is not to be had here
            chain = []
        if not chain:
            super().reraise()
        text = RemoteTraceback(f"{self.where}:\n{self.exc_msg}")
        for i, cause in enumerate([*chain[1:], text]):
            chain[i].__cause__ = cause
        try:
            raise chain[0]
        finally:
            chain.clear()  # an exception that its own traceback holds keeps the loader's workers alive


def _packed(error: BaseException | None) -> list[bytes]:
    """An exception and its causes, pickled; none where one of them cannot be, or not be made again."""
    packed: list[bytes] = []
    while error is not None:
        try:
            packed.append(pickle.dumps(error))
            pickle.loads(packed[-1])
        except Exception:
            return []
        error = error.__cause__
    return packed


def watch(batches: Any) -> None:
    """Have a ``DataLoader``'s iterator say that a worker has died when its batch is asked for, within half a second.

    torch's signal handler says so in the middle of whatever the main thread is at, a step of the optimizer too; where
    it does not come through, five seconds pass.
    """
    if isinstance(batches, _MultiProcessingDataLoaderIter) and batches._worker_pids_set:
        torch._C._remove_worker_pids(id(batches))
        batches._worker_pids_set = False
        batches._try_get_data = _TryOften(batches)  # type: ignore[method-assign]


class _TryOften:
    def __init__(self, batches: _MultiProcessingDataLoaderIter) -> None:
        self._batches = weakref.ref(batches)  # or its workers would outlive an early break

    def __call__(self, timeout: float = _SECONDS_BETWEEN_LOOKS) -> tuple[bool, Any]:
        batches: Any = self._batches()
        return type(batches)._try_get_data(batches, timeout)


def death_of_a_worker(batches: Any, error: Exception) -> str | None:
    """Which worker of a ``DataLoader``'s iterator has died, and how, when ``error`` came instead of a batch.

    Ends the other workers then. ``None``: none has died.
    """
    workers = list(getattr(batches, "_workers", ()))
    # Its pipes break before a process has ended; whatever else is raised is the user's own.
    if workers and isinstance(error, (RuntimeError, OSError, EOFError)) and not _is_remote(error):
        ended = multiprocessing.connection.wait([worker.sentinel for worker in workers], timeout=_SECONDS_TO_DIE)
        for worker in workers:
            if worker.sentinel in ended:
                worker.join()  # it has closed its files; its exit code follows
    # Of one that exits with 0, as after Ctrl-C, torch alone can tell that it had not come to its end.
    missed = str(error) if str(error).startswith("DataLoader worker (pid(s)") else ""
    for number, worker in enumerate(workers):
        if worker.exitcode or (worker.exitcode == 0 and str(worker.pid) in missed):
            batches._shutdown_workers()
            return f"DataLoader worker {number} (pid {worker.pid}) {_end(worker.exitcode)}"
    return None


def _is_remote(error: BaseException) -> bool:
    while error.__cause__ is not None:
        error = error.__cause__
    return isinstance(error, RemoteTraceback)


def _end(exitcode: int) -> str:
    if exitcode >= 0:
        return f"exited with code {exitcode}"
    name = signal.Signals(-exitcode).name
    return f"was killed by {name}" + (f", {_HINTS[name]}" if name in _HINTS else "")
