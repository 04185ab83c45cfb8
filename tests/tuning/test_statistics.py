"""Gain from a number of pairs that is fixed before the first."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.tuning.statistics import T_QUANTILES, fixed_gain

differences = st.lists(st.floats(-1.0, 1.0), min_size=2, max_size=12)


def test_the_interval_is_that_of_a_t_test() -> None:
    gain = fixed_gain([0.1, 0.2, 0.6])
    half = 4.303 * math.sqrt((0.2**2 + 0.1**2 + 0.3**2) / 2) / math.sqrt(3)
    logs = [math.log(each) for each in (gain.low, gain.ratio, gain.high)]
    assert logs == pytest.approx([0.3 - half, 0.3, 0.3 + half])


@pytest.mark.parametrize("pairs", T_QUANTILES)
def test_quantiles_are_those_of_the_t_distribution(pairs: int) -> None:
    freedom = pairs - 1
    angles = np.linspace(0.0, math.pi / 2, 100_001)  # of x = sqrt(freedom) * tan(angle)
    density = np.cos(angles) ** (freedom - 1)
    inside = density[angles < math.atan(T_QUANTILES[pairs] / math.sqrt(freedom))].sum() / density.sum()
    assert inside == pytest.approx(0.95, abs=1e-4)


@given(differences)
def test_the_interval_holds_the_ratio_and_inverts_with_the_roles(values: list[float]) -> None:
    gain, inverse = fixed_gain(values), fixed_gain([-value for value in values])
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


@pytest.mark.parametrize("pairs", [0, 1, 13])
def test_a_number_of_pairs_without_a_quantile_is_refused(pairs: int) -> None:
    with pytest.raises(ValueError, match=f"2 to 12 pairs, got {pairs}"):
        fixed_gain([0.1] * pairs)
