"""Recorded step times, compared with simulated noise, and the tuner's decisions on recordings."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import numpy as np
import pytest

from flatout.tuning.pairs import Noise, Pair, PairedTrial, difference
from flatout.tuning.stopwatch import Block, Statistic
from tests.noise.record import BUSY, STEPS
from tests.noise.simulator import SCENARIOS, Machine, needs_compiler
from tests.noise.trials import Cell

RECORDINGS = np.load(Path(__file__).with_name("recordings.npz"))
SCENARIO_OF = {0: "shared host", 2: "2 busy", 4: "4 busy", 8: "8 busy"}
"""Scenario of the simulator for a recording, by its number of busy processes."""

LARGEST_FACTOR = 3.0
"""Largest factor between the spreads of recorded and simulated blocks."""


def recorded(step: str, busy: int, threads: int = 1) -> np.ndarray:
    """Return wall time, CPU time and voluntary switches of consecutive updates."""
    return RECORDINGS[f"{step}, {threads} thread{'s' * (threads > 1)}, {busy} busy"].astype(float)


def seconds_of(step: str) -> float:
    """Return the median time of an update without busy processes."""
    return float(np.median(recorded(step, 0)[:, 0]))


def recorded_blocks(step: str, busy: int, threads: int = 1) -> list[Block]:
    """Return the blocks that the tuner would time in a recording, each after an untimed update."""
    cell = Cell(SCENARIOS["quiet"], seconds_of(step), 1.0, math.inf)
    times, untimed = recorded(step, busy, threads), 0 if cell.is_long else 1
    starts = range(untimed, len(times) - cell.updates + 1, cell.updates + untimed)
    blocks = [times[start : start + cell.updates] for start in starts]
    return [Block(tuple(block[:, 0]), block[:, 1].mean(), int(block[:, 2].sum())) for block in blocks]


def simulated_blocks(step: str, busy: int) -> list[Block]:
    scenario = SCENARIOS[SCENARIO_OF[busy]]
    cell, machine = Cell(scenario, seconds_of(step), 1.0, math.inf), Machine(scenario, busy)
    count = min(400, round(120 / cell.step))
    return [machine.block(cell.step, cell.updates, warm_up=not cell.is_long) for _ in range(count)]


def pairs_of(blocks: list[Block]) -> list[Pair]:
    return list(zip(blocks[::2], blocks[1::2], strict=False))


def spread(blocks: list[Block], statistic: Statistic) -> float:
    """Return the robust standard deviation of the log ratio of neighboring blocks."""
    return median(abs(difference(pair, statistic)) for pair in itertools.pairwise(blocks)) / 0.6745


def test_recordings_cover_every_step_with_every_number_of_busy_processes() -> None:
    keys = {
        f"{step}, {count} thread{'s' * (count > 1)}, {busy} busy"
        for step, (*_, threads) in STEPS.items()
        for count, busy in itertools.product(threads, BUSY)
    }
    assert set(RECORDINGS) == keys
    for key in keys:
        times = RECORDINGS[key]
        assert times.dtype == np.float32
        assert times.ndim == 2
        assert (times[:, :2] > 0).all()


@needs_compiler
@pytest.mark.parametrize("busy", SCENARIO_OF)
@pytest.mark.parametrize("step", STEPS)
def test_simulated_wall_time_is_about_as_noisy_as_recorded(step: str, busy: int) -> None:
    ratio = spread(simulated_blocks(step, busy), "wall") / spread(recorded_blocks(step, busy), "wall")
    assert 1 / LARGEST_FACTOR < ratio < LARGEST_FACTOR


@needs_compiler
@pytest.mark.parametrize("busy", SCENARIO_OF)
@pytest.mark.parametrize("step", list(STEPS)[1:])  # the tuner compares the shortest step by wall time
def test_simulated_cpu_time_is_about_as_noisy_as_recorded(step: str, busy: int) -> None:
    ratio = spread(simulated_blocks(step, busy), "cpu") / spread(recorded_blocks(step, busy), "cpu")
    assert 1 / LARGEST_FACTOR < ratio < LARGEST_FACTOR


@needs_compiler
@pytest.mark.parametrize("busy", SCENARIO_OF)
@pytest.mark.parametrize("step", STEPS)
def test_simulated_updates_take_as_long_as_recorded(step: str, busy: int) -> None:
    wall, cpu, _ = recorded(step, busy).mean(axis=0)
    blocks = simulated_blocks(step, busy)
    assert 0.6 < np.mean([block.mean for block in blocks]) / wall < 1.4
    assert 0.7 < np.mean([block.cpu for block in blocks]) / cpu < 1.3


@pytest.mark.parametrize(
    ("step", "busy", "statistic"),
    [
        ("0.3 ms", 0, "wall"),
        ("0.3 ms", 4, "wall"),
        ("0.3 ms", 8, "wall"),
        ("5 ms", 2, "cpu"),
        ("5 ms", 4, "cpu"),
        ("5 ms", 8, "cpu"),
        ("100 ms", 2, "cpu"),
        ("100 ms", 8, "cpu"),
        ("2 s", 2, "cpu"),
    ],
)
def test_the_quieter_statistic_is_chosen_on_recordings(step: str, busy: int, statistic: str) -> None:
    noise = Noise.of(pairs_of(recorded_blocks(step, busy)), one_thread=True)
    assert noise.statistic(keeps_cpu_time=True) == statistic


@pytest.mark.parametrize("busy", BUSY)
@pytest.mark.parametrize("step", STEPS)
def test_a_step_with_one_thread_never_waits(step: str, busy: int) -> None:
    assert recorded(step, busy)[:, 2].mean() < 0.01


def recorded_trials(step: str, busy: int, gain: float) -> Iterator[PairedTrial]:
    """Yield trials of a candidate with this true gain on recorded blocks, each with the noise floor before it."""
    pairs = pairs_of(recorded_blocks(step, busy))
    floor_pairs = 3 if step == "2 s" else 8
    for start in range(0, len(pairs) - floor_pairs - 3, floor_pairs):
        trial = PairedTrial(Noise.of(pairs[start : start + floor_pairs], one_thread=True))
        for old, new in pairs[start + floor_pairs :]:
            trial.add((old, new.scaled(1 / gain)))
            if trial.verdict != "undecided":
                break
        yield trial


@pytest.mark.parametrize("gain", [0.9, 0.98, 1.0])
def test_candidates_that_are_not_faster_are_not_kept_on_recordings(gain: float) -> None:
    trials = [trial for step, busy in itertools.product(STEPS, BUSY) for trial in recorded_trials(step, busy, gain)]
    kept = [trial for trial in trials if trial.verdict == "faster"]
    assert len(trials) > 100
    assert len(kept) <= 0.02 * len(trials)


@pytest.mark.parametrize("step", ["5 ms", "100 ms"])
def test_three_recorded_pairs_show_a_factor_of_two_with_busy_processes(step: str) -> None:
    trials = [trial for busy in BUSY for trial in recorded_trials(step, busy, 2.0)]
    quick = [trial for trial in trials if trial.verdict == "faster" and len(trial.pairs) <= 3]
    assert len(quick) >= 0.9 * len(trials) > 10
