"""Factorial trial: combinations, estimates, and decisions about many factors together."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.tuning.acceptance import KEEP_ABOVE
from flatout.tuning.statistics import CHECK_EVERY, PRIOR, Estimate, Factorial, NoiseFloor
from tests.noise.combinations import LOG_GAINS

QUIET, NOISY = NoiseFloor(0.003, 8), NoiseFloor(0.3, 8)
GROUPS = [["a"], ["b1", "b2"], ["c"]]

Gains = Mapping[str, float]
log_gains = st.floats(-0.5, 0.5)


def open_factors(trial: Factorial[str]) -> set[str]:
    return set(itertools.chain(*trial.open))


def run(trial: Factorial[str], gains: Gains, pairs: int, noise: float = 0.0, seed: int = 0) -> Factorial[str]:
    """Add random combinations of factors with these log gains, and decide."""
    draw = random.Random(seed)
    for _ in range(pairs):
        one, other = trial.combinations()
        gain = sum(gains[factor] for factor in one) - sum(gains[factor] for factor in other)
        trial.add(one, other, gain + draw.gauss(0.0, noise))
    trial.close()
    return trial


def look_at(trial: Factorial[str], gains: Gains) -> Factorial[str]:
    for factor, gain in gains.items():
        trial.add([factor], [], gain)
    return trial


@given(st.integers(0, 10**6))
def test_a_combination_has_one_of_each_alternatives_and_its_complement_has_none(seed: int) -> None:
    trial = Factorial(GROUPS, QUIET, seed)
    for _ in range(5):
        one, other = trial.combinations()
        assert not set(one) & set(other)
        for group in GROUPS:
            assert len(set(group) & {*one, *other}) == 1


def test_each_factor_is_in_each_combination_as_often_as_the_others() -> None:
    trial = Factorial(GROUPS, QUIET)
    pairs = [trial.combinations() for _ in range(1000)]
    for factor, expected in {"a": 500, "b1": 250, "b2": 250, "c": 500}.items():
        for side in (0, 1):
            assert sum(factor in pair[side] for pair in pairs) == pytest.approx(expected, abs=60)
    together = sum(("a" in one) == ("c" in one) for one, _ in pairs)
    assert together == pytest.approx(500, abs=60)


def test_combinations_repeat_with_the_seed_and_draw_no_global_random_state() -> None:
    before = random.getstate(), np.random.get_state()[1].tobytes()
    first, second, third = ([Factorial(GROUPS, QUIET, seed).combinations() for _ in range(9)] for seed in (1, 1, 2))
    assert first == second != third
    run(Factorial(GROUPS, QUIET), dict.fromkeys(("a", "b1", "b2", "c"), 0.1), 20)
    assert (random.getstate(), np.random.get_state()[1].tobytes()) == before


@given(st.tuples(log_gains, log_gains, log_gains), st.tuples(log_gains, log_gains, log_gains))
def test_an_estimate_is_the_effect_averaged_over_the_other_factors(
    alone: Sequence[float], both: Sequence[float]
) -> None:
    together = dict(zip(itertools.combinations(range(3), 2), both, strict=True))

    def log_gain(on: tuple[int, ...]) -> float:
        return sum(alone[i] for i in on) + sum(gain for pair, gain in together.items() if {*pair} <= {*on})

    trial = Factorial([[0], [1], [2]], NoiseFloor(1e-3, 8))
    for bits in itertools.product((False, True), repeat=3):
        one, other = (tuple(i for i in range(3) if bits[i] is side) for side in (True, False))
        trial.add(one, other, log_gain(one) - log_gain(other))
    for i, estimate in trial.estimates().items():
        averaged = alone[i] + sum(gain for pair, gain in together.items() if i in pair) / 2
        assert estimate.mean == pytest.approx(averaged, abs=1e-3)


def test_what_no_pair_informs_about_has_the_prior() -> None:
    trial = Factorial(GROUPS, QUIET)
    trial.add(["a"], [], 0.4)
    estimates = trial.estimates()
    for factor in ("b1", "b2", "c"):
        assert estimates[factor][:2] == (0.0, pytest.approx(PRIOR))
    assert estimates["a"].mean == pytest.approx(0.4, rel=1e-3)
    assert (trial.pairs_of("a"), trial.pairs_of("b1")) == (1, 0)


def test_the_deviation_shrinks_with_pairs_and_follows_the_noise() -> None:
    def deviation(pairs: int, noise: float) -> float:
        trial = Factorial([["a"]], NoiseFloor(noise, 8))
        for i in range(pairs):
            trial.add(["a"], [], 0.02 + noise * (-1) ** i)  # about as noisy as the floor
        return trial.estimates()["a"].deviation

    assert deviation(16, 0.01) == pytest.approx(0.01 / 4, rel=0.1)
    assert deviation(64, 0.01) == pytest.approx(deviation(16, 0.01) / 2, rel=0.1)
    assert deviation(16, 0.1) == pytest.approx(10 * deviation(16, 0.01), rel=0.1)


@pytest.mark.parametrize(("freedom", "quantile"), [(3, 4.541), (4, 3.747), (8, 2.896), (30, 2.457), (1e6, 2.326)])
def test_bounds_have_the_quantiles_of_the_t_distribution(freedom: float, quantile: float) -> None:
    estimate = Estimate(0.5, 0.1, freedom)
    assert (estimate.high(2.326) - 0.5) / 0.1 == pytest.approx(quantile, rel=0.03)
    assert (0.5 - estimate.low(2.326)) / 0.1 == pytest.approx(quantile, rel=0.03)


def test_noise_that_the_floor_has_not_seen_counts() -> None:
    quiet = run(Factorial([["a"]], QUIET), {"a": 0.1}, 20)
    noisy = run(Factorial([["a"]], QUIET), {"a": 0.1}, 20, noise=0.2)
    assert noisy.estimates()["a"].deviation > 5 * quiet.estimates()["a"].deviation


def test_factors_that_pay_are_kept_and_the_others_are_off() -> None:
    trial = run(Factorial(GROUPS, QUIET), {"a": 0.3, "b1": -0.1, "b2": -0.2, "c": 0.1}, 40, noise=0.003)
    assert set(trial.kept) == {"a", "c"}
    assert trial.open == []


@pytest.mark.parametrize(("first", "second", "kept"), [(0.1, 0.3, "b2"), (0.3, 0.1, "b1"), (-0.1, 0.1, "b2")])
def test_the_best_alternative_is_kept_alone(first: float, second: float, kept: str) -> None:
    trial = run(Factorial([["b1", "b2"]], QUIET), {"b1": first, "b2": second}, 40, noise=0.003)
    assert trial.kept == [kept]
    assert trial.open == []


def test_equal_alternatives_are_decided_at_the_end_only() -> None:
    trial = Factorial([["b1", "b2"]], QUIET)
    for i in range(10):
        trial.add([("b1", "b2")[i % 2]], [], 0.3)
    assert (trial.kept, trial.open) == ([], [["b1", "b2"]])
    trial.close()
    assert len(trial.kept) == 1
    assert trial.open == []


def test_kept_factors_are_in_both_combinations() -> None:
    trial = look_at(Factorial([["a"], ["b"]], NoiseFloor(0.05, 8)), {"a": 0.5, "b": math.log(KEEP_ABOVE)})
    assert trial.kept == ["a"]
    assert open_factors(trial) == {"b"}
    one, other = trial.combinations()
    assert sorted([one, other]) == [["a"], ["a", "b"]]
    trial.add(one, other, 0.0)
    assert (trial.pairs_of("a"), trial.pairs_of("b")) == (1, 2)


def test_a_hopeless_factor_is_off_after_its_first_pair() -> None:
    trial = look_at(Factorial([["a"], ["b"]], NoiseFloor(0.1, 8)), {"a": -1.5, "b": 0.1})
    assert open_factors(trial) == {"b"}
    assert all("a" not in {*one, *other} for one, other in (trial.combinations() for _ in range(20)))


def test_decisions_are_checked_every_few_pairs() -> None:
    trial = Factorial([["a"]], QUIET)
    for _ in range(CHECK_EVERY - 1):
        trial.add(["a"], [], 1.0)
    assert (trial.kept, trial.open) == ([], [["a"]])
    trial.add(["a"], [], 1.0)
    assert (trial.kept, trial.open) == (["a"], [])


@pytest.mark.parametrize("gain", [0.5, 0.0, -0.5])
def test_factors_that_were_never_apart_stay_undecided(gain: float) -> None:
    trial = Factorial([["a"], ["b"]], QUIET)
    for _ in range(20):
        trial.add(["a", "b"], [], gain)
    trial.close()
    assert trial.kept == []
    assert open_factors(trial) == {"a", "b"}


def test_the_scale_is_pooled_from_the_floor_and_from_the_residuals() -> None:
    trial = Factorial([["a"]], QUIET)
    for i in range(10):
        trial.add(["a"], [], 0.2 * (i % 2))
    estimate = trial.estimates()["a"]
    freedom = QUIET.pairs + 10 - 1
    scale = math.sqrt((QUIET.pairs * QUIET.scale**2 + 10 * 0.1**2) / freedom)
    assert estimate.mean == pytest.approx(0.1, rel=1e-2)
    assert estimate.freedom == pytest.approx(freedom, rel=1e-3)
    assert estimate.deviation == pytest.approx(scale / math.sqrt(10), rel=1e-2)


def test_a_close_call_stays_undecided() -> None:
    trial = run(Factorial([["a"], ["b"]], NOISY), {"a": 0.1, "b": -0.1}, 4)
    assert trial.kept == []
    assert open_factors(trial) == {"a", "b"}


def test_a_trial_without_pairs_decides_nothing() -> None:
    trial = Factorial(GROUPS, QUIET)
    trial.close()
    assert (trial.kept, trial.open) == ([], GROUPS)


@pytest.mark.parametrize("noise", [0.01, 0.05])
def test_ten_factors_reach_nearly_the_best_speed_and_hardly_ever_keep_a_slower_one(noise: float) -> None:
    repeats, slower, speed = 40, 0, 0.0
    for seed in range(repeats):
        draw = random.Random(f"gains {seed}")
        gains = dict(zip("abcdefghij", draw.sample(LOG_GAINS, len(LOG_GAINS)), strict=True))
        floor = NoiseFloor.of([draw.gauss(0.0, noise) for _ in range(8)])
        trial = look_at(Factorial([[factor] for factor in gains], floor, seed), gains)
        kept = run(trial, gains, 30, noise, seed).kept
        slower += any(gains[factor] < 0 for factor in kept)
        speed += sum(gains[factor] for factor in kept) / repeats
    assert slower <= 1
    assert math.exp(speed) > 2.25
