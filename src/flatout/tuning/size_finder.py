"""The fastest number of samples to compute at once, found in few trial steps and (almost) without an out-of-memory."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

import numpy as np

from flatout.core import formatting

WITHIN = 0.02
"""Rates that differ by less are as good as each other."""
NOISE = 0.03
"""How far a line may miss the times that it explains."""
_FURTHEST = 8
"""The largest factor from a size that was tried to the next one up or down."""
_CHEAPER = 0.75
"""What a sample may cost below a cliff that has not shown yet, as a share of what it costs above."""
_SLOWEST = 0.85
"""Share of the best rate down to which the overhead may pull a size that is tried in search of such a cliff."""
_SPARE = 0.9
"""Share that is used of the room which a size that was too large leaves."""


@dataclass(frozen=True)
class Probe:
    """What trial steps with so many samples showed."""

    samples: int
    seconds: float
    """Of one step."""
    bytes: int | None
    """Memory of all of training at the step's height; None where nobody counts."""

    @property
    def rate(self) -> float:
        """Samples per second."""
        return self.samples / self.seconds


@dataclass(frozen=True)
class Found:
    """What :func:`find` found."""

    samples: int | None
    """The choice; None where no size that was tried fits."""
    probes: tuple[Probe, ...]
    """In the order taken; with one that was over the limit."""
    too_large: int | None
    """The smallest size that ran out of memory or was over the limit when tried, if one did."""
    fits: int
    """The largest size that memory is expected to hold, up to ``largest``; 0 where nothing fitted."""
    reason: str
    """Why this and no other, in one sentence."""


def find(
    probe: Callable[[int], Probe | None],
    *,
    start: int,
    smallest: int = 1,
    largest: int,
    limit: float | None,
    resident: int = 0,
    most_probes: int = 6,
) -> Found:
    """Find the fastest number of samples to compute at once.

    *Speed.* A step takes about ``overhead + cost * samples`` seconds, so its rate rises with the samples until the
    overhead hardly counts. Where samples outgrow a cache, each costs more from there on: a cliff, below which is
    fastest. The search goes from ``start`` to twice as many samples; up, as far as the line through the times promises
    a gain, but at most eightfold at once (twofold where nothing is known of memory); into the gap between two sizes
    where times leave the line; and where neither promises anything, down, because a cliff may lie below ``start``. Of
    the sizes within ``WITHIN`` of the best rate it chooses the nearest to ``start``, in ratio. The rates are those of
    the line, or of the lines on both sides of one cliff, where these miss no time by more than ``NOISE``, else those
    measured.

    *Memory.* No size is tried that is expected to take more than ``limit``: by the line from ``resident`` to the
    largest size that fitted, by the line through the two largest, or by the parabola through all three. When a size
    was too large, those between it and the largest that fitted are tried only with room to spare: by the line between
    the two where both were counted, else by that parabola, and as if all growth were quadratic before there is one.

    What is promised, with six probes, times without noise and bytes that are counted, is at least 95 % of the best
    rate of all sizes that fit:

    * where times are on a line;
    * where a sample costs at least half as much again from one size on, which is between ``start / 4`` and
      ``16 * start``, and the overhead is at most a twentieth of the time there.

    Noise may cost its own size, and may hide a cliff. Not promised, though mostly reached: cliffs that are lower,
    gradual, further away, several, or near the knee, and rates that go up and down, as where the last blocks leave
    most of a GPU idle. The choice is then the best of what was tried, ``start`` included.

    Where ``start`` fits and memory grows steadily, at most as the square of the samples, at most one size is too
    large; none where it grows in proportion. Memory that jumps from one size to the next may end more often, and so
    may sizes below a ``start`` that does not fit, where nobody counts bytes or more than ``resident`` stays.

    Args:
        probe: takes trial steps with so many samples and returns what they showed; None where memory ended, and was
            recovered. It is called at most ``most_probes`` times, never twice with one size: with ``start``,
            ``largest``, sizes below 8 and multiples of 8.
        start: the user's own size; tried first.
        smallest: the smallest size allowed, >= 1.
        largest: the largest size allowed.
        limit: bytes that training may take, what is kept for fragmentation deducted; None: nobody knows.
        resident: bytes that stay whatever the size: parameters, gradients, optimizer state.
        most_probes: >= 1.

    Raises:
        ValueError: ``smallest <= start <= largest`` does not hold, or ``smallest`` or ``most_probes`` is below 1.
    """
    if not 1 <= smallest <= start <= largest:
        raise ValueError(f"1 <= smallest <= start <= largest must hold, got {smallest}, {start} and {largest}")
    if most_probes < 1:
        raise ValueError(f"most_probes must be >= 1, got {most_probes}")
    return _SizeSearch(probe, start, smallest, largest, limit, resident, most_probes).run()


class _SizeSearch:
    """Which sizes to try, and what follows from them."""

    def __init__(
        self,
        probe: Callable[[int], Probe | None],
        start: int,
        smallest: int,
        largest: int,
        limit: float | None,
        resident: int,
        most_probes: int,
    ) -> None:
        self._probe = probe
        self._start = start
        self._lowest = min(largest, smallest if smallest < 8 else _eights(smallest, up=True))
        self._largest = largest
        self._limit = limit
        self._resident = resident
        self._left = most_probes
        self._taken: list[Probe] = []
        self._fitting: list[Probe] = []  # the smallest first
        self._failed: dict[int, int | None] = {}  # sizes and their bytes, where they are known

    def run(self) -> Found:
        while self._left and (samples := self._next()) is not None and samples not in self._failed:
            self._try(samples)
        chosen = self._choice()
        return Found(
            samples=chosen,
            probes=tuple(self._taken),
            too_large=min(self._failed, default=None),
            fits=self._most() if self._fitting else 0,
            reason=self._reason(chosen),
        )

    def _next(self) -> int | None:
        if self._fitting:
            return self._faster()
        return self._smaller() if self._failed else self._start

    def _try(self, samples: int) -> None:
        self._left -= 1
        probe = self._probe(samples)
        if probe is None:
            self._failed[samples] = None
            return
        self._taken.append(probe)
        if self._limit is not None and probe.bytes is not None and probe.bytes > self._limit:
            self._failed[samples] = probe.bytes
        else:
            self._fitting = sorted([*self._fitting, probe], key=lambda probe: probe.samples)

    def _size(self, wanted: float, *, up: bool = False) -> int:
        """The size next to the one wanted that may be tried, below it unless ``up``."""
        if wanted >= self._largest:
            return self._largest
        size = math.ceil(wanted) if up else math.floor(wanted)
        return min(max(size if size < 8 else _eights(size, up=up), self._lowest), self._largest)

    # -- what fits -------------------------------------------------------------------------------------------

    def _smaller(self) -> int | None:
        """A size that surely fits where none has yet."""
        failed, limit = min(self._failed), self._limit
        taken = self._failed[failed]
        if self._left == 1:
            size = self._lowest
        elif taken is not None and limit is not None and taken > self._resident:
            size = self._size(_SPARE * failed * (limit - self._resident) / (taken - self._resident))
        else:
            size = self._size(failed / _FURTHEST ** len(self._failed))
        return size if size < failed else None

    def _most(self) -> int:
        """The largest size that memory is expected to hold."""
        top, limit, failed = self._fitting[-1].samples, self._limit, min(self._failed, default=None)
        counted = [(probe.samples, probe.bytes) for probe in self._fitting if probe.bytes is not None]
        if limit is None or not counted:
            return self._largest if failed is None else top
        expected = _memory([(0, self._resident), *counted], steep=failed is not None)
        sizes = range(top + 1, self._largest + 1)
        if failed is not None:
            taken = self._failed[failed]
            if taken is not None:
                expected = _memory([counted[-1], (failed, taken)])
            elif expected(failed) <= limit:
                return top  # memory grows otherwise than it seems
            sizes = range(top + 1, failed)
            limit = counted[-1][1] + _SPARE * (limit - counted[-1][1])
        return top + bisect_left(sizes, True, key=lambda samples: expected(samples) > limit)

    # -- what is faster --------------------------------------------------------------------------------------

    def _faster(self) -> int | None:
        """Another size that may be faster; None where none can be expected to be."""
        if len(self._fitting) == 1:
            return self._second()
        curve = _Curve.through(self._fitting)
        gains = [*self._above(curve), *self._between(curve)]
        return max(gains)[1] if gains else self._below(curve) or self._third()

    def _second(self) -> int | None:
        """What tells overhead from cost: twice the first size, or half of it."""
        first, most = self._fitting[0].samples, self._size(self._most())
        if 2 * first <= most:
            return self._size(2 * first)
        half = self._size(first / 2, up=True)
        if half < first:
            return half
        return most if most > first else None

    def _third(self) -> int | None:
        """A size far above the first two, where none below them has told overhead from noise."""
        top, most = self._fitting[-1].samples, self._size(self._most())
        return min(most, self._size(self._up * top)) if len(self._fitting) == 2 and most > top else None

    def _above(self, curve: _Curve) -> list[tuple[float, int]]:
        """What the largest size promises, and one that comes close to that."""
        top, most, line = self._fitting[-1].samples, self._size(self._most()), curve.lines[-1]
        gain = line.rate(most) / self._best
        if most <= top or gain < 1 + WITHIN:
            return []
        wanted = max(line.samples(line.rate(most) / (1 + WITHIN)), 2 * top)
        return [(gain, min(most, self._size(wanted, up=True), self._size(self._up * top)))]

    def _between(self, curve: _Curve) -> list[tuple[float, int]]:
        """What sizes between those tried promise, if samples stay cheap up to the larger one, where a cliff shows."""
        if curve.is_line:
            return []
        located = curve.error <= NOISE and len(self._fitting) > 3  # three times fit more than one curve
        gains = []
        for i, (low, high) in enumerate(pairwise(self._fitting), 1):
            if located and i != curve.cliff:
                continue
            middle = math.sqrt(low.samples * high.samples)
            size = self._size(middle, up=self._size(middle) <= low.samples)
            cost, at = curve.lines[i - 1].cost, high.samples
            if i != curve.cliff:
                cost, at = _CHEAPER * cost, size
            gain = at / (low.seconds + cost * (at - low.samples)) / self._best
            if low.samples < size < high.samples and gain >= 1 + WITHIN:
                gains.append((gain, size))
        return gains

    def _below(self, curve: _Curve) -> int | None:
        """As far down as the overhead allows, where samples that are cheaper there would make up for it."""
        low, line = self._fitting[0].samples, curve.lines[0]
        wanted = max(line.samples(_SLOWEST * self._best), low / _FURTHEST)
        size = self._size(min(wanted, low / 2), up=True)
        rate = _Line(line.overhead, _CHEAPER * line.cost).rate(size)
        return size if size < low and rate >= (1 + WITHIN) * self._best else None

    @property
    def _up(self) -> int:
        """The largest factor up at once: not far where nothing is known of memory."""
        return 2 if self._limit is None or self._fitting[-1].bytes is None else _FURTHEST

    @property
    def _best(self) -> float:
        return max(probe.rate for probe in self._fitting)

    # -- what comes out --------------------------------------------------------------------------------------

    def _rates(self) -> dict[int, float]:
        """Samples per second of each size that fits, without the noise where a curve explains them."""
        if len(self._fitting) > 1:
            curve = _Curve.through(self._fitting)
            if curve.error <= NOISE:
                return {p.samples: line.rate(p.samples) for p, line in zip(self._fitting, curve.lines, strict=True)}
        return {probe.samples: probe.rate for probe in self._fitting}

    def _choice(self) -> int | None:
        """Of the fastest sizes the one nearest to the user's own."""
        fastest = _best_of(self._rates())
        if len(fastest) > 1:  # where noise is larger than any curve explains, a tie may be luck
            curve = _Curve.through(self._fitting)
            lines = zip(self._fitting, curve.lines, strict=True)
            fastest = _best_of({p.samples: line.rate(p.samples) for p, line in lines if p.samples in fastest})
        return min(fastest, key=lambda samples: abs(math.log(samples / self._start)), default=None)

    def _reason(self, chosen: int | None) -> str:
        failed = ", ".join(f"{samples:,}" for samples in sorted(self._failed))
        if chosen is None:
            return f"none of the sizes tried fits in memory: {failed}"
        first, *others = self._fitting
        parts = [f"{first.samples:,} at once make {formatting.count(first.rate)} samples/s"]
        parts += [f"{probe.samples:,} make {formatting.count(probe.rate)}" for probe in others]
        return f"{', '.join(parts)}: {self._bound(chosen)}" + (f"; {failed} did not fit" if failed else "")

    def _bound(self, chosen: int) -> str:
        """Why it is not more samples."""
        rates = self._rates()
        if any(rate < (1 - WITHIN) * rates[chosen] for samples, rate in rates.items() if samples > chosen):
            return "more are slower"
        if chosen == self._largest:
            return "more are not allowed"
        if self._size(self._most()) <= chosen:
            return "memory holds no more"
        if len(rates) == 1 or self._above(_Curve.through(self._fitting)):
            return "more may be faster, but were not tried"
        return f"more gain less than {formatting.share(WITHIN, 0)}"


def _best_of(rates: Mapping[int, float]) -> list[int]:
    """The sizes whose rates are the best, or equal to it."""
    return [samples for samples, rate in rates.items() if rate >= (1 - WITHIN) * max(rates.values())]


@dataclass(frozen=True)
class _Line:
    """Seconds of a step: ``overhead + cost * samples``."""

    overhead: float
    cost: float

    def rate(self, samples: int) -> float:
        """Samples per second."""
        return samples / (self.overhead + self.cost * samples)

    def samples(self, rate: float) -> float:
        """How many samples reach that rate; infinite where none do."""
        rest = 1 - rate * self.cost
        return rate * self.overhead / rest if rest > 0 else math.inf


@dataclass(frozen=True)
class _Curve:
    """What explains the times of two or more probes: a line, or one up to a cliff and one from there on."""

    lines: tuple[_Line, ...]
    """The line at each probe, the smallest first; all have the same overhead."""
    cliff: int
    """How many probes are before the cliff; 0: there is none."""
    error: float
    """The largest by which it misses a time, relative."""

    @property
    def is_line(self) -> bool:
        """Whether nothing tells of a cliff."""
        return not self.cliff and self.error <= NOISE

    @classmethod
    def through(cls, probes: Sequence[Probe]) -> _Curve:
        """A line where that explains the probes (the smallest first), else what comes closest."""
        line = cls._fitted(probes, 0)
        if line.is_line:
            return line
        curves = (cls._fitted(probes, cliff) for cliff in range(1, len(probes)))
        return min([line, *(c for c in curves if 0 < c.lines[0].cost <= c.lines[-1].cost)], key=lambda c: c.error)

    @classmethod
    def _fitted(cls, probes: Sequence[Probe], cliff: int) -> _Curve:
        """What has its cliff there and comes closest to the times, by least squares of relative errors."""
        samples = np.array([probe.samples for probe in probes])
        seconds = np.array([probe.seconds for probe in probes])
        before = np.arange(len(probes)) < cliff
        costs = [samples * before, samples * ~before] if cliff else [samples]
        told = len(probes) > len(costs)  # two times with a cliff between tell nothing of the overhead
        overhead, *found = _weights(np.stack([np.full(len(probes), told), *costs], 1) / seconds[:, None])
        lines = tuple(_Line(overhead, found[0] if i < cliff else found[-1]) for i in range(len(probes)))
        errors = [abs(probe.rate / line.rate(probe.samples) - 1) for probe, line in zip(probes, lines, strict=True)]
        return cls(lines, cliff, max(errors))


def _weights(terms: np.ndarray) -> list[float]:
    """Weights >= 0 of the columns of ``terms`` [rows, columns] that bring the sum of each row closest to 1."""
    weights = np.zeros(terms.shape[1])
    used = list(range(len(weights)))
    while (found := np.linalg.lstsq(terms[:, used], np.ones(len(terms)), rcond=None)[0]).min() < 0:
        del used[found.argmin()]
    weights[used] = found
    return weights.tolist()


def _memory(points: Sequence[tuple[int, int]], *, steep: bool = False) -> Callable[[int], Fraction]:
    """Bytes to expect of sizes above the largest of two or more points ``(samples, bytes)``, rather too many.

    By the line through the last two points or through the first and the last, or by the parabola through all three,
    whichever is the steepest there.

    Args:
        points: the smallest first.
        steep: take all growth between just two points for quadratic.
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


def _eights(samples: int, *, up: bool) -> int:
    """The next multiple of 8 down, or up."""
    return (samples + 7 * up) // 8 * 8
