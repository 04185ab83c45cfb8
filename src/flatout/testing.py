"""Speed tests for pytest: one function against another in a paired race, with a confidence interval.

    def test_speed(flatout_race):
        flatout_race(before, after).at_least(1.2)

The fixture is registered with pytest when flatout is installed.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable

import torch

from flatout.core.formatting import counted
from flatout.report.model import Gain
from flatout.tuning.pairs import Measure, measure_pairs
from flatout.tuning.statistics import GainSequence, NoiseFloor
from flatout.tuning.stopwatch import timed_block

__all__ = ["PairedRace"]

WARMUP_CALLS = 3
"""Calls of each function before the first timed one."""

BLOCK_SECONDS = 0.1
"""Shortest time of the calls of a function that are timed together."""

NOISE_PAIRS = 4
"""Number of pairs of ``before`` with itself, which show the noise of the machine."""

FEWEST_PAIRS = 5
"""Number of pairs before any verdict."""


class PairedRace:
    """Race of two functions that do the same work.

    Blocks of calls alternate in pairs of random order, so that a machine that slows down slows both. The time of a
    block is its mean. The interval is the time-uniform 95 % interval that ``flatout.optimize`` decides with. It is
    valid at any number of pairs, so a race ends as soon as the interval answers the question.

    Args:
        before: runs one unit of work, such as a training step. All calls count alike, and none has an argument.
        after: runs the same work in the way to test.
        seconds: time limit of the race, after the warm-up.
        record: gets the result as a line of text.

    Attributes:
        pairs: number of pairs so far.
        block_seconds: seconds of a call of ``before`` and of ``after``, one tuple for each pair.

    Raises:
        ValueError: ``seconds`` is not positive.
    """

    def __init__(
        self,
        before: Callable[[], object],
        after: Callable[[], object],
        *,
        seconds: float = 20.0,
        record: Callable[[str], None] = lambda text: None,
    ) -> None:
        if not seconds > 0:
            raise ValueError(f"seconds must be > 0, got {seconds}")
        self.pairs = 0
        self.block_seconds: list[tuple[float, float]] = []
        self._before, self._after = before, after
        self._seconds, self._taken = seconds, 0.0
        self._record = record
        self._sequence: GainSequence | None = None

    @property
    def gain(self) -> Gain:
        """Speed of ``after`` relative to ``before``, with the ends of its 95 % interval; NaN before the first pair."""
        if self._sequence is None:
            return Gain(math.nan)
        low, high = self._sequence.interval
        return Gain(math.exp(self._sequence.mean), math.exp(low), math.exp(high))

    def at_least(self, factor: float) -> None:
        """Assert that ``after`` is at least ``factor`` times as fast as ``before``.

        The test is skipped, with the interval as the reason, if the time limit comes before the interval lies on one
        side of ``factor``. The machine is too noisy then, or the true ratio is too close to ``factor``.

        Args:
            factor: ratio of speeds: 1.2 for 20 % more calls per second, 0.97 for "no more than 3 % slower".

        Raises:
            AssertionError: ``after`` is not that fast.
            ValueError: ``factor`` is not positive.
        """
        import pytest

        __tracebackhide__ = True  # pytest shows the line of the test
        if not 0 < factor < math.inf:
            raise ValueError(f"factor must be > 0 and finite, got {factor}")
        self._race(lambda gain: not gain.low < factor <= gain.high)
        gain = self.gain
        self._record(f"{self}, required {factor:g}×")
        if gain.low >= factor:
            return
        if gain.high < factor:
            raise AssertionError(f"after must be at least {factor:g} times as fast as before, got {self}")
        pytest.skip(f"the machine is too noisy to tell {factor:g}×, got {self}. Give a larger seconds=")

    def measure(self, width: float = 0.05) -> Gain:
        """Race until the interval is narrow or the time is up, and return the gain.

        Args:
            width: largest width of the interval, relative to its lower end: 0.05 for 1.00 to 1.05.

        Raises:
            ValueError: ``width`` is not positive.
        """
        if not width > 0:
            raise ValueError(f"width must be > 0, got {width}")
        self._race(lambda gain: gain.high <= gain.low * (1 + width))
        return self.gain

    def __str__(self) -> str:
        ends = self.gain.interval
        interval = "too few pairs for an interval" if ends is None else f"{ends[0]:.2f} to {ends[1]:.2f}"
        return f"{self.gain.ratio:.2f}× ({interval}) in {counted(self.pairs, 'pair')} and {self._taken:.1f} s"

    def _race(self, is_answered: Callable[[Gain], bool]) -> None:
        """Add pairs until the interval answers the question, or the time is up."""
        for _, work in itertools.product(range(WARMUP_CALLS), (self._before, self._after)):
            work()
        device = torch.device("cuda" if torch.cuda.is_initialized() else "cpu")
        calls = math.ceil(BLOCK_SECONDS / timed_block(lambda _: self._before(), range(1), device).mean)

        def measured(work: Callable[[], object]) -> Measure:
            return lambda i: timed_block(lambda _: work(), range(calls), device)

        begun = time.perf_counter()
        if self._sequence is None:
            noise = itertools.islice(measure_pairs(measured(self._before), measured(self._before)), NOISE_PAIRS)
            self._sequence = GainSequence(NoiseFloor.of([math.log(one.mean / other.mean) for one, other in noise]))
        for old, new in measure_pairs(measured(self._before), measured(self._after)):
            self._sequence.add(math.log(old.mean / new.mean))
            self.pairs += 1
            self.block_seconds.append((old.mean, new.mean))
            if self.pairs >= FEWEST_PAIRS and is_answered(self.gain):
                break
            if time.perf_counter() - begun > self._seconds:
                break
        self._taken += time.perf_counter() - begun
