"""What times the steps of a counter: the native core on the host's clock or on CUDA events, or torch's events."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from flatout import _native
from flatout._host import StepCounter


class Timer(Protocol):
    """Times steps and hands them to a ``StepCounter``; ``begin`` returns what the others get as ``token``.

    ``end`` is ``touch`` and ``finish`` in one call.
    """

    def begin(self) -> Any: ...
    def measure_phases_every(self, steps: int) -> None: ...
    def measures_phases(self, token: Any) -> bool: ...
    def mark(self, token: Any, phase: int) -> None: ...
    def touch(self, token: Any) -> None: ...
    def finish(
        self, token: Any, samples: int, tokens: int, flops: float | None, hardware_flops: float | None
    ) -> None: ...
    def end(self, token: Any, samples: int, tokens: int, flops: float | None, hardware_flops: float | None) -> None: ...
    def drop(self, token: Any) -> None: ...
    def waited(self, seconds: float) -> None: ...
    def pause(self) -> None: ...
    def poll(self) -> None: ...
    def reset(self) -> None: ...


def make_timer(core: StepCounter, device: torch.device) -> Timer:
    """The best timer there is for steps on ``device``."""
    if device.type != "cuda":
        return HostTimer(core)
    if _native.has_cuda_kernels(device.index):
        # The core's own CUDA runtime refuses a driver that is too old for it; torch's may still work.
        with contextlib.suppress(RuntimeError):
            return EventTimer(core, device)
    return TorchEventTimer(core, device)


class _CoreTimer:
    """What the core does by itself on either clock."""

    def __init__(self, core: StepCounter) -> None:
        self.finish = core.finish
        self.drop = core.drop
        self.waited = core.waited
        self.pause = core.pause
        self.measure_phases_every = core.measure_phases_every
        self.measures_phases = core.measures_phases

    def poll(self) -> None:
        """The core polls by itself."""

    def reset(self) -> None:
        """The core resets its own timer."""


class HostTimer(_CoreTimer):
    """The core's host clock."""

    def __init__(self, core: StepCounter) -> None:
        super().__init__(core)
        core.use_host_clock()
        self.begin = core.begin
        self.mark = core.mark
        self.touch = core.touch
        self.end = core.end


class EventTimer(_CoreTimer):
    """The core's CUDA events, on whatever stream is current."""

    def __init__(self, core: StepCounter, device: torch.device) -> None:
        super().__init__(core)
        self._core = core
        self._index = torch.cuda.current_device() if device.index is None else device.index
        core.use_events(self._index)

    def begin(self) -> int:
        return self._core.begin(torch._C._cuda_getCurrentRawStream(self._index))

    def mark(self, token: int, phase: int) -> None:
        self._core.mark(token, phase, torch._C._cuda_getCurrentRawStream(self._index))

    def touch(self, token: int) -> None:
        self._core.touch(token, torch._C._cuda_getCurrentRawStream(self._index))

    def end(self, token: int, samples: int, tokens: int, flops: float | None, hardware_flops: float | None) -> None:
        stream = torch._C._cuda_getCurrentRawStream(self._index)
        self._core.end(token, samples, tokens, flops, hardware_flops, stream)


@dataclass(eq=False)
class _Span:
    """A step between torch's events."""

    begun: Any
    alone: bool
    waited: float
    ended: Any = None
    work: tuple[Any, ...] = ()


class TorchEventTimer:
    """torch's events, for a GPU that this build has no CUDA code for; it knows no phases."""

    def __init__(self, core: StepCounter, device: torch.device) -> None:
        self._core = core
        self._device = device
        self._lock = threading.Lock()
        self._pending: deque[_Span] = deque()
        self._last_end: Any = None
        self._alone = True
        self._waited = 0.0

    def begin(self) -> _Span | None:
        """None while the current stream is recorded into a graph."""
        with self._lock:
            alone, waited = self._alone, self._waited
            recording = self._is_recording()
            self._alone, self._waited = recording, 0.0
            return None if recording else _Span(self._now(), alone, waited)

    def measure_phases_every(self, steps: int) -> None:
        """No phases."""

    def measures_phases(self, token: Any) -> bool:
        return False

    def mark(self, token: Any, phase: int) -> None:
        """No phases."""

    def touch(self, token: _Span | None) -> None:
        if token is not None and not self._is_recording():
            token.ended = self._now()

    def finish(
        self, token: _Span | None, samples: int, tokens: int, flops: float | None, hardware_flops: float | None
    ) -> None:
        if token is None:
            return
        if token.ended is None:
            self.drop(token)
            return
        token.work = (samples, tokens, flops, hardware_flops)
        with self._lock:
            self._pending.append(token)
        self.poll()

    def end(
        self, token: _Span | None, samples: int, tokens: int, flops: float | None, hardware_flops: float | None
    ) -> None:
        self.touch(token)
        self.finish(token, samples, tokens, flops, hardware_flops)

    def drop(self, token: _Span | None) -> None:
        if token is not None:
            self.pause()

    def waited(self, seconds: float) -> None:
        with self._lock:
            self._waited += seconds

    def pause(self) -> None:
        with self._lock:
            self._alone, self._waited = True, 0.0

    def poll(self) -> None:
        with self._lock:
            if self._is_recording():  # asking an event would break the graph
                return
            while self._pending and self._pending[0].ended.query() and self._pending[0].begun.query():
                self._count(self._pending.popleft())

    def reset(self) -> None:
        with self._lock:
            self._pending.clear()
            self._last_end = None
        self.pause()

    def _count(self, step: _Span) -> None:
        """The same arithmetic as the core's."""
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
