"""Trials and races on a simulated machine, decided by the tuner's rules, without a clock."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice

from flatout.report.model import Statistic
from flatout.tuning.bench import (
    LONG_UPDATE,
    MOST_NOISE_PAIRS,
    SHARE,
    STRETCH_SECONDS,
)
from flatout.tuning.budget import BLOCK_SECONDS
from flatout.tuning.pairs import MOST_PAIRS, Noise, Pair, PairedTrial, difference, measure_pairs
from flatout.tuning.statistics import FEWEST_PAIRS, NoiseFloor
from flatout.tuning.stopwatch import Block
from tests.noise.simulator import Machine, Scenario

BUDGET = 60.0
"""Seconds of the budget that a trial is part of, the default of long trainings."""

FEWEST_STRETCH, MOST_STRETCH = 4, 50
"""Limits of the number of updates of a stretch, except for long updates."""


@dataclass(frozen=True)
class Cell:
    """Setting of simulated trials.

    Attributes:
        scenario: noise of the machine.
        step: seconds of an update of the baseline on an idle core.
        gain: true speed of the candidate relative to the baseline.
        limit: seconds after which a trial ends undecided.
    """

    scenario: Scenario
    step: float
    gain: float
    limit: float

    @property
    def updates(self) -> int:
        """Number of updates of a block."""
        return updates_per_block(self.step)

    @property
    def stretch(self) -> int:
        """Number of updates of a stretch of training, which a race compares."""
        fewest = 1 if self.is_long else FEWEST_STRETCH
        return min(MOST_STRETCH, max(fewest, math.ceil(STRETCH_SECONDS / self.step)))

    @property
    def is_long(self) -> bool:
        """True if an update is so long that no untimed update precedes a block."""
        return self.step > LONG_UPDATE

    def pairs(self, machine: Machine, gain: float) -> Iterator[Pair]:
        """Yield pairs without end."""
        old, new = (partial(self._block, machine, self.step / each) for each in (1.0, gain))
        return measure_pairs(old, new)

    def stretches(self, machine: Machine, *, alternates: bool) -> Iterator[Pair]:
        """Yield pairs of stretches without end. Only the mean time of a stretch is known."""
        old, new = (partial(self._stretch, machine, self.step / each) for each in (1.0, self.gain))
        return measure_pairs(old, new, alternates=alternates)

    def _block(self, machine: Machine, step: float, _: int) -> Block:
        return machine.block(step, self.updates, warm_up=not self.is_long)

    def _stretch(self, machine: Machine, step: float, _: int) -> Block:
        block = machine.block(step, self.stretch, warm_up=not self.is_long)
        return Block((block.mean,), block.cpu)


@dataclass(frozen=True)
class Result:
    """Result of a simulated trial.

    Attributes:
        verdict: verdict on the pairs.
        pairs: number of pairs until the verdict.
        seconds: wall time of these pairs.
        low: lower end of the interval of the gain.
        high: upper end.
    """

    verdict: str
    pairs: int
    seconds: float
    low: float
    high: float


@dataclass(frozen=True)
class Race:
    """Simulated race of the tuned loop against the original.

    Attributes:
        differences: log ratio of both times in each pair.
        floor: noise floor of the same statistic.
    """

    differences: list[float]
    floor: NoiseFloor


def updates_per_block(step: float) -> int:
    """Return the number of updates in a block for the seconds of an update."""
    return max(1, round(BLOCK_SECONDS / step))


def noise_pairs(step: float, budget: float) -> int:
    """Return the number of pairs of the baseline with itself.

    Args:
        step: seconds of an update.
        budget: seconds for all trials.
    """
    if step > LONG_UPDATE:
        return FEWEST_PAIRS
    pair_seconds = 2 * (updates_per_block(step) + 1) * step
    return max(FEWEST_PAIRS, int(min(MOST_NOISE_PAIRS, SHARE * budget / pair_seconds)))


def noise_of(cell: Cell, machine: Machine) -> Noise:
    """Measure the noise floor of a cell. The tuner compares long updates by wall time only."""
    pairs = islice(cell.pairs(machine, 1.0), noise_pairs(cell.step, BUDGET))
    return Noise.of(list(pairs), one_thread=not cell.is_long)


def trial(cell: Cell, seed: int, *, keeps_cpu_time: bool = True) -> Result:
    """Repeat a trial until its verdict, or until the time is up."""
    machine = Machine(cell.scenario, seed)
    paired = PairedTrial(noise_of(cell, machine), keeps_cpu_time=keeps_cpu_time)
    start = machine.wall
    for pair in cell.pairs(machine, cell.gain):
        paired.add(pair)
        took = machine.wall - start
        if paired.verdict != "undecided" or took > cell.limit or len(paired.pairs) == MOST_PAIRS:
            break
    gain = paired.gain
    return Result(paired.verdict, len(paired.pairs), took, gain.low, gain.high)


def races(cell: Cell, seed: int, pairs: int, *, alternates: bool = False) -> dict[Statistic, Race]:
    """Return one race by wall time and, where the tuner would choose it, by CPU time.

    Args:
        cell: setting of the race.
        seed: seed of the machine.
        pairs: number of pairs.
        alternates: as in ``measure_pairs``.
    """
    machine = Machine(cell.scenario, seed)
    noise = noise_of(cell, machine)
    measured = list(islice(cell.stretches(machine, alternates=alternates), pairs))
    floors: dict[Statistic, NoiseFloor] = {"wall": noise.mean}
    if noise.statistic(keeps_cpu_time=True) == "cpu":
        floors["cpu"] = noise.floors["cpu"]
    return {each: Race([difference(pair, each) for pair in measured], floor) for each, floor in floors.items()}
