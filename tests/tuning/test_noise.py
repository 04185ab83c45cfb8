"""Noise floor of a training, and the statistic with which trials compare blocks."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.tuning.pairs import MUCH_QUIETER, Noise, Pair, difference
from flatout.tuning.statistics import NoiseFloor
from flatout.tuning.stopwatch import Block, Statistic

times = st.floats(1e-4, 10.0)


def block(wall: float, cpu: float = 1.0, waits: int | None = 0) -> Block:
    return Block((wall,), cpu, waits)


def noisy(wall: float, cpu: float, waits: tuple[int | None, int | None] = (0, 0)) -> Pair:
    """Return a pair of the baseline with itself whose log ratios are ``wall`` and ``cpu``."""
    return block(math.exp(wall), math.exp(cpu), waits[0]), block(1.0, 1.0, waits[1])


@given(times, times)
def test_the_difference_changes_its_sign_with_the_roles(old: float, new: float) -> None:
    pair = block(old, cpu=new), block(new, cpu=old)
    assert difference(pair, "wall") == pytest.approx(math.log(old / new))
    assert difference(pair[::-1], "wall") == pytest.approx(-difference(pair, "wall"))
    assert difference(pair, "cpu") == pytest.approx(-difference(pair, "wall"))


def test_each_statistic_has_its_floor() -> None:
    noise = Noise.of([noisy(0.3, 0.01), noisy(-0.4, 0.02)], one_thread=True)
    assert noise.floors["wall"] == NoiseFloor(pytest.approx(math.sqrt(0.125)), 2)
    assert noise.floors["cpu"] == NoiseFloor(pytest.approx(math.sqrt(0.00025)), 2)


def test_the_mean_of_many_updates_has_a_floor_besides_their_quartile() -> None:
    stalled, quiet = Block((1.0, 1.0, 1.0, 1.0, 6.0), 1.0, 0), Block((1.0,) * 5, 1.0, 0)
    noise = Noise.of([(stalled, quiet), (quiet, stalled)], one_thread=True)
    assert noise.mean == NoiseFloor(pytest.approx(math.log(2)), 2)
    assert noise.floors["wall"] == NoiseFloor(0.0, 2)


@pytest.mark.parametrize(
    ("waits", "counts"),
    [
        ([(0, 0), (0, 0)], True),
        ([(0, 0), (3, 1)], True),
        ([(5, 0), (0, 2)], True),
        ([(0, 2), (1, 1)], False),
        ([(None, None), (None, None)], False),
    ],
)
def test_cpu_time_counts_unless_most_blocks_wait(waits: list[tuple[int | None, int | None]], counts: bool) -> None:
    pairs = [noisy(0.3, 0.01, each) for each in waits]
    assert Noise.of(pairs, one_thread=True).cpu_counts is counts
    assert not Noise.of(pairs, one_thread=False).cpu_counts


def test_cpu_time_that_a_coarse_clock_misses_does_not_count() -> None:
    noise = Noise.of([(block(2.0, cpu=0.0), block(1.0, cpu=0.015))] * 2, one_thread=True)
    assert set(noise.floors) == {"wall"}
    assert noise.statistic(keeps_cpu_time=True) == "wall"


@pytest.mark.parametrize(
    ("cpu", "cpu_counts", "keeps_cpu_time", "statistic"),
    [
        (MUCH_QUIETER - 0.01, True, True, "cpu"),
        (MUCH_QUIETER + 0.01, True, True, "wall"),
        (0.01, False, True, "wall"),
        (0.01, True, False, "wall"),
    ],
)
def test_cpu_time_represents_blocks_where_it_is_much_quieter_and_comparable(
    cpu: float, cpu_counts: bool, keeps_cpu_time: bool, statistic: str
) -> None:
    floors: dict[Statistic, NoiseFloor] = {"wall": NoiseFloor(1.0, 8)}
    if cpu_counts:
        floors["cpu"] = NoiseFloor(cpu, 8)
    noise = Noise(floors)
    assert noise.statistic(keeps_cpu_time=keeps_cpu_time) == statistic


def test_a_quartile_represents_the_wall_time_of_many_updates_and_the_mean_that_of_few() -> None:
    assert Block((1.0, 9.0, 2.0), 0.5).time("wall") == 4.0
    assert Block((9.0, 1.0, 50.0, 2.0), 0.5).time("wall") == 2.0
    assert Block(tuple(map(float, range(41))), 0.5).time("wall") == 10.0
    assert Block((1.0, 9.0, 2.0), 0.5).time("cpu") == 0.5


@given(st.lists(times, min_size=1, max_size=50), times, st.floats(0.1, 10.0))
def test_a_scaled_block_has_scaled_times(wall: list[float], cpu: float, factor: float) -> None:
    plain = Block(tuple(wall), cpu, sleeps=3)
    scaled = plain.scaled(factor)
    assert scaled.time("wall") == pytest.approx(factor * plain.time("wall"))
    assert (scaled.mean, scaled.cpu) == (pytest.approx(factor * plain.mean), factor * cpu)
    assert scaled.sleeps == 3


@given(st.lists(times, min_size=4, max_size=50), st.data())
def test_a_disturbed_update_hardly_moves_the_quartile(wall: list[float], data: st.DataObject) -> None:
    disturbed = list(wall)
    disturbed[data.draw(st.integers(0, len(wall) - 1))] += 1000.0
    quartile, time = Block(tuple(wall), 1.0).time("wall"), Block(tuple(disturbed), 1.0).time("wall")
    assert quartile <= time <= sorted(wall)[len(wall) // 2]
