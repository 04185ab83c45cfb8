"""Simulator of step times: properties of all simulated machines, and effects of each kind of noise."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from statistics import fmean, median, stdev

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.noise.combinations import LOG_GAINS, Factors, decide
from tests.noise.simulator import SCENARIOS, SLOWEST, Machine, Scenario, needs_compiler
from tests.noise.trials import Cell, noise_pairs, races

pytestmark = needs_compiler

SILENT = Scenario(jitter=0.0, stalls=0.0, walk=0.0)
"""Machine without noise, except for the effect of memory addresses."""

STEPS = [0.0005, 0.005, 0.1, 2.0]


def walls(scenario: Scenario, step: float, updates: int, seed: int = 0) -> list[float]:
    return list(Machine(scenario, seed).block(step, updates).wall)


def updates_in(seconds: float, step: float) -> int:
    return max(8, round(seconds / step))


@settings(max_examples=40)
@given(st.sampled_from(sorted(SCENARIOS)), st.sampled_from(STEPS), st.integers(0, 10**6))
def test_cpu_time_never_exceeds_wall_time_and_both_clocks_advance(name: str, step: float, seed: int) -> None:
    machine = Machine(SCENARIOS[name], seed)
    start = 0.0
    for _ in range(3):
        block = machine.block(step, 4)
        assert 0 < block.cpu <= block.mean * (1 + 1e-9)
        assert machine.cpu <= machine.wall * (1 + 1e-9)
        assert machine.wall >= start + sum(block.wall)
        start = machine.wall


@given(st.sampled_from(sorted(SCENARIOS)), st.sampled_from(STEPS), st.integers(0, 10**6))
@settings(max_examples=20)
def test_times_repeat_with_the_seed_only(name: str, step: float, seed: int) -> None:
    first, again, other = (walls(SCENARIOS[name], step, 5, each) for each in (seed, seed, seed + 1))
    assert first == again != other


@pytest.mark.parametrize("step", STEPS)
def test_a_silent_machine_takes_the_time_of_the_step(step: float) -> None:
    block = Machine(SILENT, 0).block(step, 20)
    assert block.wall == pytest.approx([block.mean] * 20)
    assert block.cpu == pytest.approx(block.mean)
    assert block.mean == pytest.approx(step, rel=0.015)


@pytest.mark.parametrize("busy", [0, 1, 2, 4, 8])
@pytest.mark.parametrize("step", STEPS)
def test_busy_processes_take_their_share_of_two_cores(step: float, busy: int) -> None:
    times = walls(replace(SILENT, busy=busy), step, updates_in(60.0, step))
    assert fmean(times) / step == pytest.approx(max(1.0, (busy + 1) / 2), rel=0.12)


def test_updates_below_a_time_slice_are_mostly_undisturbed() -> None:
    times = sorted(walls(replace(SILENT, busy=4), 0.0003, 20_000))
    assert times[len(times) // 2] == pytest.approx(0.0003, rel=0.02)
    assert times[-1] > 0.003


def test_cpu_time_leaves_the_waits_out() -> None:
    block = Machine(replace(SILENT, busy=4), 0).block(0.005, 2000)
    assert block.cpu == pytest.approx(0.005, rel=0.02)
    contended = Machine(replace(SILENT, busy=4, contention=0.12), 0).block(0.005, 2000)
    assert contended.cpu == pytest.approx(0.005 * 1.06**2, rel=0.02)


def test_quiet_times_stay_within_their_jitter() -> None:
    logs = [math.log(wall) for wall in walls(SCENARIOS["quiet"], 0.005, 400)]
    assert median(abs(each - median(logs)) for each in logs) / 0.6745 == pytest.approx(0.01, rel=0.3)


@pytest.mark.parametrize(
    ("scenario", "expected"),
    [
        (replace(SILENT, stalls=4.0, stall_seconds=0.02), 1.08),
        (replace(SILENT, pause_every=0.25, pause_seconds=0.015), 1.06),
        (replace(SILENT, throttled=1.2), 1.1),
        (replace(SILENT, trend=0.01), 1.16),
    ],
    ids=["stalls", "pauses", "throttling", "trend"],
)
def test_each_kind_of_noise_adds_its_share(scenario: Scenario, expected: float) -> None:
    times = walls(scenario, 0.005, 6000)
    assert sum(times) / (0.005 * len(times)) == pytest.approx(expected, rel=0.04)


def test_a_share_of_the_updates_has_a_heavy_tail() -> None:
    times = walls(replace(SILENT, tail=0.05), 0.005, 20_000)
    assert sum(time > 0.01 for time in times) / len(times) == pytest.approx(0.05 * 2**-1.5, rel=0.2)
    assert sum(time > 0.05 for time in times) / len(times) == pytest.approx(0.05 * 10**-1.5, rel=0.5)


def test_load_that_comes_and_goes_has_quiet_and_slow_periods() -> None:
    machine = Machine(replace(SILENT, comes_and_goes=True), 0)
    means = [machine.block(0.005, 40).mean for _ in range(200)]
    assert min(means) == pytest.approx(0.005, rel=0.02)
    assert max(means) > 0.012


@pytest.mark.parametrize("gain", [0.5, 1.0, 2.0])
def test_pairs_have_the_true_gain(gain: float) -> None:
    cell = Cell(SILENT, 0.005, gain, math.inf)
    pairs: Iterator = cell.pairs(Machine(SILENT, 1), gain)
    logs = [math.log(old.mean / new.mean) for old, new in (next(pairs) for _ in range(100))]
    assert fmean(logs) == pytest.approx(math.log(gain), abs=4 * stdev(logs) / 10)


def test_a_block_is_as_long_as_the_tuners() -> None:
    assert [Cell(SILENT, step, 1.0, 1.0).updates for step in STEPS] == [40, 4, 1, 1]
    assert [Cell(SILENT, step, 1.0, 1.0).is_long for step in STEPS] == [False, False, False, True]


def test_a_stretch_is_as_long_as_the_tuners() -> None:
    assert [Cell(SILENT, step, 1.0, 1.0).stretch for step in STEPS] == [50, 10, 4, 1]


@pytest.mark.parametrize(
    ("step", "budget", "pairs"), [(0.005, 60.0, 8), (0.1, 60.0, 7), (0.2, 20.0, 3), (2.0, 60.0, 3)]
)
def test_the_noise_floor_has_as_many_pairs_as_the_tuners(step: float, budget: float, pairs: int) -> None:
    assert noise_pairs(step, budget) == pairs


@pytest.mark.parametrize(
    ("scenario", "step", "statistics"), [("4 busy", 0.005, {"wall", "cpu"}), ("4 busy", 2.0, {"wall"})]
)
def test_a_race_has_the_true_gain_and_the_floor_of_its_statistic(
    scenario: str, step: float, statistics: set[str]
) -> None:
    cell = Cell(replace(SCENARIOS[scenario], contention=0.0), step, 2.0, math.inf)
    by_statistic = races(cell, 3, 40)
    assert set(by_statistic) == statistics
    for race in by_statistic.values():
        error = stdev(race.differences) / math.sqrt(len(race.differences))
        assert fmean(race.differences) == pytest.approx(math.log(2.0), abs=4 * error)
        assert race.floor.pairs == noise_pairs(step, 60.0)
        assert race.floor.scale == pytest.approx(stdev(race.differences), rel=0.9)


def test_drift_ends_where_a_machine_would_stop() -> None:
    machine = Machine(replace(SILENT, trend=0.01), 0)
    blocks = [machine.block(2.0, 1) for _ in range(100)]
    assert blocks[-1].mean == pytest.approx(2.0 * SLOWEST, rel=0.02)


def test_factors_multiply_their_gains() -> None:
    factors = Factors.drawn(SILENT, 0.005, seed=3)
    assert sorted(factors.gains) == sorted(LOG_GAINS)
    assert math.exp(factors.best) == pytest.approx(2.36, abs=0.01)
    on = {0, 4, 7}
    expected = sum(factors.gains[i] for i in on)
    assert factors.log_gain(on) == pytest.approx(expected)
    ratios = [factors.block([]).mean / factors.block(on).mean for _ in range(50)]
    assert fmean(map(math.log, ratios)) == pytest.approx(expected, abs=0.003)


def test_interactions_add_to_the_gains_of_two_factors() -> None:
    factors = Factors.drawn(SILENT, 0.005, seed=3, interaction=0.3)
    assert len(factors.interactions) == 45
    assert factors.log_gain([2]) == factors.gains[2]
    assert factors.log_gain([5, 2]) == pytest.approx(factors.gains[5] + factors.gains[2] + factors.interactions[5, 2])
    assert factors.interactions[5, 2] != 0
    subsets = itertools.chain.from_iterable(itertools.combinations(range(10), count) for count in range(11))
    assert factors.best == pytest.approx(max(map(factors.log_gain, subsets)))


@pytest.mark.parametrize(
    ("scenario", "step", "seconds"), [("quiet", 0.005, 6.0), ("4 busy", 0.005, 6.0), ("quiet", 2.0, 60.0)]
)
def test_ten_factors_reach_nearly_their_best_speed(scenario: str, step: float, seconds: float) -> None:
    repeats, slower, speed = 20, 0, 0.0
    for seed in range(repeats):
        factors = Factors.drawn(SCENARIOS[scenario], step, seed)
        kept = decide(factors, seconds)
        assert factors.machine.wall < seconds + 8 * step + 0.5
        slower += any(factors.gains[i] < 0 for i in kept)
        speed += factors.log_gain(kept) / repeats
    assert slower <= 1
    assert math.exp(speed) >= 2.2
