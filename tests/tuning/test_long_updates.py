"""Updates of seconds. Each is measured once for several purposes, so that a minute decides several techniques."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import flatout
from flatout.core.snapshot import Snapshot
from flatout.report import Gain
from flatout.techniques import Candidate
from flatout.training.job import Job
from flatout.tuning.bench import Bench
from flatout.tuning.budget import Budget
from flatout.tuning.combinations import Combinations
from flatout.tuning.ledger import Decision
from flatout.tuning.numerics import Observed, observe, updates_have_gradients, verify
from flatout.tuning.pairs import difference
from flatout.tuning.trials import screen, screening_seconds
from tests.clock import Clock, TimedStep
from tests.jobs import Net, job_of, make_data, make_job, only
from tests.tuning.harness import Change, OneCandidate

UPDATE = 2.0
"""Seconds of an update without any technique."""


class Combinable(OneCandidate):
    """Technique without setup, whose candidate multiplies the time of an update by ``factor``."""

    is_combinable = True

    def __init__(self, timed: TimedBench, factor: float) -> None:
        self._timed, self._factor = timed, factor

    def change(self, job: Job) -> Candidate:
        def scale(by: float) -> None:
            self._timed.seconds *= by

        return Change(f"times {self._factor}", lambda: scale(self._factor), lambda: scale(1 / self._factor))


class TimedBench:
    """Bench whose updates advance a clock and are counted."""

    def __init__(self, clock: Clock, seconds: float = UPDATE, *, is_recorded: bool = False) -> None:
        self.seconds, self.updates = seconds, 0
        torch.manual_seed(0)
        model = Net()
        optimizer = torch.optim.Adam(model.parameters(), 0.01)
        loader = torch.utils.data.DataLoader(make_data(64), batch_size=16)

        def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            clock.advance(self.seconds)
            self.updates += 1
            return functional.cross_entropy(output, target)

        job = job_of(model, list(loader), optimizer, loader=loader, loss_fn=loss_fn, is_recorded=is_recorded)
        self.bench = Bench(job, Snapshot.capture([model], optimizer, loader), Budget(60.0), rewindable=True)

    def count(self, work: Callable[[], Any]) -> tuple[Any, int]:
        """Return the result of a call, and the updates that it took."""
        before = self.updates
        return work(), self.updates - before


@pytest.fixture
def timed(clock: Clock) -> TimedBench:
    return TimedBench(clock)


@pytest.mark.parametrize(("seconds", "is_recorded", "updates"), [(0.1, False, 2), (0.1, True, 1), (0.01, True, 3)])
def test_updates_of_a_script_are_long_from_fewer_milliseconds(
    clock: Clock, seconds: float, is_recorded: bool, updates: int
) -> None:
    timed = TimedBench(clock, seconds, is_recorded=is_recorded)
    block = timed.bench.blocks()
    assert timed.count(lambda: block(0))[1] == updates


def test_the_pace_is_measured_in_the_updates_that_measure_the_noise(timed: TimedBench) -> None:
    pace, updates = timed.count(lambda: timed.bench.pace)
    assert pace.step_ms == pytest.approx(1e3 * UPDATE, rel=1e-2)
    assert timed.bench.is_long
    assert updates == 1 + 6
    noise, updates = timed.count(lambda: timed.bench.noise)
    assert updates == 0
    assert noise.floors["wall"].pairs == 3
    timed.bench.forget()
    assert timed.count(lambda: timed.bench.pace)[1] == 1 + 2


@pytest.mark.parametrize(("seconds", "updates"), [(0.01, 2 + 1 + 8), (0.3, 2 + 1 + 4), (0.49, 2 + 1 + 3)])
def test_the_pace_of_updates_below_half_a_second_takes_a_second(clock: Clock, seconds: float, updates: int) -> None:
    timed = TimedBench(clock, seconds=seconds)
    pace, taken = timed.count(lambda: timed.bench.pace)
    assert pace.step_ms == pytest.approx(1e3 * seconds, rel=0.05)
    assert taken == updates


def test_short_updates_have_a_noise_measurement_of_their_own(clock: Clock) -> None:
    timed = TimedBench(clock, seconds=0.1)
    assert not timed.bench.is_long
    assert timed.count(lambda: timed.bench.noise)[1] >= 2 * 2 * 3


def test_a_screening_takes_the_updates_that_compare_the_numerics(timed: TimedBench) -> None:
    bench, technique = timed.bench, Combinable(timed, 0.5)
    assert bench.noise
    screening, updates = timed.count(lambda: screen(bench, technique.candidates(bench.job)[0], [technique]))
    assert updates == 2 + 2
    assert screening.is_apart
    assert screening.trial.loss_difference == 0
    assert screening.trial.gradient_difference == 0
    old, new = screening.pair
    assert old.mean / new.mean == pytest.approx(2, rel=1e-2)
    slower = Combinable(timed, 1.5)
    screening, updates = timed.count(lambda: screen(bench, slower.candidates(bench.job)[0], [slower]))
    assert updates == 2  # the results of the baseline are kept
    assert not screening.is_hopeless


def test_results_of_the_baseline_are_forgotten_with_each_decision(timed: TimedBench) -> None:
    bench, technique = timed.bench, Combinable(timed, 0.5)
    (candidate,) = technique.candidates(bench.job)
    verify(bench, candidate, [technique])
    assert timed.count(lambda: verify(bench, candidate, [technique]))[1] == 2
    bench.forget()
    assert bench.pace
    assert timed.count(lambda: verify(bench, candidate, [technique]))[1] == 4


def test_large_results_are_not_kept(timed: TimedBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flatout.tuning.bench.MOST_RESULT_BYTES", 100)
    bench, technique = timed.bench, Combinable(timed, 0.5)
    (candidate,) = technique.candidates(bench.job)
    verify(bench, candidate, [technique])
    assert timed.count(lambda: verify(bench, candidate, [technique]))[1] == 4


@pytest.mark.parametrize(("most_bytes", "screened", "to_observe"), [(10**9, 2, 2), (100, 4, 0)])
def test_kept_results_of_the_baseline_cost_the_next_candidate_nothing(
    most_bytes: int, screened: int, to_observe: int, timed: TimedBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flatout.tuning.bench.MOST_RESULT_BYTES", most_bytes)
    bench, technique = timed.bench, Combinable(timed, 1.0)
    pairs = screening_seconds(bench, 0) - UPDATE * bench.updates_to_observe
    screen(bench, technique.candidates(bench.job)[0], [technique])
    assert screening_seconds(bench, 3) == pytest.approx(3 * screened * UPDATE + pairs, rel=0.01)
    bench.forget()
    assert screening_seconds(bench, 3) == pytest.approx((3 * screened + to_observe) * UPDATE + pairs, rel=0.01)


def test_a_hopeless_candidate_is_left_after_one_update(timed: TimedBench) -> None:
    bench, technique = timed.bench, Combinable(timed, 10.0)
    screening, updates = timed.count(lambda: screen(bench, technique.candidates(bench.job)[0], [technique]))
    assert screening.is_hopeless
    assert screening.trial.gradient_difference is None
    assert updates == 7 + 2 + 1  # pace, results of the baseline, and one update of the candidate


def test_the_first_update_of_a_candidate_may_prepare_code(clock: Clock) -> None:
    timed = TimedBench(clock, seconds=0.06, is_recorded=True)
    bench, technique, preparations = timed.bench, Combinable(timed, 0.5), [1.0]

    def prepare(*_: object) -> None:
        if timed.seconds < 0.06 and preparations:
            clock.advance(preparations.pop())

    bench.job.spec.model.register_forward_hook(prepare)
    screening = screen(bench, technique.candidates(bench.job)[0], [technique])
    assert not preparations
    assert not screening.is_hopeless
    assert screening.trial.gain is not None
    assert screening.trial.gain.ratio == pytest.approx(2, rel=0.05)


@pytest.mark.parametrize(("factor", "updates"), [(100.0, 1), (10.0, 1 + 4)])
def test_a_warm_up_of_seconds_shows_that_a_candidate_of_short_updates_is_hopeless(
    factor: float, updates: int, clock: Clock
) -> None:
    timed = TimedBench(clock, seconds=0.1)
    bench, technique = timed.bench, Combinable(timed, factor)
    assert bench.noise
    screening, taken = timed.count(lambda: screen(bench, technique.candidates(bench.job)[0], [technique]))
    assert screening.is_hopeless
    assert screening.trial.gain is not None
    assert screening.trial.gain.ratio == pytest.approx(1 / factor, rel=1e-2)
    assert taken == updates


def test_a_hopeless_forward_is_enough(clock: Clock) -> None:
    job = TimedBench(clock).bench.job
    clock.slow_down(job.spec.model, 30.0)
    observed = observe(job, job.data.batches, limit=20.0)
    assert [block.mean for block in observed.blocks] == [pytest.approx(60, rel=1e-2)]
    assert not observed.gradients
    assert not observed.losses


@pytest.mark.parametrize("accumulate", [1, 2])
def test_gradients_are_those_of_the_first_update(accumulate: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
    batches = list(torch.utils.data.DataLoader(make_data(64), batch_size=16))
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    job = job_of(model, batches, optimizer, loss_fn=functional.cross_entropy, accumulate=accumulate, max_grad_norm=1e-3)
    expected = torch.autograd.grad(
        sum(functional.cross_entropy(model(x), y) for x, y in batches[:accumulate]), list(model.parameters())
    )
    assert updates_have_gradients(job)
    seen = observe(job, batches, updates=2, reads_updates=True)
    for found, gradient in zip(seen.gradients.values(), expected, strict=True):
        torch.testing.assert_close(found, gradient)
    assert len(seen.blocks) == 2
    assert len(seen.losses) == 2 * accumulate


def test_a_scaled_loss_has_its_gradients_computed_apart() -> None:
    batches = list(torch.utils.data.DataLoader(make_data(64), batch_size=16))
    model = Net()
    job = job_of(model, batches, torch.optim.Adam(model.parameters()), loss_fn=functional.cross_entropy)
    job.stepper.runner = lambda stepper, batch, phase: stepper.eager_step(batch, phase)
    assert not updates_have_gradients(job)
    assert not updates_have_gradients(job_of(model, batches, loss_fn=functional.cross_entropy))


def test_a_decision_scales_the_pace_by_its_gain(timed: TimedBench) -> None:
    bench, technique = timed.bench, Combinable(timed, 0.5)
    (candidate,) = technique.candidates(bench.job)
    before, row = bench.pace, technique.row("kept", "it is fast", candidate.label)
    bench.keep(Decision(replace(row, gain=Gain(2.0, 1.9, 2.1)), "trial", True, candidate))
    after, updates = timed.count(lambda: bench.pace)
    assert updates == 0
    assert after.step_ms == before.step_ms / 2
    assert after.load_ms == before.load_ms
    assert after.samples_per_second == pytest.approx(16e3 / after.total_ms, rel=1e-2)
    bench.keep(Decision(technique.row("kept", "it is asked for"), "choice", True, None))
    assert timed.count(lambda: bench.pace)[1] == 1 + 2


def test_observed_bytes_count_every_tensor() -> None:
    four = {"a": torch.zeros(4)}
    assert Observed(torch.float32, four, four, {"1": torch.zeros(())}).nbytes == 16 + 16 + 4


@pytest.mark.parametrize("budget", [60.0, 90.0])
def test_a_minute_decides_steps_of_two_seconds(budget: float, clock: Clock) -> None:
    factors = {"fused_optimizer": 0.8, "cpu_threads": 0.9}

    def seconds(samples: int, active: Collection[str]) -> float:
        return UPDATE * math.prod(factors.get(name, 1.0) for name in active)

    model, loader, optimizer = make_job()
    step = TimedStep(clock, seconds).watch(model, optimizer)
    run = flatout.optimize(
        model, loader, optimizer, step, techniques=only("fused_optimizer", "cpu_threads", "precision"), budget=budget
    )
    summary = run.report.summary
    assert run.report.row("fused_optimizer").status == "kept"
    assert run.report.row("precision").trials
    assert summary.gain.low > 1.15
    assert summary.tuning_seconds < budget + UPDATE


def test_a_candidate_is_compared_with_the_one_before(timed: TimedBench) -> None:
    """The machine becomes half as fast after the baseline, so only the first candidate seems to be slower."""
    first, second = Combinable(timed, 0.9), Combinable(timed, 0.8)
    assert timed.bench.noise
    verify(timed.bench, first.candidates(timed.bench.job)[0], [first])  # measures the baseline
    timed.seconds *= 2
    stage = Combinations(timed.bench, [first, second])
    stage.screen()
    one, other = stage._factors
    assert (one.instead_of, other.instead_of) == (None, one)
    assert difference(one.pair, "wall") == pytest.approx(math.log(1 / 2 / 0.9), abs=0.01)
    assert difference(other.pair, "wall") == pytest.approx(math.log(0.9 / 0.8), abs=0.01)
