"""Statistics on two measured times: intervals, their coverage, and verdicts."""

from __future__ import annotations

import math
from statistics import fmean, stdev

import numpy as np
import pytest

from flatout.report import Gain
from flatout.report.estimates import (
    DISTURBED_START_SPREAD,
    MARGIN,
    NEGLIGIBLE,
    START_SPREAD,
    Estimate,
    part_verdict,
    speed_ratio,
    speed_verdict,
    t_quantile,
)


def test_the_error_of_a_mean() -> None:
    values = [1.0, 2.0, 4.0]
    estimate = Estimate.of(fmean(values), values, trimmed=False)
    assert estimate.error_ms == pytest.approx(stdev(values) / math.sqrt(3))
    assert estimate.freedom == 2


def test_the_error_of_a_trimmed_mean_comes_from_the_winsorized_variance() -> None:
    values = [99.0, 4.0, 3.0, 2.0, 1.0, 5.0, 6.0, 0.0]
    winsorized = [2.0, 2.0, 2.0, 3.0, 4.0, 5.0, 5.0, 5.0]
    estimate = Estimate.of(3.5, values, trimmed=True)
    assert estimate.error_ms == pytest.approx(math.sqrt(7 * stdev(winsorized) ** 2 / (4 * 3)))
    assert estimate.freedom == 3


@pytest.mark.parametrize("measured", [[], [2.0]])
def test_a_single_measurement_has_no_error(measured: list[float]) -> None:
    estimate = Estimate.of(2.0, measured, trimmed=True)
    assert estimate.error_ms is None
    assert speed_ratio(estimate, Estimate(1.0, 0.1, 5)).interval is None
    assert speed_ratio(Estimate(1.0, 0.1, 5), estimate).interval is None
    assert part_verdict(estimate, Estimate(1.0, 0.1, 5), 9.0) is None
    assert estimate.relative_to(Estimate(1.0, 0.1, 5)).error_ms is None


def test_a_ratio_has_the_interval_of_welch_on_the_logs() -> None:
    speed = speed_ratio(Estimate(10.0, 0.5, 4), Estimate(5.0, 0.1, 9))
    variances, known = (0.05**2, 0.02**2), 2 * START_SPREAD**2
    freedom = (sum(variances) + known) ** 2 / (variances[0] ** 2 / 4 + variances[1] ** 2 / 9)
    half = t_quantile(freedom) * math.sqrt(sum(variances) + known)
    assert [math.log(each) for each in (speed.low, speed.ratio, speed.high)] == pytest.approx(
        [math.log(2) - half, math.log(2), math.log(2) + half]
    )


def test_a_ratio_does_not_depend_on_the_unit_or_the_order() -> None:
    a, b = Estimate(10.0, 0.5, 4), Estimate(5.0, 0.1, 9)
    speed, scaled, swapped = speed_ratio(a, b), speed_ratio(a.scaled(3.0), b.scaled(3.0)), speed_ratio(b, a)
    assert (scaled.low, scaled.high) == pytest.approx((speed.low, speed.high))
    assert (1 / swapped.high, 1 / swapped.low) == pytest.approx((speed.low, speed.high))


@pytest.mark.parametrize("trimmed", [True, False])
@pytest.mark.parametrize(
    ("noises", "counts"), [((0.02, 0.02), (12, 12)), ((0.01, 0.1), (5, 12)), ((0.05, 0.05), (3, 3))]
)
@pytest.mark.parametrize(
    ("correlation", "spread"), [(0.0, START_SPREAD), (0.3, START_SPREAD), (0.0, DISTURBED_START_SPREAD)]
)
def test_intervals_of_starts_with_their_own_speed_hold_the_true_ratio(
    correlation: float, spread: float, trimmed: bool, noises: tuple[float, float], counts: tuple[int, int]
) -> None:
    generator = np.random.default_rng(0)

    def measured(ms: float, noise: float, count: int) -> Estimate:
        start = ms * math.exp(generator.normal(0.0, spread))
        deviations = generator.standard_normal(count)
        for i in range(1, count):  # stretches of training have 0.1 to 0.4 while other programs run
            deviations[i] = correlation * deviations[i - 1] + math.sqrt(1 - correlation**2) * deviations[i]
        times = sorted(start * (1 + noise * deviations))
        outer = count // 4 if trimmed else 0
        return Estimate.of(fmean(times[outer : count - outer]), times, trimmed=trimmed)

    trials, inside = 2000, 0
    for _ in range(trials):
        a, b = (measured(ms, noise, count) for ms, noise, count in zip((3.0, 2.0), noises, counts, strict=True))
        speed = speed_ratio(a, b, (spread, spread))
        inside += speed.low < 1.5 < speed.high
    assert (0.85 if correlation else 0.93) < inside / trials < 0.995


@pytest.mark.parametrize(
    ("speed", "verdict"),
    [
        (Gain(1.2, 1.1, 1.3), "faster"),
        (Gain(0.8, 0.7, 0.9), "slower"),
        (Gain(1.0, 0.98, 1.02), "same"),
        (Gain(1.0, 1 - 1.1 * MARGIN, 1.02), "unknown"),
        (Gain(1.0, 0.98, 1 + 1.1 * MARGIN), "unknown"),
        (Gain(1.02, 1.01, 1.03), "faster"),
        (Gain(1.5), "unknown"),
    ],
)
def test_verdicts_on_a_speed(speed: Gain, verdict: str) -> None:
    assert speed_verdict(speed) == verdict


@pytest.mark.parametrize(
    ("a", "b", "error", "verdict"),
    [
        (1.0, 2.0, 0.01, "slower"),
        (2.0, 1.0, 0.01, "faster"),
        (1.0, 1.0, 0.01, "same"),
        (1.0, 2.0, 1.0, "unknown"),
        (0.0, 0.9 * 10 * NEGLIGIBLE, 0.0, "same"),
        (0.0, 1.1 * 10 * NEGLIGIBLE, 0.0, "slower"),
        (0.0, 0.0, 0.0, "same"),
    ],
)
def test_verdicts_on_a_part_of_ten_milliseconds(a: float, b: float, error: float, verdict: str) -> None:
    assert part_verdict(Estimate(a, error, 5), Estimate(b, error, 5), 10.0) == verdict


def test_a_relative_time_has_the_errors_of_both() -> None:
    relative = Estimate(2.0, 0.02, 7).relative_to(Estimate(4.0, 0.08, 3))
    assert relative.ms == 0.5
    assert relative.error_ms == pytest.approx(0.5 * math.hypot(0.01, 0.02))
    assert relative.freedom == 3
