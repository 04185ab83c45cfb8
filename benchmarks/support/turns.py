"""Training loops that take turns, and the activity of a GPU while one loop runs alone."""

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
"""Longest window of NVML's utilization, in seconds. Earlier samples include the loop that ran before."""


class Lane:
    """Training loop with separate backend flags and random numbers.

    The first turn begins with the state at the creation of the lane. Each later turn begins with the state at the end
    of the last turn.

    Args:
        name: name of the loop.
        steps: generator that trains a step and yields its number of samples.
    """

    def __init__(self, name: str, steps: Iterator[int]) -> None:
        self.name = name
        self._timed = TimedSteps(steps)
        self._state = Snapshot.capture([])

    def turn(self, seconds: float) -> float:
        """Take a turn. See ``TimedSteps.turn``."""
        self._state.restore()
        rate = self._timed.turn(seconds)
        self._state = Snapshot.capture([])
        return rate

    def close(self) -> None:
        """End the loop and its workers."""
        self._timed.close()


class LaneApart:
    """Lane in a separate process, with a separate heap, separate threads and separate compiled code.

    The compiler starts with an empty cache. The loop is warm after the constructor.

    Args:
        name: name of the loop.
        make: makes the steps and facts about them. It must be a function of a module.
        args: arguments of ``make``, which the process calls.
        python: another interpreter, which may import another flatout.
        environment: variables for this process alone.

    Attributes:
        told: the facts that ``make`` returned.
        setup_seconds: time from the start of the process to the first timed step, with imports, data, compilation and
            tuning.
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
        path = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2]), *(sys.path if python is None else [])]
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
        """Take a turn. See ``TimedSteps.turn``."""
        self._pipe.send(seconds)
        return self._pipe.recv()

    def close(self) -> None:
        """End the loop and the process."""
        with contextlib.suppress(BrokenPipeError):
            self._pipe.send(None)
        self._process.wait()
        self._folder.cleanup()


Rates = dict[str, list[float]]


def take_turns(
    lanes: Sequence[Lane | LaneApart],
    rounds: int,
    seconds: float,
    after_round: Callable[[Rates], object] = lambda rates: None,
) -> Rates:
    """Return the samples per second of each lane in each round. Each round has a new random order.

    Args:
        lanes: the lanes.
        rounds: number of turns of each lane.
        seconds: duration of a turn.
        after_round: receives the rates so far after each round.
    """
    rates: Rates = {lane.name: [] for lane in lanes}
    order = random.Random(0)
    for _ in range(rounds):
        for lane in order.sample(lanes, len(lanes)):
            rates[lane.name].append(lane.turn(seconds))
        after_round(rates)
    return rates


def fastest(rates: Rates) -> str:
    """Return the name of the lane with the highest median rate."""
    return max(rates, key=lambda name: statistics.median(rates[name]))


def ratio(rates: Rates, one: str, other: str) -> float:
    """Return the speed of ``one`` relative to ``other``: the median over rounds of the ratio within a round."""
    return statistics.median(a / b for a, b in zip(rates[one], rates[other], strict=True))


@contextlib.contextmanager
def closing(lanes: Sequence[Lane | LaneApart]) -> Iterator[None]:
    """Close the lanes after the block, and restore the state of the process."""
    state = Snapshot.capture([])
    try:
        yield
    finally:
        for lane in lanes:
            lane.close()
        state.restore()


@dataclass(frozen=True)
class Alone:
    """Figures of a lane that ran alone: medians of NVML's samples, or None without a GPU.

    Attributes:
        samples_per_second: rate by the host's clock.
        utilization: share of the time in which any kernel ran, from 0 to 1.
        lowest_utilization: lowest utilization of all samples.
        tensor_active: share of the time in which tensor cores worked, from 0 to 1.
        power_watts: power in watts.
        sm_clock_mhz: clock of the SMs in MHz.
        throttle: all reasons that reduced the clocks at any time.
        no_gpu: reason why there are no samples of a GPU; None if there are.
    """

    samples_per_second: float
    utilization: float | None
    lowest_utilization: float | None
    tensor_active: float | None
    power_watts: float | None
    sm_clock_mhz: float | None
    throttle: tuple[str, ...]
    no_gpu: str | None


def alone(lane: Lane, seconds: float) -> Alone:
    """Run a warm lane for ``SETTLING_SECONDS`` and about ``seconds`` more, and observe the GPU in the latter part."""
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
        utilization=_median(busy),
        lowest_utilization=min(busy, default=None),
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
