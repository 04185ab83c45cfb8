"""Sampler of the GPUs, sample by sample or in the background."""

from __future__ import annotations

import math
import os
import threading
import time
import warnings
from collections.abc import Callable, Sequence

from flatout.core.formatting import first_line
from flatout.monitor.nvml import Gpus, Sample

Writer = Callable[[Sample], object]

_PATIENCE = 10.0  # seconds that close() waits for a query that hangs in the driver


class Sampler:
    """Background thread that takes a ``Sample`` every ``interval`` seconds, from ``start()`` to ``close()``.

    ``with Sampler(write=...)`` calls both. A forked process has no such thread, so ``close()`` does nothing in a fork.
    """

    def __init__(self, write: Writer | Sequence[Writer] = (), *, interval: float = 1.0) -> None:
        """Prepare the sampler without taking a sample.

        Args:
            write: one function, or several. The sampler's thread calls each function with every sample. A function that
                raises is reported by a warning and not called again.
            interval: seconds from sample to sample.

        Raises:
            ValueError: ``interval`` is not a positive, finite number.
        """
        if not 0 < interval < math.inf:
            raise ValueError(f"interval must be a positive number of seconds, got {interval}")
        self._writers = [write] if callable(write) else list(write)
        self._interval = interval
        self._gpus = Gpus()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._owner = os.getpid()

    def take(self) -> Sample:
        """Take one sample, pass the sample to the writers, and return the sample.

        The first sample has no metrics of GPM. Do not call this method between ``start()`` and ``close()``.
        """
        sample = Sample(time.time(), *self._gpus.sample())
        for write in list(self._writers):
            try:
                write(sample)
            except Exception as error:  # an error of a writer must end neither the training nor the sampling
                self._writers.remove(write)
                warnings.warn(f"flatout's monitor stops a writer that failed: {first_line(error)}", stacklevel=2)
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

    def __exit__(self, *error: object) -> None:
        self.close()

    def _run(self) -> None:
        due = time.monotonic()
        while not self._stop.is_set():
            self.take()
            due = max(due + self._interval, time.monotonic())  # missed samples are skipped
            self._stop.wait(due - time.monotonic())
