"""Simulator of step times on noisy machines, with known true gains.

A :class:`Machine` converts the work of training steps, in seconds on an idle core, to wall time and CPU time. The
training has one thread on two cores. Other busy processes take time slices of about 3 ms and increase its CPU time.
Further noise comes from stalls, a random walk and a trend of the clock, garbage collection, heavy tails and thermal
throttling. The model is compiled from machine.cpp.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from functools import cache
from pathlib import Path

import pytest

from flatout.tuning.stopwatch import Block

SLICE = 0.003
"""Mean time slice of the scheduler, in seconds."""

SHARE_SECONDS = 0.5
"""Seconds between changes of the training's share of the cores, if other processes are busy."""

SLOWEST = 4.0
"""Largest factor of step times by drift. Without a bound, slower steps give drift more time and never end."""

LAYOUT = 0.003
"""Standard deviation, in log time, between blocks whose tensors have different memory addresses."""


@dataclass(frozen=True)
class Scenario:
    """Kind of noise.

    Attributes:
        jitter: standard deviation of the work of a step, in log time.
        busy: number of other busy processes.
        comes_and_goes: True if the number of busy processes changes about every two seconds, between 0 and 8.
        stalls: stalls per second.
        stall_seconds: mean duration of a stall.
        walk: standard deviation of the clock's random walk, in log time per square root of a second.
        trend: drift of the clock, in log time per second.
        contention: largest relative increase of the CPU time by busy processes, drawn for each step and each 0.1 s.
        refill: mean CPU time to refill the caches after a preemption, in seconds.
        pause_every: seconds between garbage collections, 0 without garbage collections.
        pause_seconds: duration of a garbage collection.
        tail: share of the steps whose time is multiplied by a Pareto-distributed factor.
        throttled: factor of step times in every other period of three seconds, as in thermal throttling.
    """

    jitter: float = 0.01
    busy: int = 0
    comes_and_goes: bool = False
    stalls: float = 0.3
    stall_seconds: float = 0.01
    walk: float = 0.002
    trend: float = 0.0
    contention: float = 0.0
    refill: float = 0.0
    pause_every: float = 0.0
    pause_seconds: float = 0.0
    tail: float = 0.0
    throttled: float = 1.0


_WITH_OTHERS = Scenario(jitter=0.02, stalls=0.5, walk=0.005, contention=0.15, refill=0.000075)

SCENARIOS: dict[str, Scenario] = {
    "quiet": Scenario(),
    "shared host": Scenario(jitter=0.025, walk=0.02),
    "jitter": Scenario(jitter=0.05, stalls=4, stall_seconds=0.02, walk=0.005),
    "drift": Scenario(jitter=0.02, stalls=0.5, walk=0.03, trend=0.01),
    "2 busy": Scenario(**(vars(_WITH_OTHERS) | {"busy": 2})),
    "4 busy": Scenario(**(vars(_WITH_OTHERS) | {"busy": 4})),
    "8 busy": Scenario(**(vars(_WITH_OTHERS) | {"busy": 8})),
    "come and go": Scenario(**(vars(_WITH_OTHERS) | {"comes_and_goes": True})),
    "garbage collection": Scenario(pause_every=0.25, pause_seconds=0.015),
    "heavy tails": Scenario(jitter=0.02, tail=0.05),
    "thermal steps": Scenario(jitter=0.02, throttled=1.2),
}


needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
"""Mark of tests that run a machine."""


@cache
def _library() -> ctypes.CDLL:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "machine.so"
        source = Path(__file__).with_name("machine.cpp")
        subprocess.run(["g++", "-std=c++20", "-O2", "-shared", "-fPIC", source, "-o", file], check=True)
        library = ctypes.CDLL(str(file))
    library.machine_bytes.restype = ctypes.c_int64
    library.machine_create.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64]
    library.machine_block.argtypes = [
        ctypes.c_void_p,
        ctypes.c_double,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_void_p,
    ]
    return library


class Machine:
    """Simulated machine whose clocks advance with the work of training steps.

    Args:
        scenario: noise of the machine.
        seed: seed of all random numbers.

    Attributes:
        wall: wall time since the start, in seconds.
        cpu: CPU time of the training, in seconds.
    """

    def __init__(self, scenario: Scenario, seed: int) -> None:
        self.wall = self.cpu = 0.0
        library = _library()
        self._block = library.machine_block
        self._memory = ctypes.create_string_buffer(library.machine_bytes())
        self._totals = (ctypes.c_double * 3)()
        fields = [float(field) for field in astuple(scenario)]
        constants = (SLICE, SHARE_SECONDS, SLOWEST, LAYOUT)
        library.machine_create(self._memory, _doubles(fields), _doubles(constants), seed)

    def block(self, step: float, updates: int, *, warm_up: bool = True) -> Block:
        """Return the times of ``updates`` updates of ``step`` seconds, after an untimed one if ``warm_up``."""
        walls = (ctypes.c_double * updates)()
        self._block(self._memory, step, updates, warm_up, walls, self._totals)
        cpu, self.wall, self.cpu = self._totals
        return Block(tuple(walls), cpu / updates, sleeps=0)


def _doubles(values: Sequence[float]) -> ctypes.Array[ctypes.c_double]:
    return (ctypes.c_double * len(values))(*values)
