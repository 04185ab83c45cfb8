"""Times of one rank in a step, to wait for its batch, to compute its gradients, and to wait for all ranks."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

T = TypeVar("T")

TIMES = 4
"""Number of values that ``StepClock.take`` returns."""


class StepClock:
    """Clock of one rank's steps.

    A slow rank makes all others wait in their backward. There, a slow rank and a slow network look the same. So the
    time until this rank has its own gradients, and the time after it, are measured separately.

    On a CUDA device, computing and waiting are times between events on the current stream. The host does not wait for
    the events.

    Args:
        device: the device of this rank.

    Attributes:
        device: the argument.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._loading = 0.0
        self._begun: Any = None
        self._ready: Any = None
        self._spans: deque[tuple[int, Any, Any, Any]] = deque()

    def loading(self, batches: Iterable[T]) -> Iterator[T]:
        """Yield batches, and count the waits for them."""
        iterator = iter(batches)
        while True:
            begun = time.perf_counter()
            try:
                batch = next(iterator)
            except StopIteration:
                return
            self._loading += time.perf_counter() - begun
            yield batch

    def begin(self) -> None:
        """Begin to compute the gradients of a batch."""
        self._begun, self._ready = self._now(), None

    def ready(self) -> None:
        """Mark that this rank has computed all gradients of the batch. Later marks are ignored."""
        if self._ready is None:
            self._ready = self._now()

    def end(self) -> None:
        """Mark that the gradients of all ranks have arrived."""
        self.ready()
        self._spans.append((1, self._begun, self._ready, self._now()))

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the block as waiting for the other ranks."""
        begun = self._now()
        yield
        self._spans.append((0, begun, begun, self._now()))

    def take(self) -> list[float]:
        """Return the number of steps since the last call, and their seconds of loading, computing and waiting.

        A step counts after its end. On a CUDA device it counts when the device has finished it. Loading counts at once.
        """
        loading, self._loading = self._loading, 0.0
        steps, computing, waiting = 0, 0.0, 0.0
        while self._spans and _is_past(self._spans[0][-1]):
            step, begun, ready, end = self._spans.popleft()
            steps += step
            computing += _seconds(begun, ready)
            waiting += _seconds(ready, end)
        return [float(steps), loading, computing, waiting]

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event


def _is_past(moment: Any) -> bool:
    return isinstance(moment, float) or moment.query()


def _seconds(begin: Any, end: Any) -> float:
    return end - begin if isinstance(begin, float) else begin.elapsed_time(end) / 1e3
