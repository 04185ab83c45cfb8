"""Worker processes: whole exceptions, detection of dead workers, and CUDA objects in forks."""

from __future__ import annotations

import fcntl
import gc
import multiprocessing.connection
import os
import pickle
import signal
import stat
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils.data._utils.worker
from torch._utils import ExceptionWrapper
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

_SECONDS_BETWEEN_LOOKS = 0.25  # between checks of the workers, while no batch arrives
_SECONDS_TO_DIE = 0.2  # limit of the time from the end of a process's pipes to the end of the process
_HINTS = {
    "SIGKILL": "as the kernel does when memory runs out",
    "SIGBUS": "as happens when shared memory (/dev/shm) runs out",
}


class WorkerError(RuntimeError):
    """Death of a worker process of a ``DataLoader``. The message has the pid, and the signal or exit code."""


class NotReady(Exception):
    """No worker process has loaded the next batch."""


class RemoteTraceback(Exception):
    """Traceback of an exception, as text, from the process that raised the exception."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class InWorker:
    """``worker_init_fn`` for open files that are the worker's own, and for whole exceptions.

    Processes that are forked share the position in a file that was open before. Each worker opens such files again if
    they are only read. torch keeps only the type of an exception, and passes the traceback as the only argument. Here
    exceptions keep their arguments and causes.

    Args:
        users: the user's own ``worker_init_fn``, which is called afterwards.
    """

    def __init__(self, users: Callable[[int], Any] | None) -> None:
        self._users = users

    def __call__(self, worker: int) -> None:
        torch.utils.data._utils.worker.ExceptionWrapper = _WholeException  # type: ignore[misc]
        if sys.platform == "linux":
            open_files_again()
        if self._users is not None:
            self._users(worker)


def open_files_again() -> None:
    """Give this process a separate position in each regular file that is open for reading only.

    Raises:
        OSError: a file cannot be opened again.
    """
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        try:
            mode = os.fstat(descriptor).st_mode
            access = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE
        except OSError:  # the descriptor of the listing itself
            continue
        if stat.S_ISREG(mode) and access == os.O_RDONLY:
            again = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.lseek(again, os.lseek(descriptor, 0, os.SEEK_CUR), os.SEEK_SET)
                os.dup2(again, descriptor, inheritable=os.get_inheritable(descriptor))
            finally:
                os.close(again)


class _WholeException(ExceptionWrapper):
    """Wrapper of a worker's exception, in place of torch's. The process that takes batches raises the exception."""

    def __init__(self, exc_info: Any = None, where: str = "in background") -> None:
        super().__init__(exc_info, where)
        self._chain = _packed((exc_info or sys.exc_info())[1])
        try:
            pickle.dumps(self.exc_type)
        except Exception:  # of a class that is defined in a function; torch would wait forever
            self.exc_type = RuntimeError

    def reraise(self) -> None:
        """Raise the exception with its causes. The last cause is the worker's traceback as text."""
        try:
            chain = list(map(pickle.loads, self._chain))
        except Exception:  # its module, or an object that it holds, is missing in this process
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
    """Pickle an exception and its causes. The list is empty if one of them cannot be pickled and unpickled."""
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
    """Make a ``DataLoader``'s iterator report a dead worker when a batch is requested, within half a second.

    torch's signal handler raises anywhere in the main thread, even inside an optimizer's step. Without the signal,
    torch detects the death after five seconds.
    """
    if isinstance(batches, _MultiProcessingDataLoaderIter) and batches._worker_pids_set:
        torch._C._remove_worker_pids(id(batches))
        batches._worker_pids_set = False
        batches._try_get_data = _TryOften(batches)  # type: ignore[method-assign]


class _TryOften:
    waits = True

    def __init__(self, batches: _MultiProcessingDataLoaderIter) -> None:
        self._batches = weakref.ref(batches)  # a strong one would keep the workers alive after a break

    def __call__(self, timeout: float = _SECONDS_BETWEEN_LOOKS) -> tuple[bool, Any]:
        batches: Any = self._batches()
        if not self.waits and batches._data_queue.empty():
            raise NotReady
        return type(batches)._try_get_data(batches, timeout)


def next_of(batches: Iterator[Any], *, waits: bool) -> Any:
    """Return the next batch of an iterator.

    Args:
        batches: the iterator.
        waits: False to ask the workers of a ``DataLoader`` (:func:`watch`) only for a batch that they have loaded. Any
            other iterator cannot tell, and is asked in any case.

    Raises:
        NotReady: the workers have not loaded the batch. The iterator can be asked again.
    """
    attempt = getattr(batches, "_try_get_data", None)
    if waits or not isinstance(attempt, _TryOften):
        return next(batches)
    attempt.waits = False
    try:
        return next(batches)
    finally:
        attempt.waits = True


def death_of_a_worker(batches: Any, error: Exception) -> str | None:
    """Return which worker of a ``DataLoader``'s iterator has died, and how; ``None`` if all are alive.

    After a death, the other workers are ended.

    Args:
        batches: the iterator.
        error: the exception that the iterator raised in place of a batch.
    """
    workers = list(getattr(batches, "_workers", ()))
    # The pipes of a process break before the process ends. Other exceptions come from the user's code.
    if workers and isinstance(error, (RuntimeError, OSError, EOFError)) and not _is_remote(error):
        ended = multiprocessing.connection.wait([worker.sentinel for worker in workers], timeout=_SECONDS_TO_DIE)
        for worker in workers:
            if worker.sentinel in ended:
                worker.join()  # its files are closed, and its exit code follows soon
    # A worker may exit early with code 0, as after Ctrl-C. Only torch's message shows this.
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


def _keep_objects() -> None:
    """Exclude all objects of the parent from garbage collection, if the parent has used a CUDA device.

    CUDA raises in a child whose parent has used the device. The destructors of torch's events, and of tensors that
    several streams have used, do not catch the exception, so the child ends with SIGABRT. A garbage collection in the
    child would call these destructors (https://github.com/rwth-i6/returnn/issues/1494).
    """
    if torch.cuda._is_in_bad_fork():
        gc.freeze()


os.register_at_fork(after_in_child=_keep_objects)
