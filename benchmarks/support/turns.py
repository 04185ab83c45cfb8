"""Training loops that take turns, and what a GPU does while one of them runs alone."""

from __future__ import annotations

import contextlib
import multiprocessing
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from support.loops import DEVICE

from flatout.core.snapshot import Snapshot
from flatout.monitor import GpuSample, Sample, Sampler
from flatout.tuning.timing import synchronize

WARM_UP_SECONDS = 0.5
SETTLING_SECONDS = 1.0
"""NVML's utilisation is a mean over up to so long: samples before that tell of what ran before."""


class Lane:
    """A training loop whose backend flags and random numbers are its own: those at its making, then as it left them.

    A turn is a number of steps, not of seconds: the host may be a thousand steps ahead of the device.

    Args:
        name: what it is called.
        steps: trains a step and yields its samples.
    """

    def __init__(self, name: str, steps: Iterator[int]) -> None:
        self.name = name
        self._steps = steps
        self._state = Snapshot.capture([])
        self._steps_per_second: float | None = None

    def turn(self, seconds: float) -> float:
        """Train for about so long, in the first turn after warming up; returns samples per second."""
        self._state.restore()
        if self._steps_per_second is None:
            self._steps_per_second = self._warm_up()
        steps = max(1, round(seconds * self._steps_per_second))
        samples, took = self._train(steps)
        self._steps_per_second = steps / took
        self._state = Snapshot.capture([])
        return samples / took

    def close(self) -> None:
        """End the loop, and with it its workers."""
        self._steps.close()  # type: ignore[attr-defined]

    def _warm_up(self) -> float:
        self._train(1)
        steps = 1
        while True:
            _, took = self._train(steps)
            if took > WARM_UP_SECONDS:
                return steps / took
            steps *= 2

    def _train(self, steps: int) -> tuple[int, float]:
        synchronize(DEVICE)
        begun = time.perf_counter()
        samples = sum(next(self._steps) for _ in range(steps))
        synchronize(DEVICE)
        return samples, time.perf_counter() - begun


class LaneApart:
    """A lane in a process of its own, whose heap, threads and compiled code are its own as well.

    Args:
        name: what it is called.
        make: makes the steps, and something to tell of them; a function of a module.
        args: what ``make`` is called with, in the process.

    Attributes:
        told: what ``make`` had to tell.
    """

    def __init__(self, name: str, make: Callable[..., tuple[Iterator[int], Any]], *args: Any) -> None:
        self.name = name
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_train, args=(theirs, name, make, args))
        self._process.start()
        theirs.close()
        self.told = self._pipe.recv()

    def turn(self, seconds: float) -> float:
        """As ``Lane.turn``."""
        self._pipe.send(seconds)
        return self._pipe.recv()

    def close(self) -> None:
        """End the loop, and with it the process."""
        self._pipe.send(None)
        self._process.join()


def _train(pipe: Any, name: str, make: Callable[..., tuple[Iterator[int], Any]], args: tuple[Any, ...]) -> None:
    steps, told = make(*args)
    lane = Lane(name, steps)
    pipe.send(told)
    while (seconds := pipe.recv()) is not None:
        pipe.send(lane.turn(seconds))
    lane.close()


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
