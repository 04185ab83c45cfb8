"""Estimates of times that two processes measured, and statistics on their ratio and difference."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import variance
from typing import Literal

from flatout.report.model import Gain

Verdict = Literal["faster", "slower", "same", "unknown"]
"""Verdict on the second loop relative to the first.

``same``: the 95 % interval of the difference lies within ``MARGIN``. ``unknown``: the measurements do not decide.
"""

START_SPREAD = 0.01
"""Standard deviation of the log time of one loop between starts on one machine, beyond the spread in each start.

Memory layout, clocks and temperature differ from start to start. A report has one start and cannot show this spread
(Kalibera and Jones, "Rigorous benchmarking in reasonable time", ISMM 2013). The value is for a quiet machine. On two
cores of an AMD EPYC, six starts of training loops of 0.8 and 1 ms had 0.7 %.
"""

DISTURBED_START_SPREAD = 0.04
"""``START_SPREAD`` on a machine on which other programs compete for the cores.

With such programs, twenty starts of the two loops had 1.4 and 4 %. Small convolutions had 16 %, which exceeds any
useful margin.
"""

Spreads = tuple[float, float]
"""``START_SPREAD`` or ``DISTURBED_START_SPREAD`` of the first loop, and of the second."""

MARGIN = 0.05
"""Largest difference of two loops that count as equally fast, relative to the time of a batch."""

NEGLIGIBLE = 0.01
"""Largest negligible difference of a part, relative to the time of a batch, even if significant (as in criterion)."""


@dataclass(frozen=True)
class Estimate:
    """Mean time of a batch, or of a part of it.

    Attributes:
        ms: milliseconds.
        error_ms: standard error of ``ms``; None if a single measurement is known.
        freedom: degrees of freedom of ``error_ms``.
    """

    ms: float
    error_ms: float | None = None
    freedom: int = 0

    @classmethod
    def of(cls, ms: float, measured: Sequence[float], *, trimmed: bool) -> Estimate:
        """Return an estimate with the standard error of its measurements.

        The standard error of a trimmed mean comes from the winsorized variance (Tukey and McLaughlin 1963).

        Args:
            ms: mean of ``measured``.
            measured: independent measurements, milliseconds. The error is unknown if too few or not all are finite.
            trimmed: True if ``ms`` is the mean of the middle half, without a quarter at either end.
        """
        ordered, count = sorted(measured), len(measured)
        outer = count // 4 if trimmed else 0
        inner = count - 2 * outer
        if inner < 2 or not math.isfinite(sum(each * each for each in measured)):
            return cls(ms)
        low, high = ordered[outer], ordered[count - outer - 1]
        squares = (count - 1) * variance(min(max(each, low), high) for each in ordered)
        return cls(ms, math.sqrt(squares / (inner * (inner - 1))), inner - 1)

    def scaled(self, times: float) -> Estimate:
        """Return the estimate for a multiple of the samples."""
        return Estimate(times * self.ms, None if self.error_ms is None else times * self.error_ms, self.freedom)

    def relative_to(self, other: Estimate) -> Estimate:
        """Return the estimate as a multiple of another estimate. The errors count as independent."""
        ratio = self.ms / other.ms
        if self.error_ms is None or other.error_ms is None:
            return Estimate(ratio)
        error = ratio * math.hypot(self.error_ms / self.ms, other.error_ms / other.ms)
        return Estimate(ratio, error, min(self.freedom, other.freedom))


def speed_ratio(a: Estimate, b: Estimate, spreads: Spreads = (START_SPREAD, START_SPREAD)) -> Gain:
    """Return the speed of ``b`` relative to ``a``, with its 95 % interval.

    The variance of the log ratio of independent means is the sum of their squared relative errors (delta method). The
    variances of ``spreads`` are added. The degrees of freedom are those of Welch and Satterthwaite. For trimmed means,
    the interval is that of Yuen's test ("The two-sample trimmed t for unequal population variances", Biometrika 61,
    1974).
    """
    ratio = a.ms / b.ms
    if a.error_ms is None or b.error_ms is None:
        return Gain(ratio)
    half = _half_width((a.error_ms / a.ms, a.freedom), (b.error_ms / b.ms, b.freedom), math.hypot(*spreads) ** 2)
    return Gain(ratio, ratio * math.exp(-half), ratio * math.exp(half))


def speed_verdict(speed: Gain) -> Verdict:
    """Return the verdict on a speed ratio."""
    if speed.interval is None:
        return "unknown"
    if speed.low > 1 or speed.high < 1:
        return "faster" if speed.low > 1 else "slower"
    return "same" if speed.low > 1 - MARGIN and speed.high < 1 + MARGIN else "unknown"


def part_verdict(
    a: Estimate, b: Estimate, batch_ms: float, spreads: Spreads = (START_SPREAD, START_SPREAD)
) -> Verdict | None:
    """Return the verdict on a part of a batch, by the interval of its difference in milliseconds.

    A part may take no time at all, so the ratio of its times may be undefined.

    Args:
        a: time of the part in the first loop.
        b: time of the part in the second loop.
        batch_ms: time of a whole batch, to which ``MARGIN`` and ``NEGLIGIBLE`` refer.
        spreads: spreads of the two loops.

    Returns:
        The verdict; None if the part was measured once.
    """
    if a.error_ms is None or b.error_ms is None:
        return None
    between_starts = math.hypot(a.ms * spreads[0], b.ms * spreads[1])
    half = _half_width((a.error_ms, a.freedom), (b.error_ms, b.freedom), between_starts**2)
    change = b.ms - a.ms
    if abs(change) > max(half, NEGLIGIBLE * batch_ms):
        return "slower" if change > 0 else "faster"
    return "same" if abs(change) + half < MARGIN * batch_ms else "unknown"


def _half_width(a: tuple[float, int], b: tuple[float, int], known_variance: float) -> float:
    """Return half of the 95 % interval of a difference of independent means.

    Args:
        a: standard error of the first mean, and its degrees of freedom.
        b: the same of the second mean.
        known_variance: further variance, which counts as exact.
    """
    total = a[0] ** 2 + b[0] ** 2 + known_variance
    estimated = sum(error**4 / freedom for error, freedom in (a, b))
    return t_quantile(total**2 / estimated if estimated else math.inf) * math.sqrt(total)


T_QUANTILES = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093,
)  # fmt: skip
"""0.975 quantiles of Student's t distribution with 1 to 19 degrees of freedom. More degrees use the last quantile."""


def t_quantile(freedom: float) -> float:
    """Return the 0.975 quantile for ``freedom`` degrees of freedom, rounded down, and at least 1."""
    return T_QUANTILES[max(1, int(min(freedom, len(T_QUANTILES)))) - 1]
