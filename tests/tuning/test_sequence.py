"""Confidence sequence of a gain: its width, its symmetries, and how often it misses the truth."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.tuning.statistics import LEAST_SCALE, LEVEL, PRIOR_PAIRS, GainSequence, NoiseFloor

EIGHT = NoiseFloor(0.05, 8)

differences = st.lists(st.floats(-1.0, 1.0), min_size=2, max_size=30)
floors = st.builds(NoiseFloor, st.floats(0.01, 0.5), st.integers(3, 8))


def sequence_of(values: Sequence[float], floor: NoiseFloor = EIGHT) -> GainSequence:
    sequence = GainSequence(floor)
    for value in values:
        sequence.add(value)
    return sequence


def interval_of(values: Sequence[float], floor: NoiseFloor = EIGHT) -> tuple[float, float]:
    return sequence_of(values, floor).interval


def half_width(interval: tuple[float, float]) -> float:
    return (interval[1] - interval[0]) / 2


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [(2, 3.79), (3, 2.50), (4, 1.98), (6, 1.49), (8, 1.24), (12, 0.98), (20, 0.74), (40, 0.52), (100, 0.33)],
)
def test_the_half_width_shrinks_with_pairs_as_in_the_table(pairs: int, expected: float) -> None:
    sequence = sequence_of([0.1 + (-1) ** i * 0.05 for i in range(pairs)])
    assert half_width(sequence.interval) / sequence.scale == pytest.approx(expected, abs=0.006)


@pytest.mark.parametrize(("floor_pairs", "pairs"), [(8, 0), (8, 1), (0, 0), (0, 1), (0, 4), (2, 3), (3, 2)])
def test_too_few_pairs_show_nothing(floor_pairs: int, pairs: int) -> None:
    sequence = sequence_of([0.1] * pairs, NoiseFloor(0.01, floor_pairs))
    assert sequence.interval == (-math.inf, math.inf)
    assert math.isnan(sequence.mean) == (pairs == 0)


@pytest.mark.parametrize(("floor_pairs", "pairs"), [(8, 2), (3, 3), (2, 4), (0, 5)])
def test_the_first_interval_needs_fewer_pairs_with_a_larger_noise_floor(floor_pairs: int, pairs: int) -> None:
    assert math.isfinite(half_width(interval_of([0.1] * pairs, NoiseFloor(0.01, floor_pairs))))


def bayes_factor(values: Sequence[float], center: float, floor: NoiseFloor) -> float:
    """Integrate the likelihood over effect and scale, relative to that of the mean ``center``."""
    logs = np.linspace(-9.0, 4.0, 2601)[:, None]  # log scale, whose prior is flat
    scales = np.exp(logs)
    effects, weights = np.polynomial.hermite_e.hermegauss(100)
    shifts = np.append(effects / math.sqrt(PRIOR_PAIRS), 0.0) * scales
    squares = sum((value - center - shifts) ** 2 for value in values) + floor.pairs * floor.scale**2
    likelihoods = np.exp(-(len(values) + floor.pairs) * logs - squares / (2 * scales**2)).sum(axis=0)
    return float(likelihoods[:-1] @ weights / weights.sum() / likelihoods[-1])


@pytest.mark.parametrize("floor", [EIGHT, NoiseFloor(0.2, 3)])
@pytest.mark.parametrize("pairs", [3, 4, 9])
def test_the_ends_are_where_the_evidence_against_them_equals_the_level(pairs: int, floor: NoiseFloor) -> None:
    noise = random.Random(pairs)
    values = [noise.gauss(0.3, 0.1) for _ in range(pairs)]
    for end in interval_of(values, floor):
        assert bayes_factor(values, end, floor) == pytest.approx(1 / LEVEL, rel=1e-3)


def test_the_scale_is_pooled_from_the_noise_floor_and_the_pairs() -> None:
    sequence = sequence_of([0.1, 0.2, 0.6], NoiseFloor(0.1, 4))
    assert sequence.mean == pytest.approx(0.3)
    assert sequence.scale**2 == pytest.approx((4 * 0.1**2 + 0.2**2 + 0.1**2 + 0.3**2) / (4 + 2))
    assert sequence_of([], NoiseFloor(0.1, 4)).scale == pytest.approx(0.1)
    assert sequence_of([], NoiseFloor.of([])).scale == math.inf


def test_pairs_that_agree_by_chance_do_not_make_the_scale_zero() -> None:
    assert sequence_of([0.1] * 5, NoiseFloor(0.0, 3)).scale == LEAST_SCALE


def test_the_noise_floor_is_the_root_mean_square() -> None:
    assert NoiseFloor.of([0.3, -0.4]) == NoiseFloor(pytest.approx(math.sqrt(0.125)), 2)
    assert NoiseFloor.of([]) == NoiseFloor(0.0, 0)


@given(differences, floors)
def test_the_interval_mirrors_when_the_roles_swap(values: list[float], floor: NoiseFloor) -> None:
    low, high = interval_of(values, floor)
    assert interval_of([-value for value in values], floor) == pytest.approx((-high, -low))


@given(st.randoms(use_true_random=False), differences, floors)
def test_the_order_of_the_pairs_does_not_matter(order: random.Random, values: list[float], floor: NoiseFloor) -> None:
    shuffled = order.sample(values, len(values))
    assert interval_of(shuffled, floor) == pytest.approx(interval_of(values, floor))


@given(differences, floors, st.floats(-1.0, 1.0))
def test_a_constant_speedup_shifts_the_interval(values: list[float], floor: NoiseFloor, shift: float) -> None:
    low, high = interval_of(values, floor)
    assert interval_of([value + shift for value in values], floor) == pytest.approx((low + shift, high + shift))


@given(differences, floors, st.floats(1.0, 10.0))
def test_the_interval_scales_with_its_data(values: list[float], floor: NoiseFloor, factor: float) -> None:
    low, high = interval_of(values, floor)
    scaled = interval_of([factor * value for value in values], NoiseFloor(factor * floor.scale, floor.pairs))
    assert scaled == pytest.approx((factor * low, factor * high))


@given(floors, st.floats(-1.0, 1.0), st.integers(3, 40))
def test_the_interval_narrows_with_every_equal_pair(floor: NoiseFloor, value: float, pairs: int) -> None:
    assert half_width(interval_of([value] * (pairs + 1), floor)) < half_width(interval_of([value] * pairs, floor))


@given(differences, floors, st.floats(1.0, 10.0))
def test_more_noise_never_narrows_the_interval(values: list[float], floor: NoiseFloor, factor: float) -> None:
    width = half_width(interval_of(values, floor))
    assert half_width(interval_of(values, NoiseFloor(factor * floor.scale, floor.pairs))) >= width
    mean = sum(values) / len(values)
    spread = [mean + factor * (value - mean) for value in values]
    assert half_width(interval_of(spread, floor)) >= width * (1 - 1e-9)


@pytest.mark.parametrize("floor_pairs", [0, 3, 8])
def test_the_truth_is_missed_at_any_number_of_pairs_as_rarely_as_the_level_says(floor_pairs: int) -> None:
    noise, repeats, missed = random.Random(floor_pairs), 400, 0
    for _ in range(repeats):
        sequence = GainSequence(NoiseFloor.of([noise.gauss(0.0, 0.1) for _ in range(floor_pairs)]))
        for _ in range(60):
            sequence.add(noise.gauss(0.05, 0.1))
            low, high = sequence.interval
            if not low <= 0.05 <= high:
                missed += 1
                break
    assert missed / repeats <= LEVEL


def test_a_factor_of_two_is_shown_by_three_pairs() -> None:
    noise = random.Random(0)
    for _ in range(200):
        floor = NoiseFloor.of([noise.gauss(0.0, 0.02) for _ in range(8)])
        assert interval_of([math.log(2) + noise.gauss(0.0, 0.02) for _ in range(3)], floor)[0] > math.log(1.5)
