"""Trials that decide factors together. A factor is a technique that turns on and off in less than a step."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from flatout.report.model import Gain, Trial
from flatout.techniques import Candidate, StepTechnique
from flatout.tuning.bench import Bench
from flatout.tuning.factorial import LATE, Factorial
from flatout.tuning.lockstep import failure_of
from flatout.tuning.noise import Pair, difference
from flatout.tuning.timing import Block

MOST_PAIRS = 100


@dataclass(frozen=True, eq=False)
class Factor:
    """Candidate that any combination may turn on.

    Attributes:
        techniques: one technique, or the two techniques of a pair.
        candidate: turns the factor on and off.
        pair: two blocks. The factor is on in the second block.
        instead_of: the factor that is on in the first block; None if none is.
        screened: record of its screening.
    """

    techniques: tuple[StepTechnique, ...]
    candidate: Candidate
    pair: Pair
    instead_of: Factor | None
    screened: Trial


class CombinationTrials:
    """Trials of combinations of factors.

    Args:
        bench: the training.
        groups: alternatives of each technique, of which a combination has at most one. All passed their screening.
    """

    def __init__(self, bench: Bench, groups: Sequence[Sequence[Factor]]) -> None:
        self._bench = bench
        self._factors = [factor for group in groups for factor in group]
        self._statistic = bench.noise.statistic(
            keeps_cpu_time=all(t.keeps_cpu_time for factor in self._factors for t in factor.techniques)
        )
        self._factorial = Factorial(groups, bench.noise.floors[self._statistic], ranks=bench.ranks)
        self._block = bench.blocks()

    def run(self, deadline: float) -> list[Factor]:
        """Try combinations until every factor is decided or the time is up, and return the factors that pay.

        Args:
            deadline: ``Agreement.now()`` after which no pair starts.
        """
        factorial = self._factorial
        for factor in self._factors:
            others = [] if factor.instead_of is None else [factor.instead_of]
            factorial.add([factor], others, difference(factor.pair, self._statistic))
        self._bench.rewind()
        for i in range(MOST_PAIRS):
            if not factorial.open or self._bench.ranks.now() > deadline:
                break
            one, other = factorial.combinations()
            try:
                with self._bench.ranks.attempt():
                    first, second = self._measure(one, i), self._measure(other, i)
            except Exception:  # each factor runs alone, so the combination is at fault, and open factors stay undecided
                break
            factorial.add(one, other, difference((second, first), self._statistic))
        self._bench.rewind()
        factorial.close()
        return [factor for factor in self._factors if factor in factorial.kept]

    def record(self, factor: Factor, baseline_ms: float) -> Trial:
        """Return the record of a factor for the report.

        Args:
            factor: one of the factors.
            baseline_ms: milliseconds of a step without the factor.
        """
        estimate = self._factorial.estimates()[factor]
        gain = Gain(math.exp(estimate.mean), math.exp(estimate.low(LATE)), math.exp(estimate.high(LATE)))
        return replace(
            factor.screened,
            baseline_ms=baseline_ms,
            candidate_ms=baseline_ms / gain.ratio,
            gain=gain,
            pairs=self._factorial.pairs_of(factor),
            failure=failure_of(self._bench.ranks, factor.candidate),
        )

    def _measure(self, on: Collection[Factor], i: int) -> Block:
        with ExitStack() as stack:
            for factor in self._factors:
                if factor in on:
                    stack.enter_context(factor.candidate)
            return self._block(i)
