"""Paired trials on simulated machines: order, end, and kept candidates."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from flatout.tuning.acceptance import DROP_BELOW, KEEP_ABOVE
from flatout.tuning.pairs import MOST_PAIRS, Noise, PairedTrial
from flatout.tuning.statistics import FEWEST_PAIRS, NoiseFloor
from flatout.tuning.stopwatch import Block
from tests.clock import Clock
from tests.noise.simulator import SCENARIOS, needs_compiler
from tests.noise.trials import Cell, Result, trial

QUIET = Noise({"wall": NoiseFloor(0.01, 8), "cpu": NoiseFloor(0.001, 8)})
NOISY = Noise({"wall": NoiseFloor(10.0, 8)})
NEVER = math.inf


def paired(wall: float, cpu: float = 1.0, *, pairs: int = 3, keeps_cpu_time: bool = True) -> PairedTrial:
    """Return a trial of a candidate with these gains in wall time and in CPU time."""
    result = PairedTrial(QUIET, keeps_cpu_time=keeps_cpu_time)
    for _ in range(pairs):
        result.add((Block((wall,), cpu), Block((1.0,), 1.0)))
    return result


def measure(seconds: float, name: str = "", log: list[tuple[str, int]] | None = None) -> Callable[[int], Block]:
    def block(i: int) -> Block:
        if log is not None:
            log.append((name, i))
        return Block((seconds,), seconds)

    return block


def run(old: float, new: float, soft: float = NEVER, hard: float = NEVER) -> PairedTrial:
    result = PairedTrial(QUIET)
    result.run(measure(old), measure(new), soft, hard)
    return result


def test_a_trial_compares_cpu_time_only_if_the_candidate_keeps_it() -> None:
    assert paired(wall=0.5, cpu=2.0).verdict == "faster"
    assert paired(wall=0.5, cpu=2.0, keeps_cpu_time=False).verdict == "not faster"


@pytest.mark.parametrize(
    ("gain", "verdict"),
    [
        (2.0, "faster"),
        (1.04, "faster"),
        ((KEEP_ABOVE + DROP_BELOW) / 2, "undecided"),
        (1.0, "not faster"),
        (0.5, "not faster"),
    ],
)
def test_the_verdict_follows_the_interval(gain: float, verdict: str) -> None:
    result = paired(gain, keeps_cpu_time=False)
    assert result.verdict == verdict
    assert result.gain.ratio == pytest.approx(gain)
    assert result.gain.low < gain < result.gain.high


def test_without_an_interval_there_is_no_verdict() -> None:
    one = paired(1.0, cpu=9.0, pairs=1)
    assert (one.verdict, one.gain.low, one.gain.high) == ("undecided", 0.0, math.inf)
    assert one.gain.ratio == pytest.approx(9.0)
    assert math.isnan(paired(1.0, pairs=0).gain.ratio)
    assert paired(1.0, pairs=0).verdict == "undecided"


def test_both_configurations_run_block_by_block_in_random_order() -> None:
    log: list[tuple[str, int]] = []
    result = PairedTrial(NOISY)
    result.run(measure(1.2, "old", log), measure(1.0, "new", log), NEVER, NEVER)
    assert [i for _, i in log[::2]] == [i for _, i in log[1::2]] == list(range(MOST_PAIRS))
    first, second = [name for name, _ in log[::2]], [name for name, _ in log[1::2]]
    assert all({*pair} == {"old", "new"} for pair in zip(first, second, strict=True))
    assert 0.3 < first.count("old") / len(first) < 0.7
    assert result.gain.ratio == pytest.approx(1.2)


def test_alternating_pairs_begin_with_the_configuration_that_ended_the_last_pair() -> None:
    log: list[tuple[str, int]] = []
    PairedTrial(NOISY).run(measure(1.2, "A", log), measure(1.0, "B", log), NEVER, NEVER, alternates=True)
    assert "".join(name for name, _ in log[:12]) == "ABBAABBAABBA"


def test_a_clear_verdict_ends_the_trial() -> None:
    assert len(run(2.0, 1.0).pairs) == 2
    assert len(run(1.0, 2.0).pairs) == 2


def test_the_hard_deadline_leaves_one_pair_which_shows_nothing(clock: Clock) -> None:
    result = run(2.0, 1.0, soft=clock.now, hard=clock.now)
    assert (len(result.pairs), result.verdict) == (1, "undecided")
    result.run(measure(2.0), measure(1.0), NEVER, NEVER)
    assert (len(result.pairs), result.verdict) == (2, "faster")


@pytest.mark.parametrize(("seconds", "pairs"), [(1.0, FEWEST_PAIRS), (1e6, MOST_PAIRS)])
def test_a_close_call_passes_the_soft_deadline_only_if_the_time_lasts_for_it(
    clock: Clock, seconds: float, pairs: int
) -> None:
    result = PairedTrial(NOISY)
    result.run(measure(1.2), measure(1.0), clock.now, clock.now + seconds)
    assert len(result.pairs) == pairs


def test_the_fewest_pairs_are_added_after_the_hard_deadline() -> None:
    result = PairedTrial(NOISY)
    result.run(measure(1.2), measure(1.0), soft=0.0, hard=0.0, fewest=3)
    assert len(result.pairs) == 3


def test_the_record_has_milliseconds_of_a_step_by_the_wall_clock() -> None:
    record = paired(wall=0.5, cpu=2.0).record("x", steps=5)
    assert (record.candidate, record.pairs, record.noise) == ("x", 3, 0.001)  # the noise of the CPU time
    assert record.baseline_ms == pytest.approx(100.0)
    assert record.candidate_ms == pytest.approx(50.0)
    assert record.gain is not None
    assert record.gain.ratio == pytest.approx(2.0)


REPEATS = 150


def repeated(scenario: str, step: float, gain: float) -> list[Result]:
    limit = 48.0 if step > 0.5 else 10.0
    return [trial(Cell(SCENARIOS[scenario], step, gain, limit), seed) for seed in range(REPEATS)]


def share(results: list[Result], verdict: str = "faster") -> float:
    return sum(result.verdict == verdict for result in results) / len(results)


@needs_compiler
@pytest.mark.parametrize("step", [0.0005, 0.005, 0.1, 2.0])
@pytest.mark.parametrize("scenario", ["quiet", "4 busy", "come and go"])
def test_slower_candidates_are_not_kept_and_the_interval_holds_the_truth(scenario: str, step: float) -> None:
    results = repeated(scenario, step, 0.98)
    assert share(results) <= 0.02
    assert sum(result.low <= 0.98 <= result.high for result in results) / REPEATS >= 0.96


@needs_compiler
@pytest.mark.parametrize("scenario", ["quiet", "shared host", "jitter", "4 busy", "heavy tails"])
def test_five_percent_are_found_with_steps_of_five_milliseconds(scenario: str) -> None:
    assert share(repeated(scenario, 0.005, 1.05)) >= 0.95


@needs_compiler
@pytest.mark.parametrize("step", [0.0005, 0.005, 0.1, 2.0])
def test_a_factor_of_two_takes_at_most_three_pairs_on_a_quiet_machine(step: float) -> None:
    for gain, verdict in ((2.0, "faster"), (0.5, "not faster")):
        results = repeated("quiet", step, gain)
        assert share(results, verdict) == 1.0
        assert max(result.pairs for result in results) <= 3
