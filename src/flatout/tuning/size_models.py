"""Models of a step's time and memory by its number of samples, fitted to trial steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

NOISE = 0.03
"""Largest relative error of a model that explains the measured times."""


@dataclass(frozen=True)
class Probe:
    """Result of trial steps with one number of samples.

    Attributes:
        samples: samples per step.
        seconds: time of one step.
        bytes: peak memory of the training, or None if unknown.
    """

    samples: int
    seconds: float
    bytes: int | None

    @property
    def rate(self) -> float:
        """Samples per second."""
        return self.samples / self.seconds


@dataclass(frozen=True)
class Line:
    """Model of a step's time: ``overhead + cost * samples`` seconds."""

    overhead: float
    cost: float

    def rate(self, samples: int) -> float:
        """Return the samples per second of steps with ``samples`` samples."""
        return samples / (self.overhead + self.cost * samples)

    def samples(self, rate: float) -> float:
        """Return the number of samples that reach the rate, or infinity if no number does."""
        rest = 1 - rate * self.cost
        return rate * self.overhead / rest if rest > 0 else math.inf


@dataclass(frozen=True)
class RateCurve:
    """Model of the times of two or more probes: one line, or one line up to a cliff and one line above.

    Attributes:
        lines: line at each probe, by increasing size. All lines have the same overhead.
        cliff: number of probes below the cliff, 0 without a cliff.
        error: largest relative error of a time.
    """

    lines: tuple[Line, ...]
    cliff: int
    error: float

    @property
    def is_line(self) -> bool:
        """True if one line explains all times."""
        return not self.cliff and self.error <= NOISE

    @classmethod
    def through(cls, probes: Sequence[Probe]) -> RateCurve:
        """Return one line if it explains the probes, given by increasing size, else the closest curve."""
        line = cls._fitted(probes, 0)
        if line.is_line:
            return line
        curves = (cls._fitted(probes, cliff) for cliff in range(1, len(probes)))
        return min([line, *(c for c in curves if 0 < c.lines[0].cost <= c.lines[-1].cost)], key=lambda c: c.error)

    @classmethod
    def _fitted(cls, probes: Sequence[Probe], cliff: int) -> RateCurve:
        """Return the curve with this cliff that minimizes the sum of squared relative errors."""
        samples = np.array([probe.samples for probe in probes])
        seconds = np.array([probe.seconds for probe in probes])
        before = np.arange(len(probes)) < cliff
        costs = [samples * before, samples * ~before] if cliff else [samples]
        has_overhead = len(probes) > len(costs)  # one time on each side of a cliff does not determine the overhead
        overhead, *found = _weights(np.stack([np.full(len(probes), has_overhead), *costs], 1) / seconds[:, None])
        lines = tuple(Line(overhead, found[0] if i < cliff else found[-1]) for i in range(len(probes)))
        errors = [abs(probe.rate / line.rate(probe.samples) - 1) for probe, line in zip(probes, lines, strict=True)]
        return cls(lines, cliff, max(errors))


def _weights(terms: np.ndarray) -> list[float]:
    """Return the weights >= 0 of the columns of ``terms`` [rows, columns] that bring each row's sum closest to 1."""
    weights = np.zeros(terms.shape[1])
    used = list(range(len(weights)))
    while (found := np.linalg.lstsq(terms[:, used], np.ones(len(terms)), rcond=None)[0]).min() < 0:
        del used[found.argmin()]
    weights[used] = found
    return weights.tolist()


def memory_estimate(points: Sequence[tuple[int, int]], *, steep: bool = False) -> Callable[[int], Fraction]:
    """Return a cautious estimate of the bytes by size, for sizes above the largest point.

    The estimate is the steepest of three curves: the line through the last two points, the line through the first
    and the last point, and the parabola through all three.

    Args:
        points: two or more ``(samples, bytes)``, by increasing size.
        steep: assume quadratic growth between two points.
    """
    first, (samples, _), (largest, largest_bytes) = points[0], *points[-2:]
    slope = max(Fraction(0), _slope(points[-2], points[-1]), _slope(first, points[-1]))
    bend = Fraction(0)
    if len(points) > 2:
        bend = max(bend, (_slope(points[-2], points[-1]) - _slope(first, points[-2])) / (largest - first[0]))
    elif steep:
        bend = slope / largest
    return lambda n: largest_bytes + (n - largest) * (slope + bend * (n - samples))


def _slope(one: tuple[int, int], other: tuple[int, int]) -> Fraction:
    return Fraction(other[1] - one[1], other[0] - one[0])
