"""Gain from a fixed number of pairs."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.tuning.statistics import MUCH_NOISIER, NoiseFloor, fixed_gain

differences = st.lists(st.floats(-1.0, 1.0), min_size=2, max_size=12)
floors = st.builds(NoiseFloor, st.floats(0.0, 1.0), st.integers(0, 8))


def half_width(values: Sequence[float], floor: NoiseFloor) -> float:
    gain = fixed_gain(values, floor)
    return math.log(gain.high / gain.low) / 2


def test_the_interval_is_that_of_a_t_test() -> None:
    gain = fixed_gain([0.1, 0.2, 0.6])
    half = 4.303 * math.sqrt((0.2**2 + 0.1**2 + 0.3**2) / 2) / math.sqrt(3)
    logs = [math.log(each) for each in (gain.low, gain.ratio, gain.high)]
    assert logs == pytest.approx([0.3 - half, 0.3, 0.3 + half])


def test_many_pairs_have_the_quantile_of_the_most_degrees_of_freedom() -> None:
    assert half_width([0.1, -0.1] * 20, NoiseFloor(0.0, 0)) == pytest.approx(2.093 * 0.1 / math.sqrt(39))


def test_the_noise_floor_adds_its_degrees_of_freedom() -> None:
    values, floor = [0.1, 0.2, 0.3], NoiseFloor(0.2, 4)
    pooled = math.sqrt((2 * 0.1**2 + 4 * 0.2**2) / 6)
    assert half_width(values, floor) == pytest.approx(2.447 * pooled / math.sqrt(3))


def test_the_scale_is_at_least_the_spread_of_the_pairs() -> None:
    assert half_width([0.1, 0.2, 0.3], NoiseFloor(0.09, 4)) == pytest.approx(2.447 * 0.1 / math.sqrt(3))


@pytest.mark.parametrize(("ratio", "quantile"), [(0.99, 2.447), (1.01, 4.303)])
def test_pairs_that_are_much_noisier_than_the_floor_count_alone(ratio: float, quantile: float) -> None:
    floor = NoiseFloor(0.1 / MUCH_NOISIER / ratio, 4)
    assert half_width([0.1, 0.2, 0.3], floor) == pytest.approx(quantile * 0.1 / math.sqrt(3))


@given(differences, st.integers(0, 8))
def test_a_floor_without_noise_changes_no_interval(values: list[float], floor_pairs: int) -> None:
    assert fixed_gain(values, NoiseFloor(0.0, floor_pairs)) == fixed_gain(values)


@given(differences, floors, st.floats(1.0, 10.0))
def test_a_floor_that_is_noisier_than_the_pairs_widens_the_interval(
    values: list[float], floor: NoiseFloor, factor: float
) -> None:
    floor = NoiseFloor(max(floor.scale, statistics.stdev(values)), floor.pairs)
    noisier = NoiseFloor(factor * floor.scale, floor.pairs)
    assert half_width(values, noisier) >= half_width(values, floor) * (1 - 1e-9)


@given(differences, floors)
def test_the_interval_holds_the_ratio_and_inverts_with_the_roles(values: list[float], floor: NoiseFloor) -> None:
    gain, inverse = fixed_gain(values, floor), fixed_gain([-value for value in values], floor)
    assert gain.low <= gain.ratio <= gain.high
    assert (inverse.ratio, inverse.low, inverse.high) == pytest.approx((1 / gain.ratio, 1 / gain.high, 1 / gain.low))


@given(st.floats(0.1, 10.0), st.integers(2, 12))
def test_a_constant_speedup_is_its_own_interval(speedup: float, pairs: int) -> None:
    gain = fixed_gain([math.log(speedup)] * pairs)
    assert (gain.ratio, gain.low, gain.high) == pytest.approx((speedup,) * 3)


@pytest.mark.parametrize("pairs", [2, 5, 12])
def test_the_interval_covers_the_truth_about_as_often_as_its_level(pairs: int) -> None:
    noise, repeats, covered = random.Random(pairs), 1000, 0
    for _ in range(repeats):
        gain = fixed_gain([noise.gauss(math.log(1.05), 0.1) for _ in range(pairs)])
        covered += gain.low <= 1.05 <= gain.high
    assert 0.93 <= covered / repeats <= 0.97


@pytest.mark.parametrize("change", [0.3, 1.0, 1.5, 3.0])
@pytest.mark.parametrize(("floor_pairs", "pairs"), [(3, 3), (3, 5), (8, 3), (8, 12)])
def test_the_interval_covers_the_truth_though_the_noise_changed_since_the_floor(
    floor_pairs: int, pairs: int, change: float
) -> None:
    noise, repeats, covered = random.Random(pairs), 1000, 0
    for _ in range(repeats):
        floor = NoiseFloor.of([noise.gauss(0.0, 0.1) for _ in range(floor_pairs)])
        gain = fixed_gain([noise.gauss(math.log(1.05), change * 0.1) for _ in range(pairs)], floor)
        covered += gain.low <= 1.05 <= gain.high
    assert covered / repeats >= (0.94 if change <= 1 else 0.89)


def test_three_pairs_show_a_factor_of_two_more_precisely_with_a_noise_floor() -> None:
    noise, widths = random.Random(0), list[float]()
    for _ in range(300):
        floor = NoiseFloor.of([noise.gauss(0.0, 0.02) for _ in range(8)])
        values = [noise.gauss(math.log(2), 0.02) for _ in range(3)]
        widths.append(half_width(values, floor) / half_width(values, NoiseFloor.of([])))
    assert statistics.median(widths) < 0.8


@pytest.mark.parametrize("pairs", [0, 1])
def test_fewer_than_two_pairs_are_refused(pairs: int) -> None:
    with pytest.raises(ValueError, match=f"at least 2 pairs, got {pairs}"):
        fixed_gain([0.1] * pairs)
