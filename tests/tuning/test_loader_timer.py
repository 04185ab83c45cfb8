"""Measurement of the rates and times in the report."""

import pytest
import torch
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset, Sampler, TensorDataset

import flatout
from flatout.data import InMemoryLoader
from flatout.report import Report
from flatout.tuning.bench import off
from flatout.tuning.budget import Budget
from flatout.tuning.stopwatch import Block, Stopwatch, pace_of
from tests.clock import TimedSamples, TimedStep
from tests.helpers import bits
from tests.jobs import QUICK, job_of, make_job
from tests.reasons import reasons
from tests.tuning.harness import Change
from tests.unseen import Unseen


class Stream(IterableDataset):
    def __iter__(self):
        return ((torch.full((8,), float(i)), i % 3) for i in range(64))


def track(loader, job=None) -> Stopwatch:
    model, _, opt = job or make_job()
    return Stopwatch(job_of(model, [], opt, loader=loader, loss_fn=functional.cross_entropy), loader)


def block(seconds: float, waited: float, steps: int = 10) -> Block:
    return Block((seconds / steps,) * steps, 0.0, waits=(waited / steps,) * steps, samples=40)


def test_a_pace_is_of_the_middle_half():
    usual = [block(0.2 + i / 1000, waited=0.1) for i in range(4)]
    disturbed, lucky = block(9.0, waited=0.1), block(0.01, waited=0.001)
    pace = pace_of([disturbed, *usual, lucky], 1)
    assert pace.total_ms == pytest.approx(20.15)
    assert pace.load_ms == pytest.approx(10.0)
    assert pace.samples_per_second == pytest.approx(4 / 0.02015)
    assert pace_of([disturbed], 1).total_ms == pytest.approx(900)
    assert pace_of([lucky, disturbed], 1).total_ms == pytest.approx(450.5)
    assert pace_of([disturbed], 2).total_ms == pytest.approx(450)


def test_a_pace_holds_its_blocks_or_the_updates_of_a_single_one():
    first, second = Block((0.02, 0.05), 0.0, waits=(0.01, 0.02)), block(0.4, waited=0.1)
    assert pace_of([first, second], 1).stretches == (pytest.approx((15, 20)), pytest.approx((10, 30)))
    assert pace_of([first], 1).stretches == (pytest.approx((10, 10)), pytest.approx((20, 30)))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_updates_of_a_stretch_have_its_times(clock, accumulate):
    model, loader, opt = make_job()
    loader = DataLoader(TimedSamples(clock, 0.1), batch_size=8)
    job = job_of(model, [], opt, loader=loader, loss_fn=functional.cross_entropy, accumulate=accumulate)
    one = Stopwatch(job, loader)
    one.settle(1)
    one.block(4)
    pace = one.pace
    assert len(pace.stretches) == 4 // accumulate
    assert [load for load, _ in pace.stretches] == pytest.approx([800] * (4 // accumulate), rel=1e-2)
    assert sum(map(sum, pace.stretches)) / len(pace.stretches) == pytest.approx(pace.total_ms, rel=1e-3)
    one.close()


def test_the_time_of_a_stretch_matches_its_pace(clock):
    one = track(DataLoader(TimedSamples(clock, 0.1), batch_size=8))
    one.settle(1)
    took = one.block(4)
    assert took.wall == pytest.approx([0.8] * 4, rel=1e-2)
    assert one.pace.total_ms == pytest.approx(1e3 * took.mean)
    assert one.pace.samples_per_second == pytest.approx(8 / took.mean)
    assert one.pace.load_ms == pytest.approx(800, rel=1e-2)
    assert one.pace.step_per_second == pytest.approx(8e3 / one.pace.step_ms)
    one.close()


@pytest.mark.parametrize(("limit", "steps"), [(0.1, 1), (2.5, 4), (100.0, 10)])
def test_a_stretch_ends_with_the_update_in_which_its_limit_is_over(clock, limit, steps):
    one = track(DataLoader(TimedSamples(clock, 0.1), batch_size=8))
    assert one.block(10, limit).wall == pytest.approx([0.8] * steps, rel=1e-2)
    assert clock.now == pytest.approx(0.8 * steps, rel=1e-2)
    one.close()


def test_the_loaders_own_rate_is_of_batches_without_steps(clock):
    job = model, _, _ = make_job()
    one = track(DataLoader(TimedSamples(clock, 0.1), batch_size=8), job)
    before = [bits(p) for p in model.parameters()]
    assert one.alone() == pytest.approx(10, rel=1e-2)
    assert [bits(p) for p in model.parameters()] == before
    one.close()


class FirstOnesAtOnce(Sampler):
    """Order of 800 samples. After the first samples, each index takes time to draw."""

    def __init__(self, clock, at_once, seconds):
        self.clock, self.at_once, self.seconds = clock, at_once, seconds

    def __len__(self):
        return 800

    def __iter__(self):
        for i in range(len(self)):
            self.clock.advance(0.0 if i < self.at_once else self.seconds)
            yield i


def test_prefetched_batches_do_not_count(clock):
    data = TensorDataset(torch.ones(800))
    # Three batches are prefetched, so the loader draws three more batches than the loop takes.
    sampler = FirstOnesAtOnce(clock, at_once=8 * (4 + 3), seconds=0.1)
    one = track(DataLoader(data, batch_size=8, sampler=sampler, num_workers=1, prefetch_factor=3))
    assert one.fewest_alone == 3 + 1 + 1
    assert one.alone() == pytest.approx(10, rel=1e-2)
    one.close()


def test_trials_leave_the_race_its_share_of_the_budget(clock):
    budget = Budget(100.0)
    clock.now = 40.0
    assert budget.left == pytest.approx(45.0, abs=0.01)
    assert budget.fits(44.9)
    assert not budget.fits(45.1)
    budget.begin_race()
    assert budget.left == pytest.approx(60.0, abs=0.01)
    clock.now = 130.0
    assert budget.left == 0.0
    assert not budget.fits(0.0)
    assert not Budget(0.0).fits(0.0)


def test_a_close_call_leaves_the_time_of_later_techniques(clock):
    budget = Budget(100.0)
    clock.now, budget.later = 40.0, 30.0
    assert budget.deadlines(5.0) == pytest.approx((45.0, 55.0), abs=0.01)
    assert budget.deadlines(20.0) == pytest.approx((60.0, 60.0), abs=0.01)
    budget.later = 0.0
    assert budget.deadlines(5.0) == pytest.approx((45.0, 85.0), abs=0.01)
    clock.now = 90.0
    assert budget.deadlines(5.0) == pytest.approx((90.0, 90.0), abs=0.01)
    assert budget.deadlines(20.0, with_race=True) == pytest.approx((100.0, 100.0), abs=0.01)


def test_what_is_off_in_a_block_is_on_again_in_its_order():
    seen = []

    def change(label):
        return Change(label, lambda: seen.append(f"+{label}"), lambda: seen.append(f"-{label}"))

    changes = [change("a"), change("b")]
    for each in changes:
        each.enable()
    with pytest.raises(ZeroDivisionError), off(*changes):
        raise ZeroDivisionError
    assert seen == ["+a", "+b", "-b", "-a", "+a", "+b"]


ALONE = QUICK | dict.fromkeys(["channels_last", "cpu_threads", "torchscript", "loading_stages", "sdpa_backend"], False)
"""Techniques that leave the fused optimizer and data in memory to try."""


def fused_pays(samples, active):
    return 1.0 if "fused_optimizer" in active else 2.0


def tuned(loader, step, budget=1000, **techniques):
    model, _, opt = make_job()
    step.watch(model, opt)
    return flatout.optimize(model, loader, opt, step, techniques=ALONE | techniques, budget=budget)


def test_the_report_knows_what_trials_kept_and_the_loaders_rate(clock):
    loader = DataLoader(TimedSamples(clock, 0.1), batch_size=8)
    summary = tuned(loader, TimedStep(clock, fused_pays), in_memory=True).report.summary
    rows = {row.technique: row for row in summary.rows}
    assert summary.won == ("fused_optimizer",)
    assert rows["in_memory"].status == "kept"  # forced, not won
    fused = rows["fused_optimizer"]
    assert fused.status == "kept"
    assert fused.chosen_trial.baseline_ms == pytest.approx(2000, rel=1e-3)
    assert fused.chosen_trial.candidate_ms == pytest.approx(1000, rel=1e-3)
    assert fused.purpose
    assert summary.before.loader_per_second == pytest.approx(10, rel=1e-2)  # rate of the user's loader
    assert summary.after.loader_per_second > 100
    assert summary.notes == ()


def test_a_loader_that_cannot_be_rewound_has_a_pace_before_and_after_and_a_note(clock):
    summary = tuned(DataLoader(Stream(), batch_size=8), TimedStep(clock, fused_pays)).report.summary
    assert summary.before.total_ms == pytest.approx(2000, rel=1e-3)
    assert summary.after.total_ms == pytest.approx(1000, rel=1e-3)
    assert summary.after.samples_per_second == pytest.approx(8, rel=1e-3)
    assert summary.before.loader_per_second is None
    assert summary.won == ("fused_optimizer",)
    assert any("not-rewindable" in reasons(note) for note in summary.notes)


def test_won_techniques_are_in_the_order_of_the_trials(clock):
    loader = DataLoader(TimedSamples(clock, 0.1), batch_size=8)
    assert tuned(loader, TimedStep(clock, fused_pays)).report.summary.won == ("fused_optimizer", "in_memory")


def test_a_technique_that_is_slower_together_is_reverted(clock):
    step = TimedStep(clock, fused_pays)
    # Only the race reads the loader, whose samples take longer with the fused optimizer.
    samples = TimedSamples(clock, lambda: 1.0 if step.active else 0.1)
    run = tuned(DataLoader(samples, batch_size=8), step, in_memory=False)
    summary = run.report.summary
    (fused,) = [row for row in summary.rows if row.technique == "fused_optimizer"]
    assert fused.trials[0].gain.ratio == pytest.approx(2, rel=1e-3)
    assert fused.status == "rejected"
    assert "slower-together" in reasons(fused)
    assert summary.won == ()
    assert run.plan.decisions == {}
    assert type(run.optimizer) is torch.optim.Adam
    assert summary.after.total_ms == summary.before.total_ms


def test_a_loader_that_is_slower_together_is_reverted_too(clock):
    """Samples load slowly with the fused optimizer. Steps on samples in memory then take five seconds."""
    unseen = Unseen(reads=0, is_cached=False)  # samples since the latest step, and True after one pass has read all

    def seconds(samples, active):
        unseen.is_cached |= unseen.reads >= 64
        in_memory, unseen.reads = unseen.is_cached and not unseen.reads, 0
        return 5.0 if active and in_memory else fused_pays(samples, active)

    def load_seconds():
        unseen.reads += 1
        return 1.0 if unseen.step.active else 0.1

    step = unseen.step = TimedStep(clock, seconds)
    run = tuned(DataLoader(TimedSamples(clock, load_seconds), batch_size=8), step)
    rows = {row.technique: row for row in run.report.rows}
    for name in ("fused_optimizer", "in_memory"):
        assert rows[name].gain.ratio > 1.5
        assert rows[name].status == "rejected"
        assert "slower-together" in reasons(rows[name])
    assert run.plan.decisions == {}
    unseen.reads = 0
    assert len(list(run.loader)) == 8
    assert unseen.reads == 64  # the user's loader made them


def test_nothing_beyond_the_budget_is_measured(clock):
    loader = DataLoader(TimedSamples(clock, 0.0), batch_size=8)
    summary = tuned(loader, TimedStep(clock, 2.0), budget=1).report.summary
    assert summary.before.loader_per_second is None
    assert summary.before.phases == {}
    assert str(Report(summary))


def test_training_is_the_first_to_run_what_was_gathered_in_a_trial():
    def loader():
        data = TensorDataset(torch.randn(32, 8), torch.arange(32) % 3)
        generator = torch.Generator().manual_seed(3)
        return DataLoader(
            data, 8, shuffle=True, generator=generator, num_workers=1, persistent_workers=True
        )  # persistent workers receive their seed once

    expected = InMemoryLoader(loader())
    order = [batch[1].tolist() for _ in range(2) for batch in expected]
    tried = InMemoryLoader(loader())
    before = tried.loader.generator.get_state()
    one = track(tried)
    one.settle(1)
    one.block(6)
    one.close()
    tried.loader.generator.set_state(before)
    assert [batch[1].tolist() for _ in range(2) for batch in tried] == order
