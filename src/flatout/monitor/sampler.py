"""Sampler of the machine, sample by sample or in the background."""

from __future__ import annotations

import math
import os
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Literal

from flatout.monitor.host import Host, Processes
from flatout.monitor.nvml import Gpus
from flatout.monitor.reasons import reason
from flatout.monitor.sample import Sample

Writer = Callable[[Sample], object]

KEPT = 60
"""Samples that ``Sampler.recent`` holds."""

_PATIENCE = 10.0  # seconds that close() waits for a query that hangs in the driver


class Sampler:
    """Background thread that takes a ``Sample`` every ``interval`` seconds, from ``start()`` to ``close()``.

    ``with Sampler(write=...)`` calls both. A forked process has no such thread, so ``close()`` does nothing in a fork.

    Attributes:
        recent: last ``KEPT`` samples, oldest first.
    """

    def __init__(
        self,
        write: Writer | Sequence[Writer] = (),
        *,
        interval: float = 1.0,
        pid: int | Literal["all"] | None = None,
        dcgm: bool = False,
    ) -> None:
        """Prepare the sampler without taking a sample.

        Args:
            write: one function, or several. The sampler's thread calls each function with every sample. A function that
                raises is reported by a warning and not called again.
            interval: seconds from sample to sample.
            pid: process to watch, with its descendants. None is this process, and ``"all"`` is the whole machine.
            dcgm: read tensor-core and memory activity of GPUs before Hopper from DCGM. DCGM then holds the hardware
                counters until ``close()``, so that ``torch.profiler`` and Nsight fail.

        Raises:
            ValueError: ``interval`` is not a positive, finite number.
        """
        if not 0 < interval < math.inf:
            raise ValueError(f"interval must be a positive number of seconds, got {interval}")
        self.recent: deque[Sample] = deque(maxlen=KEPT)
        self._writers = [write] if callable(write) else list(write)
        self._interval = interval
        self._pid = None if pid == "all" else os.getpid() if pid is None else pid
        self._gpus = Gpus(interval, dcgm=dcgm)
        self._host = Host()
        self._processes = Processes(self._pid)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._owner = os.getpid()

    def take(self) -> Sample:
        """Take one sample, pass the sample to the writers, and return the sample.

        The first sample has no rates. Do not call this method between ``start()`` and ``close()``.
        """
        processes, ended = self._processes.sample()
        gpus, no_gpu = self._gpus.sample(_environment(self._pid))
        sample = Sample(time.time(), gpus, no_gpu, self._host.sample(), self._pid, ended, processes)
        self.recent.append(sample)
        failed: list[Exception] = []
        for write in list(self._writers):
            try:
                write(sample)
            except Exception as error:  # an error of a writer must end neither the training nor the sampling
                self._writers.remove(write)
                failed.append(error)
        for fault in failed:
            warnings.warn(f"flatout's monitor stops a writer that failed: {reason(fault)}", stacklevel=2)
        return sample

    def start(self) -> None:
        """Start sampling in the background.

        Raises:
            RuntimeError: the sampler was started before.
        """
        if self._thread is not None:
            raise RuntimeError("a Sampler can be started once")
        self._thread = threading.Thread(target=self._run, name="flatout-monitor", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread and release NVML. A second call does nothing."""
        if os.getpid() != self._owner or self._stop.is_set():
            return
        self._stop.set()
        if self._thread is not None:
            self._thread.join(_PATIENCE)
            if self._thread.is_alive():  # NVML stays open, because the thread runs a query
                warnings.warn("flatout's monitor hangs in the driver and is left behind", stacklevel=2)
                return
        self._gpus.close()

    def __enter__(self) -> Sampler:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self) -> None:
        due = time.monotonic()
        while not self._stop.is_set():
            try:
                self.take()
            except Warning:  # a filter turned the warning into an error, which must not end the sampling
                threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread())))
            due = max(due + self._interval, time.monotonic())  # missed samples are skipped
            self._stop.wait(due - time.monotonic())


def _environment(pid: int | None) -> Mapping[str, str]:
    """Return the environment of the watched process, or of this process if the former is not readable."""
    if pid is None or pid == os.getpid():
        return os.environ
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return os.environ
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)
