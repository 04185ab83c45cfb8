"""Times of steps: events on a device, and the reading of a counter."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from flatout import native
from flatout.core import formatting
from flatout.core.described import Described
from flatout.native._host import PHASES, StepCounter, StepTimer


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


@dataclass(frozen=True, repr=False)
class Phases(Described):
    """Seconds of each phase of a step, averaged over the steps whose phases were measured.

    The phases add up to the time from the end of the previous step to the end of the step. On a CUDA device the phases
    are device time. A wait or a copy that overlaps other work of the device counts 0.

    Attributes:
        loader_wait: wait for the next batch.
        h2d: copy of the batch to the device.
        forward: forward pass and loss.
        backward: backward pass.
        update: gradient scaling, clipping, the optimizer's step.
        host_idle: remaining time, in which the host ran the loop's own code (logging, ``.item()``, Python).
    """

    loader_wait: float
    h2d: float
    forward: float
    backward: float
    update: float
    host_idle: float

    @property
    def total(self) -> float:
        """Sum of all phases."""
        return sum(getattr(self, name) for name in PHASES)

    def __str__(self) -> str:
        """Return share and time of each phase, as in ``loader wait 10.0 % 1.2 ms, ...``."""
        whole = self.total or 1.0
        shown = ((name.replace("_", " "), getattr(self, name)) for name in PHASES)
        return ", ".join(f"{name} {formatting.share(value / whole, 1)} {1e3 * value:.3g} ms" for name, value in shown)

    def _facts(self) -> dict[str, str]:
        names = sorted(PHASES, key=lambda name: getattr(self, name), reverse=True)
        return {name: f"{name} {formatting.milliseconds(1e3 * getattr(self, name))}" for name in names}


@dataclass(frozen=True)
class TensorCores:
    """Activity of a GPU's tensor cores, beside the counted FLOPs of the same time.

    Attributes:
        active: share of the time in which the tensor cores worked, 0..1, as NVML's GPM measures it.
        needed: share of the time that the counted FLOPs take at the peak, recomputation included. None if unknown.
    """

    active: float
    needed: float | None

    def __str__(self) -> str:
        return f"tensor cores active {formatting.share(self.active, 1)}"


_TOLD: dict[str, Callable[[float], str]] = {
    "step_seconds": lambda value: f"{formatting.milliseconds(1e3 * value)} a step",
    "samples_per_second": lambda value: f"{formatting.count(value)} samples/s",
    "tokens_per_second": lambda value: f"{formatting.count(value)} tokens/s",
    "flops_per_second": lambda value: f"{1e-12 * value:.3g} TFLOP/s",
    "mfu": lambda value: f"MFU {formatting.share(value, 1)}",
    "hfu": lambda value: f"HFU {formatting.share(value, 1)}",
    "stall_fraction": lambda value: f"stall {formatting.share(value, 1)}",
}


@dataclass(frozen=True, repr=False)
class Reading(Described):
    """Rates over a number of steps. An unknown rate is None.

    The time of a step begins with the end of the previous step, so the loop's own work counts.
    :meth:`MfuCounter.pause` excludes time that is not training.

    Attributes:
        steps: number of steps.
        samples: samples of these steps.
        tokens: tokens of these steps.
        seconds: time of the steps and of the pauses between them. If two steps overlap, their common time counts once.
        step_seconds: time of one step from its beginning to its end, as the median over a window or the mean over a
            total.
        samples_per_second: samples / seconds, or None if the steps have no samples.
        tokens_per_second: tokens / seconds, or None if the steps have no tokens.
        flops_per_second: FLOPs / seconds, over the steps whose FLOPs are known.
        mfu: flops_per_second / peak_flops, after Chowdhery et al., "PaLM" (2022), appendix B.
        hfu: as ``mfu``, for all FLOPs that the hardware computes, including recomputation by activation checkpointing.
        stall_fraction: share of ``seconds`` in which the device was idle and waited for the loader.
        phases: mean seconds of each phase, or None if no phase was measured.
    """

    steps: int
    samples: int
    tokens: int
    seconds: float
    step_seconds: float | None
    samples_per_second: float | None
    tokens_per_second: float | None
    flops_per_second: float | None
    mfu: float | None
    hfu: float | None
    stall_fraction: float | None
    phases: Phases | None

    def __str__(self) -> str:
        """Return all known rates in one line.

        An example is ``100 steps, 12.3 ms a step, 5,201 samples/s, MFU 41.0 %, stall 1.2 %``.
        """
        return ", ".join(self._facts().values())

    def _facts(self) -> dict[str, str]:
        return {"steps": formatting.counted(self.steps, "step"), **self.told()}

    def told(self) -> dict[str, str]:
        """Return the known rates in words, by attribute. ``hfu`` is included only if it differs from ``mfu``."""
        known = {name: getattr(self, name) for name in _TOLD if name != "hfu" or self.hfu != self.mfu}
        return {name: _TOLD[name](value) for name, value in known.items() if value is not None}
