"""Training loops that take turns, and what a GPU does while one of them runs alone."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from support.loops import DEVICE
from support.timed_steps import TimedSteps

from flatout.core.snapshot import Snapshot
from flatout.monitor import GpuSample, Sample, Sampler

SETTLING_SECONDS = 1.0
"""NVML's utilisation is a mean over up to so long: samples before that tell of what ran before."""


class Lane:
    """A training loop whose backend flags and random numbers are its own: those at its making, then as it left them.

    Args:
        name: what it is called.
        steps: trains a step and yields its samples.
    """

    def __init__(self, name: str, steps: Iterator[int]) -> None:
        self.name = name
        self._timed = TimedSteps(steps)
        self._state = Snapshot.capture([])

    def turn(self, seconds: float) -> float:
        """As ``TimedSteps.turn``."""
        self._state.restore()
        rate = self._timed.turn(seconds)
        self._state = Snapshot.capture([])
        return rate

    def close(self) -> None:
        """End the loop, and with it its workers."""
        self._timed.close()


class LaneApart:
    """A lane in a process of its own, whose heap, threads and compiled code are its own as well.

    Its compiler starts from an empty cache. The loop is warm when the lane is made.

    Args:
        name: what it is called.
        make: makes the steps, and something to tell of them; a function of a module.
        args: what ``make`` is called with, in the process.
        python: another interpreter, with a flatout of its own.
        environment: variables for this process alone.

    Attributes:
        told: what ``make`` had to tell.
        setup_seconds: from the start of the process to the first timed step: imports, data, compilation, tuning.
    """

    def __init__(
        self,
        name: str,
        make: Callable[..., tuple[Iterator[int], Any]],
        *args: Any,
        python: str | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        path = [str(Path(__file__).parents[1]), *(sys.path if python is None else [])]
        variables = {"TORCHINDUCTOR_CACHE_DIR": self._folder.name, "PYTHONPATH": os.pathsep.join(path)}
        self._pipe, theirs = multiprocessing.Pipe()
        begun = time.perf_counter()
        self._process = subprocess.Popen(
            [python or sys.executable, "-m", "support.lane_process", str(theirs.fileno()), str(os.getpid())],
            env={**os.environ, **variables, **(environment or {})},
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        self._pipe.send((make, args))
        self.told = self._pipe.recv()
        self.setup_seconds = time.perf_counter() - begun

    def turn(self, seconds: float) -> float:
        """As ``TimedSteps.turn``."""
        self._pipe.send(seconds)
        return self._pipe.recv()

    def close(self) -> None:
        """End the loop, and with it the process."""
        with contextlib.suppress(BrokenPipeError):
            self._pipe.send(None)
        self._process.wait()
        self._folder.cleanup()


Rates = dict[str, list[float]]


def take_turns(lanes: Sequence[Lane | LaneApart], rounds: int, seconds: float) -> Rates:
    """Samples per second of each, round by round, in an order drawn anew for each."""
    rates: Rates = {lane.name: [] for lane in lanes}
    order = random.Random(0)
    for _ in range(rounds):
        for lane in order.sample(lanes, len(lanes)):
            rates[lane.name].append(lane.turn(seconds))
    return rates


def fastest(rates: Rates) -> str:
    """The lane with the highest median."""
    return max(rates, key=lambda name: statistics.median(rates[name]))


def ratio(rates: Rates, one: str, other: str) -> float:
    """How many times as fast as ``other`` ``one`` is: the median over rounds, within each of which both ran."""
    return statistics.median(a / b for a, b in zip(rates[one], rates[other], strict=True))


@contextlib.contextmanager
def closing(lanes: Sequence[Lane | LaneApart]) -> Iterator[None]:
    """Ends the lanes, and leaves the process as it was."""
    state = Snapshot.capture([])
    try:
        yield
    finally:
        for lane in lanes:
            lane.close()
        state.restore()


@dataclass(frozen=True)
class Alone:
    """What a lane did while no other ran; medians of NVML's samples, None without a GPU.

    Attributes:
        samples_per_second: by the host's clock.
        utilisation: 0..1, the time in which any kernel ran.
        lowest_utilisation: of all samples.
        tensor_active: 0..1, the time in which tensor cores worked.
        power_watts: drawn.
        sm_clock_mhz: of the SMs.
        throttle: what held the clocks down at any time.
        no_gpu: why there are none of these.
    """

    samples_per_second: float
    utilisation: float | None
    lowest_utilisation: float | None
    tensor_active: float | None
    power_watts: float | None
    sm_clock_mhz: float | None
    throttle: tuple[str, ...]
    no_gpu: str | None


def alone(lane: Lane, seconds: float) -> Alone:
    """Runs a lane that is warm for about so long after a second, and watches the GPU meanwhile."""
    seen: list[Sample] = []
    with Sampler(seen.append, interval=0.2):
        begun = time.time()
        rate = lane.turn(SETTLING_SECONDS + seconds)
        ended = time.time()
    device = torch.cuda.current_device() if DEVICE.type == "cuda" else None
    during = [sample for sample in seen if begun + SETTLING_SECONDS < sample.time < ended]
    gpus = [gpu for sample in during for gpu in sample.gpus if gpu.cuda_index == device]
    busy = _values(gpus, "util_percent", 0.01)
    return Alone(
        samples_per_second=rate,
        utilisation=_median(busy),
        lowest_utilisation=min(busy, default=None),
        tensor_active=_median(_values(gpus, "tensor_active_percent", 0.01)),
        power_watts=_median(_values(gpus, "power_watts")),
        sm_clock_mhz=_median(_values(gpus, "sm_clock_mhz")),
        throttle=tuple(sorted({reason for gpu in gpus for reason in gpu.throttle or ()})),
        no_gpu=None if gpus else next((sample.no_gpu for sample in seen if sample.no_gpu), "it was too short"),
    )


def _values(gpus: Sequence[GpuSample], field: str, scale: float = 1.0) -> list[float]:
    read: list[Any] = [getattr(gpu, field) for gpu in gpus]
    return [scale * value for value in read if value is not None]


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None
