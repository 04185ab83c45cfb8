"""Default budget: at most a tenth of the training, and nothing if a tenth is too short for a comparison."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional
from torch.utils.data import DataLoader, RandomSampler

import flatout
from flatout.mfu import peaks
from flatout.techniques import REGISTRY, Measured
from flatout.tuning.budget import affordable, fewest_steps, too_few, why_nothing
from tests.clock import Clock, TimedSamples, TimedStep
from tests.jobs import Net, make_data, make_job, only
from tests.mfu.harness import SimulatedProducts
from tests.reasons import reasons

BATCH = st.floats(1e-5, 100.0)
STEPS = st.integers(1, 10**9)
PER_UPDATE = st.floats(0.01, 64.0)


@given(BATCH, STEPS, PER_UPDATE)
def test_it_is_at_most_a_tenth_of_the_training_and_a_minute(batch: float, steps: int, per_update: float) -> None:
    seconds = affordable(batch, steps, per_update)
    assert 0 <= seconds <= 60
    assert seconds <= 0.1 * steps * batch
    assert seconds == 0 or seconds >= 20 * max(0.02, per_update * batch) * (1 - 1e-12)


@given(BATCH, PER_UPDATE)
def test_the_fewest_steps_are_the_first_that_pay(batch: float, per_update: float) -> None:
    fewest = fewest_steps(batch, per_update)
    if fewest is None:
        assert affordable(batch, 10**9, per_update) == 0
        assert 20 * per_update * batch > 60
    else:
        assert affordable(batch, fewest, per_update) > 0
        assert affordable(batch, fewest - 1, per_update) == 0


@given(BATCH, STEPS, PER_UPDATE)
def test_too_few_steps_pay_at_no_pace(batch: float, steps: int, per_update: float) -> None:
    if too_few(steps, per_update):
        assert affordable(batch, steps, per_update) == 0


@given(BATCH, STEPS, PER_UPDATE, st.integers(1, 10**6))
def test_a_longer_training_affords_no_less(batch: float, steps: int, per_update: float, more: int) -> None:
    assert affordable(batch, steps + more, per_update) >= affordable(batch, steps, per_update)


@given(BATCH, STEPS, PER_UPDATE)
def test_the_note_names_what_would_pay(batch: float, steps: int, per_update: float) -> None:
    fewest, note = fewest_steps(batch, per_update), why_nothing(batch, steps, per_update)
    assert "budget=" in note
    assert (f"expected_steps={fewest} " in note) == (fewest is not None)


# -- in optimize() -----------------------------------------------------------------------------------------------


def tuned(clock: Clock, step_seconds: float = 0.01, **settings: Any) -> flatout.Run:
    model, loader, opt = make_job()
    step = TimedStep(clock, lambda samples, active: step_seconds * (0.5 if active else 1.0)).watch(model, opt)
    settings = {"techniques": only("fused_optimizer")} | settings
    return flatout.optimize(model, loader, opt, step, **settings)


def needed(run: flatout.Run) -> int:
    """Return the expected_steps in the report's note."""
    (note,) = [note for note in run.report.summary.notes if "training-too-short" in reasons(note)]
    return int(note.split("expected_steps=")[1].split()[0])


def test_a_short_training_is_not_measured_and_the_report_names_the_steps_that_would(clock: Clock) -> None:
    run = tuned(clock)
    assert run.report.summary.before is None
    row = run.report.row("fused_optimizer")
    assert row.status == "not tried"
    assert "nothing-measured" in reasons(row)
    steps = needed(run)
    run.undo()
    longer = tuned(clock, expected_steps=steps).report
    assert longer.summary.before is not None
    assert "nothing-measured" not in reasons(longer.row("fused_optimizer"))


def test_a_long_training_is_tuned_within_a_tenth_of_it(clock: Clock) -> None:
    run = tuned(clock, expected_steps=2000)
    summary = run.report.summary
    assert run.report.row("fused_optimizer").status == "kept"
    assert not any("training-too-short" in reasons(note) for note in summary.notes)
    assert 0 < summary.tuning_seconds < 0.15 * 2000 * 0.01


def test_steps_that_are_too_long_for_any_default_ask_for_a_budget(clock: Clock) -> None:
    run = tuned(clock, step_seconds=30.0, expected_steps=10**6)
    assert sum("update-too-long" in reasons(note) for note in run.report.summary.notes) == 1
    assert run.report.row("fused_optimizer").status == "not tried"


def test_a_training_of_few_long_steps_takes_one_step_to_decide(clock: Clock) -> None:
    run = tuned(clock, step_seconds=2.0, expected_steps=20)
    # The check of the loss and the count of FLOPs take one step each.
    assert run.report.summary.tuning_seconds < 3.5 * 2.0
    assert needed(run) == 200


def test_the_peak_of_the_device_is_measured_within_the_budget(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peaks, "_measured", {})
    monkeypatch.setattr(peaks, "_SIZES", {"cpu": (512, 1024, 2048)})
    monkeypatch.setattr(peaks, "_SWEEP_SECONDS", 0.2)
    monkeypatch.setenv("FLATOUT_CACHE", "off")
    products = SimulatedProducts(clock)
    products.flops_per_second = dict.fromkeys((512, 1024, 2048), 1e12)
    monkeypatch.setattr(torch, "matmul", products)
    run = tuned(clock, budget=0.5)
    assert 512 not in products.sizes
    assert run.report.summary.before is not None
    assert run.report.summary.before.mfu is None
    run.undo()
    assert tuned(clock, budget=20.0).report.summary.before.mfu is not None
    assert {512, 1024, 2048} <= set(products.sizes)


@pytest.mark.parametrize(("text", "measures"), [("0", False), ("1000", True), (" 5e2 ", True), ("inf", True)])
def test_the_environment_sets_the_budget(
    text: str, measures: bool, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLATOUT_BUDGET", text)
    run = tuned(clock)
    assert bool(run.report.row("fused_optimizer").trials) == measures
    assert not any("training-too-short" in reasons(note) for note in run.report.summary.notes)


def test_the_argument_comes_before_the_environment(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("1000", "soon"):
        monkeypatch.setenv("FLATOUT_BUDGET", text)
        assert not tuned(clock, budget=0).report.row("fused_optimizer").trials
    monkeypatch.setenv("FLATOUT_BUDGET", "")
    assert needed(tuned(clock)) > 0


@pytest.mark.parametrize("text", ["soon", "-1", "nan", "60 s", "1,5"])
def test_a_wrong_variable_is_refused_by_its_name(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLATOUT_BUDGET", text)
    model, loader, opt = make_job()
    with pytest.raises(ValueError, match=rf"FLATOUT_BUDGET.*{text}"):
        flatout.optimize(model, loader, opt, functional.cross_entropy)


def test_the_note_counts_batches_of_the_users_loader(clock: Clock) -> None:
    techniques = only("fused_optimizer", "batch_size")
    settings: dict[str, Any] = {"step_seconds": 0.05, "batch_size": 64, "techniques": techniques}
    run = tuned(clock, expected_steps=100, **settings)
    steps = needed(run)
    run.undo()
    assert steps == 800  # 200 updates of four batches
    assert tuned(clock, expected_steps=steps, **settings).report.summary.before is not None


def test_a_plan_needs_no_budget(clock: Clock) -> None:
    plan = tuned(clock, budget=0).plan
    run = tuned(clock, plan=plan, techniques=None)
    assert not any("training-too-short" in reasons(note) for note in run.report.summary.notes)


# -- the length of the training ----------------------------------------------------------------------------------


def endless(samples: int) -> DataLoader[Any]:
    data = make_data()
    return DataLoader(data, batch_size=16, sampler=RandomSampler(data, replacement=True, num_samples=samples))


@pytest.mark.parametrize(
    ("samples", "expected"), [(16 * 10**7, 10**8), (16 * 10**7 + 16, 10**4), (10**10, 10**4), (10**25, 10**4)]
)
def test_a_length_beyond_ten_million_batches_counts_as_unknown(samples: int, expected: int) -> None:
    model = Net()
    techniques = {t.name: False for t in REGISTRY if isinstance(t, Measured)}
    run = flatout.optimize(
        model, endless(samples), torch.optim.SGD(model.parameters(), 0.1), functional.cross_entropy,
        techniques=techniques, budget=0,
    )  # fmt: skip
    assert run._job.data.expected_steps == expected
    notes = {code for note in run.report.summary.notes for code in reasons(note)}
    assert ("length-unknown" in notes) == (samples > 16 * 10**7)


def test_steps_that_are_given_count_however_many_they_are() -> None:
    model, loader, opt = make_job()
    settings = {"expected_steps": 10**12, "budget": 0, "techniques": only()}
    run = flatout.optimize(model, loader, opt, functional.cross_entropy, **settings)
    assert run._job.data.expected_steps == 10**12
    assert not run.report.summary.notes


def test_caching_is_estimated_by_the_samples_of_the_dataset(clock: Clock) -> None:
    """An epoch of 10**10 samples draws 64 samples again and again."""
    model = Net()
    data = TimedSamples(clock, 0.1)
    loader = DataLoader(data, batch_size=8, sampler=RandomSampler(data, replacement=True, num_samples=10**10))
    run = flatout.optimize(
        model, loader, torch.optim.SGD(model.parameters(), 0.1), TimedStep(clock, 0.01),
        techniques=only("in_memory"), budget=1000,
    )  # fmt: skip
    assert run.report.row("in_memory").trials
