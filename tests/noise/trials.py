"""Trials on a simulated machine, decided by the tuner's rule, without a clock."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from flatout.tuning.block import Block
from flatout.tuning.noise import Noise, Pair
from flatout.tuning.trial import MOST_PAIRS, PairedTrial, measure_pairs
from tests.noise.simulator import Machine, Scenario

BLOCK_SECONDS = 0.02
LONG_UPDATE = 0.5


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
        return max(1, round(BLOCK_SECONDS / self.step))

    @property
    def is_long(self) -> bool:
        """True if an update is so long that no untimed update precedes a block."""
        return self.step > LONG_UPDATE

    def pairs(self, machine: Machine, gain: float) -> Iterator[Pair]:
        """Yield pairs without end."""
        old, new = (partial(self._block, machine, self.step / each) for each in (1.0, gain))
        return measure_pairs(old, new)

    def _block(self, machine: Machine, step: float, _: int) -> Block:
        return machine.block(step, self.updates, warm_up=not self.is_long)


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


def noise_of(cell: Cell, machine: Machine) -> Noise:
    """Measure the noise floor of a cell."""
    pairs = cell.pairs(machine, 1.0)
    return Noise.of([next(pairs) for _ in range(3 if cell.is_long else 8)], one_thread=True)


def trial(cell: Cell, seed: int) -> Result:
    """Run a trial until its verdict, or until the time is up."""
    machine = Machine(cell.scenario, seed)
    paired = PairedTrial(noise_of(cell, machine))
    start = machine.wall
    for pair in cell.pairs(machine, cell.gain):
        paired.add(pair)
        took = machine.wall - start
        if paired.verdict != "undecided" or took > cell.limit or len(paired.pairs) == MOST_PAIRS:
            break
    gain = paired.gain
    return Result(paired.verdict, len(paired.pairs), took, gain.low, gain.high)
