"""Timers of a counter's steps on a GPU, with CUDA events of the native core or with torch's events."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch

from flatout import native
from flatout.native._host import StepCounter, StepTimer


def use_gpu_clock(core: StepCounter, device: torch.device) -> None:
    """Time the steps on ``device`` with the native core, or with torch's events if the core lacks kernels."""
    if native.has_cuda_kernels(device.index):
        # The core's own CUDA runtime rejects a driver that is too old for it. torch's runtime may still work.
        with contextlib.suppress(RuntimeError):
            core.use_events(device.index, torch._C._cuda_getCurrentRawStream)
            return
    core.use_timer(TorchEventTimer(core, device))


@dataclass(eq=False)
class _Span:
    """Step between two of torch's events."""

    begun: Any
    alone: bool
    waited: float
    ended: Any = None
    work: tuple[Any, ...] = ()


class TorchEventTimer(StepTimer):
    """Timer with torch's events and without phases, for a GPU without flatout's CUDA kernels."""

    def __init__(self, core: StepCounter, device: torch.device) -> None:
        super().__init__()
        self._core = weakref.proxy(core)  # the core holds this timer
        self._device = device
        self._lock = threading.RLock()  # garbage collection of a wrapped model may finish a step at any moment
        self._open: dict[int, _Span] = {}
        self._pending: deque[_Span] = deque()
        self._polling = False
        self._last_token = 0
        self._last_end: Any = None
        self._alone = True
        self._waited = 0.0

    def begin(self) -> int:
        with self._lock:
            alone, waited = self._alone, self._waited
            recording = self._is_recording()
            self._alone, self._waited = recording, 0.0
            self._last_token += 1
            if not recording:
                self._open[self._last_token] = _Span(self._now(), alone, waited)
            return self._last_token

    def touch(self, token: int) -> None:
        step = self._open.get(token)
        if step is not None and not self._is_recording():
            step.ended = self._now()

    def finish(self, token: int, samples: int, tokens: int, flops: float | None, hardware_flops: float | None) -> None:
        step = self._open.pop(token, None)
        if step is None:  # recorded into a graph
            return
        if step.ended is None:
            self.pause()
            return
        step.work = (samples, tokens, flops, hardware_flops)
        with self._lock:
            self._pending.append(step)
        self.poll()

    def drop(self, token: int) -> None:
        if self._open.pop(token, None) is not None:
            self.pause()

    def waited(self, seconds: float) -> None:
        with self._lock:
            self._waited += seconds

    def pause(self) -> None:
        with self._lock:
            self._alone, self._waited = True, 0.0

    def poll(self) -> None:
        with self._lock:
            # The outer poll counts steps that are finished inside it. Inside a capture, a query of an event would
            # break the graph.
            if self._polling or self._is_recording():
                return
            self._polling = True
            try:
                while self._pending and self._pending[0].ended.query() and self._pending[0].begun.query():
                    self._count(self._pending.popleft())
            finally:
                self._polling = False

    def reset(self) -> None:
        with self._lock:
            self._open.clear()
            self._pending.clear()
            self._last_end = None
        self.pause()

    def _count(self, step: _Span) -> None:
        """Count a step with the same arithmetic as the core."""
        seconds = step.begun.elapsed_time(step.ended) * 1e-3
        gap = None if self._last_end is None else self._last_end.elapsed_time(step.begun) * 1e-3
        if gap is None or gap + seconds >= 0:
            self._last_end = step.ended
        if step.alone and gap is not None and gap >= 0:
            self._core.add(seconds, None, min(step.waited, gap), *step.work)
        else:
            self._core.add(seconds, gap, step.waited, *step.work)

    def _now(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _is_recording(self) -> bool:
        return torch.cuda.is_current_stream_capturing()
