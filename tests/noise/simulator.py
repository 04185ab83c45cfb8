"""Simulator of step times on noisy machines, with known true gains.

A :class:`Machine` converts the work of training steps, in seconds on an idle core, to wall time and CPU time. The
training has one thread on two cores. Other busy processes take time slices of about 3 ms and increase its CPU time.
Further noise comes from stalls, a random walk and a trend of the clock, garbage collection, heavy tails and thermal
throttling.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from flatout.tuning.block import Block

CORES = 2
SLICE = 0.003
"""Mean time slice of the scheduler, in seconds."""

SHARE_SECONDS = 0.5
"""Seconds between changes of the training's share of the cores, if other processes are busy."""

SLOWEST = 4.0
"""Largest factor of step times by drift. Without a bound, slower steps give drift more time and never end."""

LAYOUT = 0.003
"""Standard deviation, in log time, between blocks whose tensors lie at different memory addresses."""


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
        pause_every: seconds between garbage collections; 0 without any.
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


class Machine:
    """Simulated machine whose clocks advance with the work of training steps.

    Attributes:
        wall: wall time since the start, in seconds.
        cpu: CPU time of the training, in seconds.
    """

    def __init__(self, scenario: Scenario, seed: int) -> None:
        self.wall = self.cpu = 0.0
        self._scenario = scenario
        self._random = random.Random(seed)
        self._busy = scenario.busy
        self._share = 1.0
        self._waits = 1.0
        """Number of processes that share a core."""
        self._speed = self._contention = 1.0
        self._speed_until = self._share_until = self._changes_at = 0.0
        self._busy_until = 0.0 if scenario.comes_and_goes else math.inf
        self._slice_left = self._slices(SLICE)
        self._next_stall = self._interval(scenario.stalls)
        self._next_pause = scenario.pause_every * self._random.random() or math.inf
        self._stalls_at = min(self._next_stall, self._next_pause)
        self._phase = 6 * self._random.random()

    def work(self, seconds: float) -> None:
        """Advance both clocks by a step of ``seconds`` on an idle core."""
        scenario, draw = self._scenario, self._random
        if scenario.tail and draw.random() < scenario.tail:
            seconds *= draw.paretovariate(1.5)
        left = seconds * math.exp(draw.gauss(0.0, scenario.jitter))
        if self._busy > 1:
            left *= 1 + scenario.contention * draw.random()
        while left > 0:
            if self.wall >= self._changes_at:
                self._change()
            waits = self._waits
            chunk = min(left, 0.05)
            if waits > 1 and chunk > self._slice_left:
                chunk = self._slice_left if left < 0.05 else chunk
            took = chunk * self._speed * self._contention
            if scenario.throttled != 1 and (self.wall + self._phase) % 6 < 3:
                took *= scenario.throttled
            self.cpu += took
            self.wall += took
            left -= chunk
            if waits > 1:
                self._slice_left -= chunk
                if self._slice_left <= 1e-12:
                    self._preempt(waits)
            if self.wall >= self._stalls_at:
                self._stall()

    def _change(self) -> None:
        """Update speed and load."""
        scenario, draw = self._scenario, self._random
        while self.wall >= self._speed_until:
            drift = draw.gauss(0.0, scenario.walk * math.sqrt(0.1)) + scenario.trend * 0.1
            self._speed = min(SLOWEST, self._speed * math.exp(drift))
            self._contention = 1 + scenario.contention * draw.random() * (self._busy > 1)
            self._speed_until += 0.1
        while self.wall >= self._share_until:
            self._share = math.exp(draw.gauss(0.0, 0.25))
            self._share_until += SHARE_SECONDS
        while self.wall >= self._busy_until:
            self._busy = draw.choice((0, 0, 2, 4, 8))
            self._busy_until += draw.expovariate(0.5)
        self._waits = max(1.0, (self._busy + 1) / CORES * self._share) if self._busy > 1 else 1.0
        self._changes_at = min(self._speed_until, self._share_until, self._busy_until)

    def _preempt(self, waits: float) -> None:
        """Wait for the slices of other processes, at the end of a slice or of several."""
        slices = 1 - self._slice_left / SLICE
        self.wall += self._slices(SLICE * (waits - 1), slices)
        if self._scenario.refill:
            refill = self._random.gammavariate(slices, self._scenario.refill)  # exponential for one slice
            self.wall += refill
            self.cpu += refill
        self._slice_left = self._slices(SLICE)

    def _stall(self) -> None:
        """Wait for the stalls and garbage collections that are due."""
        scenario = self._scenario
        while self.wall >= self._next_stall:
            self.wall += self._random.expovariate(1 / scenario.stall_seconds)
            self._next_stall += self._interval(scenario.stalls)
        while self.wall >= self._next_pause:
            self.wall += scenario.pause_seconds
            self.cpu += scenario.pause_seconds
            self._next_pause += scenario.pause_every
        self._stalls_at = min(self._next_stall, self._next_pause)

    def _slices(self, mean: float, count: float = 1.0) -> float:
        """Return the sum of ``count`` times with a gamma distribution of shape 4."""
        if count != 1:
            return self._random.gammavariate(4 * count, mean / 4)
        draw = self._random.random  # the sum of four exponentials is faster than ``gammavariate``
        return -mean / 4 * math.log((1 - draw()) * (1 - draw()) * (1 - draw()) * (1 - draw()))

    def _interval(self, rate: float) -> float:
        return self._random.expovariate(rate) if rate else math.inf

    def block(self, step: float, updates: int, *, warm_up: bool = True) -> Block:
        """Return the times of ``updates`` updates of ``step`` seconds, after an untimed one if ``warm_up``."""
        step *= math.exp(self._random.gauss(0.0, LAYOUT))
        if warm_up:
            self.work(step)
        walls, before = [], self.cpu
        for _ in range(updates):
            start = self.wall
            self.work(step)
            walls.append(self.wall - start)
        return Block(tuple(walls), (self.cpu - before) / updates, waits=0)
