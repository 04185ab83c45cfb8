"""The pytest plugin: paired races in a user's tests, with simulated times."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest

from flatout.testing import FEWEST_PAIRS, PairedRace
from tests.clock import Clock, simulated_time

pytest_plugins = ["pytester"]


@pytest.fixture
def clock() -> Iterator[Clock]:
    with simulated_time() as clock:
        yield clock


def work(clock: Clock, seconds: float, noise: float = 0.0, seed: int = 0) -> Callable[[], None]:
    draw = random.Random(seed)
    return lambda: clock.advance(seconds * draw.lognormvariate(0.0, noise))


@pytest.mark.parametrize("factor", [0.97, 1.5, 1.9])
def test_a_faster_function_passes(clock: Clock, factor: float) -> None:
    race = PairedRace(work(clock, 0.2, 0.01), work(clock, 0.1, 0.01, 1))
    race.at_least(factor)
    assert race.gain.low < 2 < race.gain.high


@pytest.mark.parametrize("factor", [1.1, 2.0])
def test_a_slower_function_fails(clock: Clock, factor: float) -> None:
    race = PairedRace(work(clock, 0.1, 0.01), work(clock, 0.1, 0.01, 1))
    with pytest.raises(AssertionError, match=r"got 1\.0"):
        race.at_least(factor)


@pytest.mark.parametrize(("noise", "factor"), [(0.8, 1.1), (0.01, 1.0)])
def test_a_race_that_cannot_tell_skips_at_its_time_limit(clock: Clock, noise: float, factor: float) -> None:
    race = PairedRace(work(clock, 0.1, noise), work(clock, 0.1, noise, 1), seconds=5.0)
    begun = clock.now
    with pytest.raises(pytest.skip.Exception, match="noisy"):
        race.at_least(factor)
    assert race.gain.low < factor < race.gain.high
    assert 5.0 < clock.now - begun < 10.0


def test_a_clear_race_ends_early(clock: Clock) -> None:
    race = PairedRace(work(clock, 0.4, 0.01), work(clock, 0.1, 0.01, 1), seconds=1e6)
    race.at_least(2.0)
    assert race.pairs == FEWEST_PAIRS


def test_another_question_adds_pairs(clock: Clock) -> None:
    race = PairedRace(work(clock, 0.13, 0.05), work(clock, 0.1, 0.05, 1), seconds=100.0)
    race.at_least(1.0)
    first = race.pairs
    race.at_least(1.25)
    assert race.pairs > first


def test_short_calls_are_timed_in_blocks(clock: Clock) -> None:
    calls = [0, 0]

    def counted(i: int) -> Callable[[], None]:
        def call() -> None:
            calls[i] += 1
            clock.advance(1e-3)

        return call

    race = PairedRace(counted(0), counted(1))
    with pytest.raises(AssertionError):
        race.at_least(3.0)
    assert calls[1] > 50 * race.pairs
    assert calls[0] > calls[1]  # ``before`` measures the noise of the machine


def test_a_measurement_ends_when_its_interval_is_narrow(clock: Clock) -> None:
    race = PairedRace(work(clock, 0.2, 0.05), work(clock, 0.1, 0.05, 1), seconds=1e6)
    wide = race.measure(0.2)
    pairs = race.pairs
    narrow = race.measure(0.05)
    assert wide.high <= 1.2 * wide.low
    assert narrow.high <= 1.05 * narrow.low
    assert narrow.low < 2 < narrow.high
    assert len(race.block_seconds) == race.pairs > pairs


def test_a_measurement_ends_at_its_time_limit(clock: Clock) -> None:
    race = PairedRace(work(clock, 0.1, 0.8), work(clock, 0.1, 0.8, 1), seconds=5.0)
    begun = clock.now
    assert race.measure(0.01).interval is not None
    assert 5.0 < clock.now - begun < 10.0


def test_a_width_must_be_positive() -> None:
    with pytest.raises(ValueError, match="width must be > 0"):
        PairedRace(int, int).measure(0)


@pytest.mark.parametrize(("arguments", "name"), [({"seconds": 0}, "seconds"), ({}, "factor")])
def test_wrong_arguments_are_refused(arguments: dict[str, float], name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be > 0"):
        PairedRace(int, int, **arguments).at_least(0.0)


TESTS = """
import time
import pytest
from tests.clock import simulated_time

@pytest.fixture(autouse=True)
def simulated():
    with simulated_time(): yield

def slow(): time.sleep(4e-3)
def fast(): time.sleep(1e-3)

def test_passes(flatout_race): flatout_race(slow, fast).at_least(1.2)
def test_fails(flatout_race): flatout_race(fast, slow).at_least(1.2)
def test_skips(flatout_race): flatout_race(fast, fast, seconds=0.01).at_least(1.0)
def test_starts_none(flatout_race): pass
"""


def test_the_plugin_shows_every_race(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(TESTS)
    result = pytester.runpytest_inprocess("-p", "no:randomly", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=2, failed=1, skipped=1)
    lines = [line for line in result.outlines if line.startswith("test_the_plugin") and "required" in line]
    assert [line.split(":")[2] for line in lines] == ["test_passes", "test_fails", "test_skips"]


def test_the_plugin_does_not_import_torch(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("import sys\ndef test_torch(): assert 'torch' not in sys.modules")
    pytester.runpytest_subprocess("-p", "no:xdist").assert_outcomes(passed=1)
