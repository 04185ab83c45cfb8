"""``MfuCounter``: step times, throughput, loader stalls and MFU of a training loop, without a host sync."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections import deque
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

import torch

from flatout import _native
from flatout._host import StepCounter, StepReading


@dataclass(frozen=True)
class Reading:
    """Rates over a number of steps; None where something is not known.

    The time that counts is that of the steps and of the stalls before them. What a loop does besides
    (evaluation, checkpoints) is charged to neither.

    Attributes:
        steps: number of steps.
        samples: their samples.
        seconds: steps and stalls together.
        step_seconds: one step: the median over a window, the mean over a total.
        samples_per_second: samples / seconds.
        flops_per_second: FLOPs / seconds; None when the FLOPs of any of the steps are not known.
        mfu: flops_per_second / peak_flops, after Chowdhery et al., "PaLM" (2022), appendix B.
        stall_fraction: share of ``seconds`` in which the device had nothing to do but wait for the loader.
    """

    steps: int
    samples: int
    seconds: float
    step_seconds: float | None
    samples_per_second: float | None
    flops_per_second: float | None
    mfu: float | None
    stall_fraction: float | None

    def __str__(self) -> str:
        """What is known, in one line: ``100 steps, 12.3 ms a step, 5,201 samples/s, MFU 41.0 %, stall 1.2 %``."""
        parts = [f"{self.steps:,} step{'s' * (self.steps != 1)}"]
        if self.step_seconds is not None:
            parts.append(f"{1e3 * self.step_seconds:.3g} ms a step")
        if self.samples_per_second:
            parts.append(f"{self.samples_per_second:,.5g} samples/s")
        if self.flops_per_second is not None:
            parts.append(f"{1e-12 * self.flops_per_second:.3g} TFLOP/s")
        if self.mfu is not None:
            parts.append(f"MFU {self.mfu:.1%}".replace("%", " %"))
        if self.stall_fraction is not None:
            parts.append(f"stall {self.stall_fraction:.1%}".replace("%", " %"))
        return ", ".join(parts)


class MfuCounter:
    """Counts training steps as they run.

    On the CPU a step is timed by the host's steady clock. On a CUDA device it is timed by events on the
    current stream that are polled and never waited for, so a reading covers the steps that the device has
    finished so far. A step that is being captured into a CUDA graph is not counted; its replays are.

    Example:
        >>> counter = MfuCounter(flops_per_step=6e9, peak_flops=1e12)
        >>> with counter.step(samples=32):
        ...     pass  # forward, backward, update
        >>> counter.steps, counter.samples
        (1, 32)

    Args:
        flops_per_step: floating-point operations that the model needs for a step (not what recomputation
            adds); None when not known, or given to each ``step``.
        peak_flops: FLOP/s that the device could reach in the precision used; None when not known.
        device: where the steps run; default: the current CUDA device if there is one, else the CPU.
        window: number of steps that the rolling figures cover.

    Raises:
        ValueError: for a negative ``flops_per_step``, a ``peak_flops`` or ``window`` that is not positive.
    """

    def __init__(
        self,
        flops_per_step: float | None = None,
        peak_flops: float | None = None,
        *,
        device: torch.device | str | None = None,
        window: int = 100,
    ) -> None:
        if window < 1:
            raise ValueError(f"window must be >= 1, got {window}")
        if peak_flops is not None and not 0 < peak_flops < math.inf:
            raise ValueError(f"peak_flops must be > 0 and finite, or None, got {peak_flops}")
        self.flops_per_step = _checked_flops("flops_per_step", flops_per_step)
        self.peak_flops = peak_flops
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self._core = StepCounter(window)
        self._timer = _timer(self._core, self.device)
        self._warned = False

    def step(self, samples: int = 0, flops: float | None = None) -> _Step:
        """Times one training step: ``with counter.step(samples=len(x)): ...``.

        A step that ends in an exception is not counted.

        Args:
            samples: samples that the step trains on.
            flops: FLOPs of this step, where they differ from ``flops_per_step`` (a shorter last batch).

        Raises:
            ValueError: for negative ``samples`` or ``flops``.
        """
        if samples < 0:
            raise ValueError(f"samples must be >= 0, got {samples}")
        flops = self.flops_per_step if flops is None else _checked_flops("flops", flops)
        return _Step(self._timer, samples, flops)

    def waited(self, seconds: float) -> None:
        """Tells that the loop waited ``seconds`` for its loader before the next step.

        It counts as a stall only as far as the device was idle meanwhile.

        Raises:
            ValueError: for negative ``seconds``.
        """
        if not 0 <= seconds < math.inf:
            raise ValueError(f"seconds must be >= 0 and finite, got {seconds}")
        self._timer.waited(seconds)

    def reset(self) -> None:
        """Forgets everything counted so far; the next step is the first again."""
        self._timer.reset()
        self._core.reset()

    @property
    def window(self) -> Reading:
        """The last steps: as many as ``window`` said."""
        self._timer.poll()
        return self._reading(self._core.window())

    @property
    def total(self) -> Reading:
        """Every step since the beginning or ``reset``."""
        self._timer.poll()
        return self._reading(self._core.total())

    @property
    def steps(self) -> int:
        """Steps finished since the beginning."""
        return self.total.steps

    @property
    def samples(self) -> int:
        """Samples trained on since the beginning."""
        return self.total.samples

    @property
    def step_seconds(self) -> float | None:
        """Median step time of the window, seconds."""
        return self.window.step_seconds

    @property
    def samples_per_second(self) -> float | None:
        """Throughput of the window, loader stalls included."""
        return self.window.samples_per_second

    @property
    def flops_per_second(self) -> float | None:
        """FLOP/s of the window, loader stalls included."""
        return self.window.flops_per_second

    @property
    def mfu(self) -> float | None:
        """MFU of the window: 0..1, or None when FLOPs or peak are not known."""
        return self.window.mfu

    @property
    def stall_fraction(self) -> float | None:
        """Share of the window's time that the device spent waiting for the loader, 0..1."""
        return self.window.stall_fraction

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.device}: {self.window})"

    def _reading(self, core: StepReading) -> Reading:
        rate, peak = core.flops_per_second, self.peak_flops
        mfu = None if rate is None or peak is None else rate / peak
        if mfu is not None and mfu > 1 and not self._warned:
            self._warned = True
            warnings.warn(
                f"MFU is {mfu:.2f}, more than the device can do: flops_per_step is too high or peak_flops "
                f"({peak:.4g} FLOP/s) too low for the precision in use",
                RuntimeWarning,
                stacklevel=3,
            )
        return Reading(
            steps=core.steps,
            samples=core.samples,
            seconds=core.seconds,
            step_seconds=core.step_seconds,
            samples_per_second=core.samples_per_second,
            flops_per_second=rate,
            mfu=mfu,
            stall_fraction=core.stall_fraction,
        )


def _checked_flops(name: str, flops: float | None) -> float | None:
    if flops is not None and not 0 <= flops < math.inf:
        raise ValueError(f"{name} must be >= 0 and finite, or None, got {flops}")
    return flops


class _Timer(Protocol):
    """Times steps and hands them to a ``StepCounter``; ``begin`` returns what ``end`` or ``drop`` gets."""

    def begin(self) -> Any: ...
    def end(self, token: Any, samples: int, flops: float | None) -> None: ...
    def drop(self, token: Any) -> None: ...
    def waited(self, seconds: float) -> None: ...
    def poll(self) -> None: ...
    def reset(self) -> None: ...


def _timer(core: StepCounter, device: torch.device) -> _Timer:
    if device.type != "cuda":
        return _HostTimer(core)
    if _native.has_cuda_kernels(device.index):
        # The core's own CUDA runtime refuses a driver that is too old for it; torch's may still work.
        with contextlib.suppress(RuntimeError):
            return _EventTimer(core, device)
    return _TorchEventTimer(core, device)


class _HostTimer:
    """The core's host clock."""

    def __init__(self, core: StepCounter) -> None:
        core.use_host_clock()
        self.begin = core.begin
        self.end = core.end
        self.drop = core.drop
        self.waited = core.waited

    def poll(self) -> None:
        """The core polls by itself."""

    def reset(self) -> None:
        """The core resets its own timer."""


class _EventTimer:
    """The core's CUDA events, on whatever stream is current."""

    def __init__(self, core: StepCounter, device: torch.device) -> None:
        self._core = core
        self._index = torch.cuda.current_device() if device.index is None else device.index
        core.use_events(self._index)
        self.drop = core.drop
        self.waited = core.waited

    def begin(self) -> int:
        return self._core.begin(torch._C._cuda_getCurrentRawStream(self._index))

    def end(self, token: int, samples: int, flops: float | None) -> None:
        self._core.end(token, samples, flops, torch._C._cuda_getCurrentRawStream(self._index))

    def poll(self) -> None:
        """The core polls by itself."""

    def reset(self) -> None:
        """The core resets its own timer."""


class _TorchEventTimer:
    """torch's events, for a GPU that this build has no CUDA code for."""

    def __init__(self, core: StepCounter, device: torch.device) -> None:
        self._core = core
        self._device = device
        self._waited = 0.0
        self._last_end: torch.cuda.Event | None = None
        self._pending: deque[tuple[torch.cuda.Event, torch.cuda.Event, float, int, float | None]] = deque()

    def begin(self) -> torch.cuda.Event:
        self.poll()
        return self._now()

    def end(self, token: torch.cuda.Event, samples: int, flops: float | None) -> None:
        waited, self._waited = self._waited, 0.0
        self._pending.append((token, self._now(), waited, samples, flops))

    def drop(self, token: torch.cuda.Event) -> None:
        """Nothing was kept."""

    def waited(self, seconds: float) -> None:
        self._waited += seconds

    def poll(self) -> None:
        while self._pending and self._pending[0][1].query():
            begin, end, waited, samples, flops = self._pending.popleft()
            gap = None if self._last_end is None else self._last_end.elapsed_time(begin) * 1e-3
            self._core.add(begin.elapsed_time(end) * 1e-3, gap, waited, samples, flops)
            self._last_end = end

    def reset(self) -> None:
        self._pending.clear()
        self._last_end, self._waited = None, 0.0

    def _now(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event


class _Step:
    """One step under way."""

    __slots__ = ("_flops", "_samples", "_timer", "_token")

    def __init__(self, timer: _Timer, samples: int, flops: float | None) -> None:
        self._timer = timer
        self._samples = samples
        self._flops = flops

    def __enter__(self) -> None:
        self._token = self._timer.begin()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None:
            self._timer.end(self._token, self._samples, self._flops)
        else:
            self._timer.drop(self._token)
