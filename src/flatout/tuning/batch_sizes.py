"""Search for the fastest batch size: models of time and memory, the next size to try, and trial steps with it."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from flatout.core import formatting
from flatout.core.batches import batch_size_of, resized, tensors_within
from flatout.core.errors import free_memory, parameters_of, ran_out_of_memory, state_bytes
from flatout.core.machine import available_memory, local_ranks
from flatout.data.loaders import length_of
from flatout.distributed.process_group import group_size
from flatout.techniques.batch_size import BatchCandidate, largest_batch, size_of
from flatout.training.learning_rate import BatchSizeChange, ScaledSchedule
from flatout.training.micro_batches import part_sizes
from flatout.tuning.arguments import BATCH_SIZE
from flatout.tuning.bench import Bench
from flatout.tuning.stopwatch import seconds, step_memory

if TYPE_CHECKING:
    from flatout.training.job import Job


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


WITHIN = 0.02
"""Rates with a smaller relative difference count as equal."""
_FURTHEST = 8
"""Largest ratio of a size to the next larger or smaller one that is tried."""
_CHEAPER = 0.75
"""Assumed cost of a sample below a cliff that no probe has found yet, as a share of its cost above the cliff."""
_SLOWEST = 0.85
"""Smallest rate of a size that is tried in search of a cliff, as a share of the best rate."""
_SPARE = 0.9
"""Used share of the memory between the largest size that fits and the limit, after a size was too large."""


@dataclass(frozen=True)
class Found:
    """Result of :func:`find`.

    Attributes:
        samples: the chosen size, or None if no tried size fits.
        probes: all probes in the order taken, including probes above the limit.
        too_large: the smallest tried size that ran out of memory or took more than the limit, or None.
        fits: the largest size that is expected to fit, up to ``largest``; 0 if no tried size fits.
        reason: one sentence on the choice.
    """

    samples: int | None
    probes: tuple[Probe, ...]
    too_large: int | None
    fits: int
    reason: str


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

    *Speed.* A step takes about ``overhead + cost * samples`` seconds, so the rate rises until the overhead is
    negligible. A sample may cost more from one size on, for example because samples do not fit in a cache. Such a cliff
    makes the size below it the fastest. The search begins with ``start`` and twice as many samples. Each further size
    is the most promising of two kinds:

    * a larger size, if the line through the times promises a gain. One step up is at most eightfold, or twofold if
      memory is unknown;
    * a size in the gap between two sizes whose times leave the line.

    If neither promises a gain, the search tries smaller sizes, because a cliff may be below ``start``.

    Of the sizes within ``WITHIN`` of the best rate, the search chooses the nearest to ``start``, in ratio. Rates come
    from the fitted curve if its error is at most ``NOISE``, else from the measured times.

    *Memory.* The search tries no size whose expected memory exceeds ``limit``. The estimate is the steepest of three
    curves: the line from ``resident`` to the largest size that fitted, the line through the two largest sizes, and the
    parabola through all three points. After a size was too large, smaller sizes are tried only with a margin. The
    estimate is then the line to the size that was too large, if its bytes are known. Otherwise the estimate is the
    parabola, or quadratic growth while there are only two points.

    *Guarantee.* With six probes, noiseless times and known memory, the choice has at least 95 % of the best rate of all
    sizes that fit, in two cases:

    * all times are on one line;
    * a sample costs at least 1.5 times as much above one size. This size is between ``start / 4`` and ``16 * start``,
      and the overhead is at most a twentieth of the time there.

    Noise reduces the rate by its own size, and may hide a cliff. There is no guarantee for cliffs that are lower,
    gradual, further away, several, or close to the size at which the overhead becomes negligible. Rates that rise and
    fall have no guarantee either, for example if the last blocks leave most of a GPU idle. The choice is then the best
    of the tried sizes, which include ``start``.

    If ``start`` fits and memory grows steadily and at most quadratically, at most one tried size is too large. If
    memory grows linearly, none is. More sizes may be too large if memory jumps. Below a ``start`` that does not fit,
    more may also be too large if bytes are unknown or if more than ``resident`` stays.

    Args:
        probe: runs trial steps with a number of samples. Returns None after an out-of-memory error, from which it has
            recovered. Called at most ``most_probes`` times, never twice with one size. The sizes are ``start``,
            ``largest``, sizes below 8 and multiples of 8.
        start: the user's own size, tried first.
        smallest: the smallest size allowed, >= 1.
        largest: the largest size allowed.
        limit: bytes that the training may take, without the reserve for fragmentation. None if unknown.
        resident: bytes that do not depend on the size: parameters, gradients, optimizer state.
        most_probes: maximum number of probes, >= 1.

    Raises:
        ValueError: ``smallest <= start <= largest`` does not hold, or ``smallest`` or ``most_probes`` is below 1.
    """
    if not 1 <= smallest <= start <= largest:
        raise ValueError(f"1 <= smallest <= start <= largest must hold, got {smallest}, {start} and {largest}")
    if most_probes < 1:
        raise ValueError(f"most_probes must be >= 1, got {most_probes}")
    return _SizeSearch(probe, start, smallest, largest, limit, resident, most_probes).run()


@dataclass(eq=False)
class _SizeSearch:
    """One search, with the arguments of ``find``: the probes so far, and the decisions that follow from them."""

    probe: Callable[[int], Probe | None]
    start: int
    smallest: int
    largest: int
    limit: float | None
    resident: int
    left: int

    def __post_init__(self) -> None:
        self._lowest = min(self.largest, self.smallest if self.smallest < 8 else _eights(self.smallest, up=True))
        self._taken: list[Probe] = []
        self._fitting: list[Probe] = []  # the smallest first
        self._failed: dict[int, int | None] = {}  # sizes and their bytes, if known

    def run(self) -> Found:
        """Take the probes and choose a size."""
        while self.left and (samples := self._next()) is not None and samples not in self._failed:
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
        return self._smaller() if self._failed else self.start

    def _try(self, samples: int) -> None:
        self.left -= 1
        probe = self.probe(samples)
        if probe is None:
            self._failed[samples] = None
            return
        self._taken.append(probe)
        if self.limit is not None and probe.bytes is not None and probe.bytes > self.limit:
            self._failed[samples] = probe.bytes
        else:
            self._fitting = sorted([*self._fitting, probe], key=lambda probe: probe.samples)

    def _size(self, wanted: float, *, up: bool = False) -> int:
        """Return the nearest size allowed that is not above ``wanted``, or not below ``wanted`` if ``up``."""
        if wanted >= self.largest:
            return self.largest
        size = math.ceil(wanted) if up else math.floor(wanted)
        return min(max(size if size < 8 else _eights(size, up=up), self._lowest), self.largest)

    # -- memory ------------------------------------------------------------------------------------------------

    def _smaller(self) -> int | None:
        """Return a size that is expected to fit, before any size has fitted."""
        failed, limit = min(self._failed), self.limit
        taken = self._failed[failed]
        if self.left == 1:
            size = self._lowest
        elif taken is not None and limit is not None and taken > self.resident:
            size = self._size(_SPARE * failed * (limit - self.resident) / (taken - self.resident))
        else:
            size = self._size(failed / _FURTHEST ** len(self._failed))
        return size if size < failed else None

    def _most(self) -> int:
        """Return the largest size that is expected to fit."""
        top, limit, failed = self._fitting[-1].samples, self.limit, min(self._failed, default=None)
        counted = [(probe.samples, probe.bytes) for probe in self._fitting if probe.bytes is not None]
        if limit is None or not counted:
            return self.largest if failed is None else top
        expected = memory_estimate([(0, self.resident), *counted], steep=failed is not None)
        sizes = range(top + 1, self.largest + 1)
        if failed is not None:
            taken = self._failed[failed]
            if taken is not None:
                expected = memory_estimate([counted[-1], (failed, taken)])
            elif expected(failed) <= limit:
                return top  # the estimate is wrong, because a size that it allows was too large
            sizes = range(top + 1, failed)
            limit = counted[-1][1] + _SPARE * (limit - counted[-1][1])
        return top + bisect_left(sizes, True, key=lambda samples: expected(samples) > limit)

    # -- speed -------------------------------------------------------------------------------------------------

    def _faster(self) -> int | None:
        """Return another size that may be faster, or None if no size is expected to be faster."""
        if len(self._fitting) == 1:
            return self._second()
        curve = RateCurve.through(self._fitting)
        gains = [*self._above(curve), *self._between(curve)]
        return max(gains)[1] if gains else self._below(curve) or self._third()

    def _second(self) -> int | None:
        """Return a size that separates overhead from cost: twice the first size, or half."""
        first, most = self._fitting[0].samples, self._size(self._most())
        if 2 * first <= most:
            return self._size(2 * first)
        half = self._size(first / 2, up=True)
        if half < first:
            return half
        return most if most > first else None

    def _third(self) -> int | None:
        """Return a size far above the first two, because no smaller size separates overhead from noise."""
        top, most = self._fitting[-1].samples, self._size(self._most())
        return min(most, self._size(self._up * top)) if len(self._fitting) == 2 and most > top else None

    def _above(self, curve: RateCurve) -> list[tuple[float, int]]:
        """Return the gain that the largest size promises, with a size that comes close to this gain."""
        top, most, line = self._fitting[-1].samples, self._size(self._most()), curve.lines[-1]
        gain = line.rate(most) / self._best
        if most <= top or gain < 1 + WITHIN:
            return []
        wanted = max(line.samples(line.rate(most) / (1 + WITHIN)), 2 * top)
        return [(gain, min(most, self._size(wanted, up=True), self._size(self._up * top)))]

    def _between(self, curve: RateCurve) -> list[tuple[float, int]]:
        """Return (gain, size) of sizes between probes, if there is a cliff. Assumes the cliff at the larger probe."""
        if curve.is_line:
            return []
        located = curve.error <= NOISE and len(self._fitting) > 3  # any three times fit several curves
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

    def _below(self, curve: RateCurve) -> int | None:
        """Return a smaller size whose cheaper samples may outweigh the overhead, or None."""
        low, line = self._fitting[0].samples, curve.lines[0]
        wanted = max(line.samples(_SLOWEST * self._best), low / _FURTHEST)
        size = self._size(min(wanted, low / 2), up=True)
        rate = Line(line.overhead, _CHEAPER * line.cost).rate(size)
        return size if size < low and rate >= (1 + WITHIN) * self._best else None

    @property
    def _up(self) -> int:
        """Largest ratio to the next larger size: cautious if memory is unknown."""
        return 2 if self.limit is None or self._fitting[-1].bytes is None else _FURTHEST

    @property
    def _best(self) -> float:
        return max(probe.rate for probe in self._fitting)

    # -- results -----------------------------------------------------------------------------------------------

    def _rates(self) -> dict[int, float]:
        """Return the samples per second of each size that fits, from a curve if one explains the times."""
        if len(self._fitting) > 1:
            curve = RateCurve.through(self._fitting)
            if curve.error <= NOISE:
                return {p.samples: line.rate(p.samples) for p, line in zip(self._fitting, curve.lines, strict=True)}
        return {probe.samples: probe.rate for probe in self._fitting}

    def _choice(self) -> int | None:
        """Return the fastest size, and among equal rates the nearest to the user's own size."""
        fastest = _best_of(self._rates())
        if len(fastest) > 1:  # if the noise exceeds the error of every curve, a tie may be chance
            curve = RateCurve.through(self._fitting)
            lines = zip(self._fitting, curve.lines, strict=True)
            fastest = _best_of({p.samples: line.rate(p.samples) for p, line in lines if p.samples in fastest})
        return min(fastest, key=lambda samples: abs(math.log(samples / self.start)), default=None)

    def _reason(self, chosen: int | None) -> str:
        failed = ", ".join(f"{samples:,}" for samples in sorted(self._failed))
        if chosen is None:
            return f"none of the sizes tried fits in memory: {failed}"
        first, *others = self._fitting
        parts = [f"{first.samples:,} at once make {formatting.count(first.rate)} samples/s"]
        parts += [f"{probe.samples:,} make {formatting.count(probe.rate)}" for probe in others]
        return f"{', '.join(parts)}: {self._bound(chosen)}" + (f"; {failed} did not fit" if failed else "")

    def _bound(self, chosen: int) -> str:
        """Return the reason against more samples."""
        rates = self._rates()
        if any(rate < (1 - WITHIN) * rates[chosen] for samples, rate in rates.items() if samples > chosen):
            return "more are slower"
        if chosen == self.largest:
            return "more are not allowed"
        if self._size(self._most()) <= chosen:
            return "memory holds no more"
        if len(rates) == 1 or self._above(RateCurve.through(self._fitting)):
            return "more may be faster, but were not tried"
        return f"more gain less than {formatting.share(WITHIN, 0)}"


def _best_of(rates: Mapping[int, float]) -> list[int]:
    """Return the sizes whose rates equal the best rate within ``WITHIN``."""
    return [samples for samples, rate in rates.items() if rate >= (1 - WITHIN) * max(rates.values())]


def _eights(samples: int, *, up: bool) -> int:
    """Return the next multiple of 8 down, or up."""
    return (samples + 7 * up) // 8 * 8


T = TypeVar("T")

MARGIN = 0.1
"""Share of a device's memory that stays free.

torch's caching allocator cannot use fragments, libraries allocate workspaces, and later batches may be longer.
"""

TIMED = 2
"""Number of timed steps per size. The faster one counts, because delays come from other processes."""


class SizeTrials:
    """Trial steps on batches of any size, made from the job's samples.

    Each step is one update on a whole batch. The steps change the training state, which the caller restores.

    Args:
        job: the training, with an optimizer and at least one batch.

    Attributes:
        steps: number of steps so far.
    """

    def __init__(self, job: Job) -> None:
        self.steps = 0
        self._job = job

    def find(self, start: int, *, smallest: int, largest: int) -> Found:
        """Return the fastest batch size within memory, in fewer than 20 steps. See :func:`find`."""
        with self._job.stepper.whole_updates():
            self._stepping(self._batch(smallest))()  # the first step creates gradients and optimizer state
        return find(
            self.probe,
            start=start,
            smallest=smallest,
            largest=largest,
            limit=memory_limit(self._job),
            resident=resident_bytes(self._job),
        )

    def probe(self, samples: int) -> Probe | None:
        """Return the measurements of a few steps with ``samples`` samples; None if they ran out of memory."""

        def probed() -> Probe:
            batch = self._batch(samples)
            allocated, step = self._height(batch), self._stepping(batch)
            took = min(seconds(step, self._job.spec.device, self._job.spec.ranks) for _ in range(TIMED))
            return Probe(samples, took, allocated)

        return self._within_memory(probed)

    def height(self, samples: int) -> int | None:
        """Return the peak memory of training during a step with ``samples`` samples, in bytes; None if unknown.

        Raises:
            torch.OutOfMemoryError: the step ran out of memory.
        """
        with self._job.stepper.whole_updates():
            batch = self._batch(samples)
            self._stepping(batch)()
            return self._height(batch)

    def fits(self, samples: int) -> bool:
        """Return True if a step with ``samples`` samples fits in memory."""
        height = self._within_memory(lambda: self.height(samples) or 0)
        return height is not None and height <= memory_limit(self._job)

    def most_that_fit(self, most: int) -> int | None:
        """Return the largest number of samples that fits in memory; None if one sample does not fit.

        The number is predicted from a small step. Speed is not considered.
        """
        samples = most
        while not self.fits(samples := max(1, samples // 8)):
            if samples == 1:
                return None
        height, resident = self.height(samples), resident_bytes(self._job)
        if height is None:
            return samples
        foretold = int(samples * (memory_limit(self._job) - resident) / max(1, height - resident))
        foretold = min(most, foretold // 8 * 8 or foretold)
        return foretold if foretold > samples and self.fits(foretold) else samples

    def _height(self, batch: Any) -> int | None:
        """Return the peak memory of a step in bytes, after optimizer state exists.

        Gradients count as memory of the step.
        """
        self._job.stepper.zero_grad()
        spec = self._job.spec
        allocated = step_memory(self._stepping(batch), spec.device, is_warm=True, ranks=spec.ranks)
        if allocated is None:
            return None
        of_batch = spec.ranks.largest([sum(t.nbytes for t in tensors_within(batch))])[0]
        return allocated + int(of_batch) + resident_bytes(self._job)

    def _stepping(self, batch: Any) -> Callable[[], None]:
        def step() -> None:
            self.steps += 1
            self._job.stepper.step(batch)

        return step

    def _batch(self, samples: int) -> Any:
        batch = max(self._job.data.batches, key=batch_size_of)
        return batch if batch_size_of(batch) == samples else resized(batch, samples)

    def _within_memory(self, work: Callable[[], T]) -> T | None:
        """Return the result of ``work``; None if it ran out of memory."""
        try:
            with self._job.spec.ranks.attempt(), self._job.stepper.whole_updates():
                return work()
        except RuntimeError as error:
            if not ran_out_of_memory(error):
                raise
        # Here the error is freed, and with it the frames that hold the graph.
        free_memory(self._job.spec.device)
        return None


def resident_bytes(job: Job) -> int:
    """Return the bytes that stay between steps: parameters, buffers, optimizer state, and DDP's buckets for gradients.

    Gradients belong to a step.
    """
    assert job.spec.optimizer is not None
    owned = [t for module in job.spec.modules for t in (*module.parameters(), *module.buffers())]
    tensors = {id(t): t for t in (*parameters_of(job.spec.optimizer), *owned)}
    own = sum(t.nbytes for t in tensors.values()) + state_bytes(job.spec.optimizer)
    own += 0 if job.stepper.sync is None else job.stepper.sync.bucket_bytes
    return int(job.spec.ranks.largest([own])[0])


def memory_limit(job: Job) -> float:
    """Return the memory limit of training in bytes on each rank, at most ``job.spec.memory_limit``.

    The limit is the device's free memory with a margin, on the rank with the least. Ranks on one machine share the
    memory of its CPU.

    On a GPU, the trials' own copy of model and optimizer state counts as used.
    """
    if job.spec.device.type == "cuda":
        index = torch.cuda.current_device() if job.spec.device.index is None else job.spec.device.index
        free, total = torch.cuda.mem_get_info(index)
        allowed = int(torch.cuda.get_per_process_memory_fraction(index) * total)
        unused = min(free + torch.cuda.memory_reserved(index), allowed) - torch.cuda.memory_allocated(index)
        unused += sum(p.grad.nbytes for m in job.spec.modules for p in m.parameters() if p.grad is not None)
    else:
        unused = available_memory() // local_ranks()
    left = (1 - MARGIN) * (job.spec.ranks.smallest([unused])[0] + resident_bytes(job))
    return left if job.spec.memory_limit is None else min(left, job.spec.memory_limit)


def parts_that_fit(job: Job) -> BatchCandidate | None:
    """Return the largest parts of batches that fit in memory; None if whole batches fit.

    Ranks that train on their own keep whole batches, because each would find parts of another size.

    Raises:
        torch.OutOfMemoryError: a single sample does not fit in memory, or batches cannot be split.
    """
    if group_size() > job.spec.ranks.size:
        return None
    largest, trials = largest_batch(job), SizeTrials(job)
    if trials.fits(largest):
        return None
    too_large = f"batches of {largest} do not fit into {formatting.size_of(int(memory_limit(job)))}"
    if resized(job.data.batches[0], 1) is None:
        raise torch.OutOfMemoryError(f"{too_large}, and cannot be taken apart")
    samples = trials.most_that_fit(largest - 1)
    if samples is None:
        raise torch.OutOfMemoryError(f"{too_large}, nor does a single sample")
    return BatchCandidate(job, micro_batch=max(part_sizes(largest, samples)))


def scaled_schedule(bench: Bench, scheduler: Any, *, own_size: int, own_loader: Iterable[Any]) -> ScaledSchedule | None:
    """Return the schedule of learning rates for another batch size; None if the size is the user's own.

    Args:
        bench: the training, whose ledger records the changes.
        scheduler: the user's scheduler; None without one.
        own_size: samples per batch of the user's loader.
        own_loader: the user's loader.
    """
    job = bench.job
    optimizer, accumulate, size = job.spec.optimizer, job.spec.accumulate, size_of(job)
    if optimizer is None or size == own_size:
        return None
    change = BatchSizeChange(
        rule=job.spec.lr_rule,
        samples=(own_size * accumulate, size * accumulate),
        updates=(math.ceil(length_of(own_loader) / accumulate), math.ceil(length_of(job.data.loader) / accumulate)),
        training=math.ceil(job.data.expected_steps / accumulate),
    )
    row = bench.ledger.row(BATCH_SIZE.name)
    bench.ledger.amend(replace(row, why="; ".join([row.why, *change.told(optimizer)])))
    return change.schedule(optimizer, scheduler)
