"""Decisions, reports and plans of ``optimize``."""

import pytest
import torch
from torch.nn import functional
from torch.utils.data import DataLoader

import flatout
from flatout.techniques import REGISTRY, Measured
from tests.clock import TimedSamples, TimedStep
from tests.jobs import make_job, only
from tests.reasons import reasons


def test_every_row_is_in_the_report():
    model, loader, opt = make_job()
    run = flatout.optimize(model, loader, opt, functional.cross_entropy, budget=0)
    rows = {row.technique: row for row in run.report.rows}
    assert rows.keys() == {t.name for t in REGISTRY}
    assert {r.number for r in rows.values() if r.number} == set(range(1, 14))
    assert all(row.why for row in rows.values())
    measured = [rows[t.name] for t in REGISTRY if isinstance(t, Measured)]
    assert {row.status for row in measured} <= {"not tried", "not applicable"}
    text = str(run.report.full())
    assert all(row.title in text for row in rows.values())


def test_forbidden_and_forced_rows_say_so():
    model, loader, opt = make_job()
    techniques = {"compile": False, "in_memory": True}
    run = flatout.optimize(model, loader, opt, functional.cross_entropy, techniques=techniques, budget=0)
    forbidden, forced = run.report.row("compile"), run.report.row("in_memory")
    assert forbidden.status == "not tried"
    assert "forbidden" in reasons(forbidden)
    assert forced.status == "kept"
    assert "asked-for" in reasons(forced)


def test_deterministic_mode_times_only_what_is_bit_identical(clock):
    model, loader, opt = make_job()
    step = TimedStep(clock).watch(model, opt)
    try:
        run = flatout.optimize(
            model, loader, opt, step, deterministic=True, seed=3, techniques={"workers": False}, budget=1000
        )
        tried = {row.technique for row in run.report.rows if row.trials}
        assert "determinism" in tried  # the report shows its cost
        assert tried <= {"determinism", "in_memory"}
        first = torch.rand(3)
        torch.manual_seed(3)
        assert torch.equal(torch.rand(3), first)
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        flatout.undo(model)
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize(
    ("sample_seconds", "settings", "code"),
    [
        (1.0, {"budget": 0}, "nothing-measured"),
        (1e-4, {"budget": 10**4}, "loading-negligible"),
        (1.0, {"budget": 1}, "budget-spent"),
        (1.0, {"budget": 170}, "setup-exceeds-budget"),
        (1.0, {"budget": 10**4, "expected_steps": 5}, "setup-not-worth-it"),
    ],
)
def test_techniques_that_are_not_worth_a_trial_have_a_reason(sample_seconds, settings, code, clock):
    """Setup loads 64 samples once. Each step then saves the loading of eight samples."""
    model, _, opt = make_job()
    loader = DataLoader(TimedSamples(clock, sample_seconds), batch_size=8)
    run = flatout.optimize(model, loader, opt, TimedStep(clock), techniques=only("in_memory"), **settings)
    row = run.report.row("in_memory")
    assert row.status == "not tried"
    assert code in reasons(row)


def test_a_loader_that_gains_nothing_is_rejected(clock):
    """Indexing tensors needs no setup, so even the shortest training has time for a trial."""
    model, loader, opt = make_job()
    settings = {"techniques": only("in_memory"), "budget": 100, "expected_steps": 1}
    run = flatout.optimize(model, loader, opt, TimedStep(clock, 0.02), **settings)
    row = run.report.row("in_memory")
    assert row.status == "rejected"
    assert row.trials[0].gain.ratio < 1.01
    assert run.plan.decisions == {}


def test_short_steps_are_timed_in_turns_whose_first_step_warms_up(clock):
    """The first step after a change is slow, as with cold caches."""
    model, loader, opt = make_job()
    earlier = [set()]

    def seconds(samples, active):
        has_changed = active != earlier[0]
        earlier[0] = active
        return 0.4 if has_changed else 0.01 if active else 0.02

    step = TimedStep(clock, seconds).watch(model, opt)
    run = flatout.optimize(model, loader, opt, step, techniques=only("fused_optimizer"), budget=100)
    row = run.report.row("fused_optimizer")
    assert row.status == "kept"
    assert row.gain.ratio == pytest.approx(2, rel=0.05)


def test_a_hopeless_candidate_is_timed_once(clock):
    model, loader, opt = make_job()
    step = TimedStep(clock, lambda samples, active: 4.0 if active else 1.0).watch(model, opt)
    run = flatout.optimize(model, loader, opt, step, techniques=only("fused_optimizer"), budget=1000)
    row = run.report.row("fused_optimizer")
    assert row.status == "rejected"
    assert "not-faster" in reasons(row)
    assert [trial.pairs for trial in row.trials] == [1]
