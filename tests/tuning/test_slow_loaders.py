"""Decisions about loaders whose batches take long, within a short budget, on a simulated clock."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils.data import DataLoader

import flatout
from flatout.report.model import Gain
from flatout.run import Run
from flatout.tuning import race, statistics
from flatout.tuning.bench import LONG_UPDATE, Bench
from flatout.tuning.statistics import FEWEST_PAIRS, NoiseFloor
from tests.clock import Clock, TimedSamples, TimedStep
from tests.jobs import make_job, only
from tests.reasons import reasons

SAMPLE, STEP = 0.1, 0.1
"""Seconds of a sample, and of a step. A batch has 32 samples, and an epoch two batches."""

SHORT, LONG = 55.0, 500.0
"""Budgets in seconds: 17 batches, and 150."""


def tuned(clock: Clock, budget: float) -> Run:
    model, _, opt = make_job()
    loader = DataLoader(TimedSamples(clock, SAMPLE), batch_size=32)
    step = TimedStep(clock, STEP)
    return flatout.optimize(
        model, loader, opt, step, techniques=only("in_memory"), budget=budget, expected_steps=10**6, plan=None
    )


def test_a_slow_loader_is_replaced_within_its_budget(clock: Clock) -> None:
    run = tuned(clock, SHORT)
    row = run.report.row("in_memory")
    assert row.status == "kept"
    assert row.gain is not None
    assert 10 < row.gain.ratio < 33  # without the samples that each of these short epochs reads again, 33
    assert run.report.summary.tuning_seconds <= SHORT
    assert run.report.summary.before is not None
    assert run.report.summary.before.loader_per_second == pytest.approx(1 / SAMPLE, rel=0.01)  # from the pace


def test_the_trial_of_the_only_technique_replaces_a_race_that_has_no_time_left(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(race, "LARGE_GAIN", 1000.0)  # the race takes five pairs
    short, long = (tuned(clock, budget).report for budget in (SHORT, LONG))
    assert short.summary.gain == short.row("in_memory").gain
    assert long.summary.gain is not None
    assert long.summary.gain != long.row("in_memory").gain
    for summary in (short.summary, long.summary):
        assert summary.before is not None
        assert summary.after is not None
        assert summary.before.total_ms == pytest.approx(3300, rel=0.01)
        assert 100 <= summary.after.total_ms < 330


@pytest.mark.parametrize(("lows", "fewest"), [([5.0], 3), ([1.4], 5), ([1.3, 1.3], 3), ([None, 1.02], 5), ([None], 5)])
def test_a_race_of_a_large_gain_or_of_long_updates_needs_fewer_pairs(lows: list[float | None], fewest: int) -> None:
    won = [SimpleNamespace(row=SimpleNamespace(gain=None if low is None else Gain(low, low, low))) for low in lows]
    bench: Any = SimpleNamespace(ledger=SimpleNamespace(won=won), update_seconds=LONG_UPDATE)
    assert race._fewest_pairs(bench) == fewest
    bench.update_seconds *= 1.1
    assert race._fewest_pairs(bench) == 3


@pytest.mark.parametrize(("works", "code"), [(True, None), (False, "computation-negligible")])
def test_a_step_that_waits_on_the_cpu_is_not_tried(clock: Clock, works: bool, code: str | None) -> None:
    model, _, opt = make_job()
    loader = DataLoader(TimedSamples(clock, 0.0), batch_size=8)

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        (clock.advance if works else time.sleep)(1.0)
        return functional.cross_entropy(output, target)

    run = flatout.optimize(model, loader, opt, loss_fn, techniques=only("fused_optimizer"), budget=100.0, plan=None)
    row = run.report.row("fused_optimizer")
    assert bool(row.trials) == works
    assert code is None or code in reasons(row)
    assert row.status == ("rejected" if works else "not tried")


def test_a_race_of_another_loader_uses_the_noise_of_loaders(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    floors: list[NoiseFloor] = []

    def fixed_gain(differences: Sequence[float], floor: NoiseFloor) -> Gain:
        floors.append(floor)
        return statistics.fixed_gain(differences, floor)

    monkeypatch.setattr(race, "fixed_gain", fixed_gain)
    monkeypatch.setattr(Bench, "noise", property(lambda _: pytest.fail("steps do not show it")))
    assert tuned(clock, LONG).report.row("in_memory").status == "kept"
    (floor,) = floors
    assert floor.pairs == FEWEST_PAIRS
