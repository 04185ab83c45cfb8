"""Simulated factors: changes of a step with known gains, alone and in combination."""

from __future__ import annotations

import math
import random
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from flatout.tuning.bench import LONG_UPDATE
from flatout.tuning.pairs import Noise, difference
from flatout.tuning.statistics import Factorial
from flatout.tuning.stopwatch import Block
from tests.noise.simulator import Machine, Scenario
from tests.noise.trials import noise_pairs, updates_per_block

LOG_GAINS = (0.47, 0.18, 0.13, 0.05, 0.03, 0.0, 0.0, -0.02, -0.10, -0.50)
"""True log gains of ten factors. The gains above 0 together give 2.36 times the speed."""


@dataclass
class Factors:
    """Simulated training with ten factors.

    Attributes:
        machine: runs the steps.
        step: seconds of a step on an idle core without any factor.
        gains: log gain of each factor.
        interactions: additional log gain of each pair of factors.
    """

    machine: Machine
    step: float
    gains: list[float]
    interactions: dict[tuple[int, int], float]

    @classmethod
    def drawn(cls, scenario: Scenario, step: float, seed: int, interaction: float = 0.0) -> Factors:
        """Return factors in random order.

        Args:
            scenario: noise of the machine.
            step: seconds of a step on an idle core without any factor.
            seed: seed of order, interactions and machine.
            interaction: standard deviation of interactions, relative to the geometric mean of both gains.
        """
        draw = random.Random(f"factors {seed}")
        gains = draw.sample(LOG_GAINS, len(LOG_GAINS))
        pairs = [(i, j) for i in range(len(gains)) for j in range(i)]
        together = {(i, j): interaction * draw.gauss(0, 1) * math.sqrt(abs(gains[i] * gains[j])) for i, j in pairs}
        return cls(Machine(scenario, seed), step, gains, together)

    def log_gain(self, on: Collection[int]) -> float:
        """Return the true log gain of a combination."""
        alone = sum(self.gains[i] for i in on)
        return alone + sum(each for (i, j), each in self.interactions.items() if i in on and j in on)

    @property
    def best(self) -> float:
        """Largest log gain of any combination."""
        count = len(self.gains)
        together = np.zeros((count, count))
        for pair, gain in self.interactions.items():
            together[pair] = gain
        on = np.arange(1 << count)[:, None] >> np.arange(count) & 1
        return float((on @ self.gains + ((on @ together) * on).sum(axis=1)).max())

    def block(self, on: Collection[int]) -> Block:
        """Return a block with these factors on."""
        step = self.step * math.exp(-self.log_gain(on))
        return self.machine.block(step, updates_per_block(self.step), warm_up=self.step <= LONG_UPDATE)


def decide(factors: Factors, seconds: float) -> list[int]:
    """Decide about factors as the tuner does: screen each factor, then time combinations until the time is up.

    Args:
        factors: the training.
        seconds: time for screening, combinations and the noise floor.

    Returns:
        Indices of the kept factors.
    """
    count = noise_pairs(factors.step, seconds)
    floor = [(factors.block([]), factors.block([])) for _ in range(count)]
    noise = Noise.of(floor, one_thread=factors.step <= LONG_UPDATE)
    statistic = noise.statistic(keeps_cpu_time=True)
    factorial = Factorial([[i] for i in range(len(factors.gains))], noise.floors[statistic])
    for i in range(len(factors.gains)):
        if factors.machine.wall > seconds:
            break
        old, new = factors.block([]), factors.block([i])
        factorial.add([i], [], difference((old, new), statistic))
    while factorial.open and factors.machine.wall < seconds:
        one, other = factorial.combinations()
        first, second = factors.block(one), factors.block(other)
        factorial.add(one, other, difference((second, first), statistic))
    factorial.close()
    return factorial.kept
