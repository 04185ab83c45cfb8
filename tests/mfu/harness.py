"""Simulated time for tests of step times: a process with a steady clock, matrix products, and a GPU."""

from __future__ import annotations

import contextlib
import ctypes
import math
import multiprocessing
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias
from unittest import mock

from torch import Tensor, nn

from flatout.mfu import MfuCounter, peaks
from flatout.mfu.counted_calls import CountedCalls, OpenStep
from flatout.native._host import StepCounter
from tests.clock import Clock

CLOCK = Path(__file__).parents[1] / "native" / "steady_clock.cpp"


def core_of(counter: MfuCounter) -> StepCounter:
    """Return the native core, which accepts steps of given times. The public interface reads a clock."""
    return counter._core


def calls_of(model: nn.Module) -> CountedCalls:
    """Return the call counter of a wrapped model, which ends with the model."""
    return type(model).flatout_calls  # type: ignore[attr-defined]


class StepTaker:
    """Stand-in for a reader in another thread, which ends the current step of a wrapped model."""

    def __init__(self, model: nn.Module) -> None:
        self._calls, self._thread = calls_of(model), threading.get_ident()
        self._step = self._calls._steps[self._thread]

    def take(self) -> bool:
        return self._calls._take(self._thread, self._step)

    def take_another(self) -> bool:
        """Try to take a step that is no longer the current one."""
        return self._calls._take(self._thread, OpenStep(None))


class SteadyClock:
    """``std::chrono::steady_clock`` of a process that ``process_with_steady_clock`` started."""

    def __init__(self) -> None:
        self._now = 0
        self._advance_native = ctypes.CDLL(None).advance_steady_clock
        self._advance_native.argtypes = [ctypes.c_int64]

    def __call__(self) -> float:
        return self._now * 1e-9

    def advance(self, seconds: float) -> None:
        nanoseconds = round(seconds * 1e9)
        self._now += nanoseconds
        self._advance_native(nanoseconds)

    @contextlib.contextmanager
    def instead_of_perf_counter(self) -> Iterator[None]:
        """Replace Python's clock too.

        ``optimize`` would hang inside, because its readings do not advance this clock.
        """
        with mock.patch.object(time, "perf_counter", self):
            yield


CallWithSteadyClock: TypeAlias = Callable[[Callable[[SteadyClock], Any]], Any]


def _call(work: Callable[[SteadyClock], Any]) -> Any:
    return work(SteadyClock())


@contextlib.contextmanager
def process_with_steady_clock(folder: Path) -> Iterator[CallWithSteadyClock]:
    """Start a process whose steady clock stands still, and yield a function that calls module-level work there."""
    library = folder / "steady_clock.so"
    subprocess.run(["g++", "-shared", "-fPIC", "-o", library, CLOCK], check=True)
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        with mock.patch.dict(os.environ, {"LD_PRELOAD": str(library)}):
            pool.submit(os.getpid).result(timeout=60)  # starts the process
        yield lambda work: pool.submit(_call, work).result(timeout=300)


@contextlib.contextmanager
def forgotten_warnings() -> Iterator[None]:
    """Reset the set of peaks that have caused a warning in this process, so that ``peaks`` warns of each peak again."""
    with mock.patch.object(peaks, "_warned", set()):
        yield


class SimulatedProducts:
    """Replacement of ``torch.matmul`` that computes nothing and takes simulated time.

    Attributes:
        flops_per_second: FLOP/s by size of the matrices, 1e12 by default.
        every_third: factor of the time of every third product.
        sizes: distinct sizes of the products, in order of their first product.
    """

    __module__ = "torch"  # trials would restore the sizes and the clock of a patch by others

    def __init__(self, clock: Clock) -> None:
        self.flops_per_second: dict[int, float] = {}
        self.every_third = 1.0
        self.sizes: list[int] = []
        self._clock = clock
        self._calls = 0

    def __call__(self, a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
        size = len(a)
        if size not in self.sizes:
            self.sizes.append(size)
        self._calls += 1
        slow = self.every_third if self._calls % 3 == 0 else 1.0
        self._clock.advance(slow * 2 * size**3 / self.flops_per_second.get(size, 1e12))
        return a if out is None else out


class Event:
    """Replacement of ``torch.cuda.Event`` on a simulated GPU. The test decides when the GPU reaches the event."""

    def __init__(self, gpu: SimulatedGpu) -> None:
        self._gpu = gpu
        self._at = 0.0

    def record(self, stream: object) -> None:
        assert not self._gpu.recording
        self._at = self._gpu.now

    def query(self) -> bool:
        self._gpu.asked()
        return self._at <= self._gpu.reached

    def elapsed_time(self, end: Event) -> float:
        assert max(self._at, end._at) <= self._gpu.reached
        return 1e3 * (end._at - self._at)


class SimulatedGpu:
    """Replacement of the current stream of ``torch.cuda`` and of the events recorded on this stream.

    Attributes:
        now: second at which the GPU finishes the queued work.
        reached: second up to which the GPU has worked.
        recording: whether a CUDA graph records the work.
        asked: function that each query of an event calls.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.reached = math.inf
        self.recording = False
        self.asked: Callable[[], object] = lambda: None

    @contextlib.contextmanager
    def patched_into_torch(self) -> Iterator[None]:
        with (
            mock.patch("torch.cuda.Event", self._event),
            mock.patch("torch.cuda.current_stream", return_value=None),
            mock.patch("torch.cuda.is_current_stream_capturing", self._is_recording),
        ):
            yield

    def _event(self, enable_timing: bool) -> Event:
        assert enable_timing
        return Event(self)

    def _is_recording(self) -> bool:
        return self.recording
