"""Trials of switches: techniques that turn on and off in less than a step, decided together."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from flatout.report.model import Gain, Trial
from flatout.techniques import Candidate, StepTechnique
from flatout.tuning.bench import Bench
from flatout.tuning.block import Block
from flatout.tuning.factorial import LATE, Factorial
from flatout.tuning.noise import Pair, difference

MOST_PAIRS = 100


@dataclass(frozen=True, eq=False)
class Switch:
    """Candidate that any combination may turn on.

    Attributes:
        techniques: its technique, or the two techniques of a pair.
        candidate: turns it on and off.
        pair: blocks without and with it.
        looked: record of the first look at it.
    """

    techniques: tuple[StepTechnique, ...]
    candidate: Candidate
    pair: Pair
    looked: Trial


class SwitchTrials:
    """Trials of combinations of switches.

    Args:
        bench: the training.
        groups: alternatives of each technique, of which a combination has at most one. All passed their first look.
    """

    def __init__(self, bench: Bench, groups: Sequence[Sequence[Switch]]) -> None:
        self._bench = bench
        self._switches = [switch for group in groups for switch in group]
        self._statistic = bench.noise.statistic(
            keeps_cpu_time=all(t.keeps_cpu_time for switch in self._switches for t in switch.techniques)
        )
        self._factorial = Factorial(groups, bench.noise.floors[self._statistic])
        self._block = bench.blocks()

    def run(self, deadline: float) -> list[Switch]:
        """Try combinations until every switch is decided or the time is up, and return the switches that pay.

        Args:
            deadline: ``time.perf_counter()`` after which no pair starts.
        """
        factorial = self._factorial
        for switch in self._switches:
            factorial.add([switch], [], difference(switch.pair, self._statistic))
        self._bench.rewind()
        for i in range(MOST_PAIRS):
            if not factorial.open or time.perf_counter() > deadline:
                break
            one, other = factorial.combinations()
            try:
                first, second = self._measure(one, i), self._measure(other, i)
            except Exception:  # of a combination, whose switches run alone: those that are open stay undecided
                break
            factorial.add(one, other, difference((second, first), self._statistic))
        self._bench.rewind()
        factorial.close()
        return [switch for switch in self._switches if switch in factorial.kept]

    def record(self, switch: Switch, baseline_ms: float) -> Trial:
        """Return the record of a switch for the report.

        Args:
            switch: one of the switches.
            baseline_ms: milliseconds of a step without the switch.
        """
        estimate = self._factorial.estimates()[switch]
        gain = Gain(math.exp(estimate.mean), math.exp(estimate.low(LATE)), math.exp(estimate.high(LATE)))
        return replace(
            switch.looked,
            baseline_ms=baseline_ms,
            candidate_ms=baseline_ms / gain.ratio,
            gain=gain,
            pairs=self._factorial.pairs_of(switch),
            failure=switch.candidate.failure,
        )

    def _measure(self, on: Collection[Switch], i: int) -> Block:
        with ExitStack() as stack:
            for switch in self._switches:
                if switch in on:
                    stack.enter_context(switch.candidate)
            return self._block(i)
