"""What times the steps of a counter: the native core on the host's clock or on CUDA events, or torch's events."""

from __future__ import annotations

import contextlib
from collections import deque
from typing import Any, Protocol

import torch

from flatout import _native
from flatout._host import StepCounter


class Timer(Protocol):
    """Times steps and hands them to a ``StepCounter``; ``begin`` returns what the others get as ``token``."""

    def begin(self) -> Any: ...
    def measure_phases_every(self, steps: int) -> None: ...
    def measures_phases(self, token: Any) -> bool: ...
    def mark(self, token: Any, phase: int) -> None: ...
    def touch(self, token: Any) -> None: ...
    def finish(
        self, token: Any, samples: int, tokens: int, flops: float | None, hardware_flops: float | None
    ) -> None: ...
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


class TorchEventTimer:
    """torch's events, for a GPU that this build has no CUDA code for; it knows no phases."""

    def __init__(self, core: StepCounter, device: torch.device) -> None:
        self._core = core
        self._device = device
        self._pending: deque[Any] = deque()
        self._last_end: torch.cuda.Event | None = None
        self._alone = True
        self._waited = 0.0

    def begin(self) -> list[torch.cuda.Event | None]:
        self.poll()
        return [self._now(), None]

    def measure_phases_every(self, steps: int) -> None:
        """No phases."""

    def measures_phases(self, token: Any) -> bool:
        return False

    def mark(self, token: Any, phase: int) -> None:
        """No phases."""

    def touch(self, token: list[torch.cuda.Event | None]) -> None:
        token[1] = self._now()

    def finish(
        self,
        token: list[torch.cuda.Event | None],
        samples: int,
        tokens: int,
        flops: float | None,
        hardware_flops: float | None,
    ) -> None:
        self._pending.append((*token, self._alone, self._waited, (samples, tokens, flops, hardware_flops)))
        self._alone, self._waited = False, 0.0

    def drop(self, token: Any) -> None:
        self.pause()

    def waited(self, seconds: float) -> None:
        self._waited += seconds

    def pause(self) -> None:
        self._alone, self._waited = True, 0.0

    def poll(self) -> None:
        while self._pending and self._pending[0][1].query():
            begin, end, alone, waited, work = self._pending.popleft()
            gap = None if alone or self._last_end is None else self._last_end.elapsed_time(begin) * 1e-3
            self._core.add(begin.elapsed_time(end) * 1e-3, gap, waited, *work)
            self._last_end = end

    def reset(self) -> None:
        self._pending.clear()
        self._last_end = None
        self.pause()

    def _now(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event
