"""What the rates and times of the report rest on."""

import time

import pytest
import torch
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import flatout
from flatout.data import InMemoryLoader
from flatout.job import Job
from flatout.measure.bench import Bench, off
from flatout.measure.budget import Budget
from flatout.measure.track import ALONE_SECONDS, Stretch, Track, pace_of
from flatout.measure.tuner import Tuner
from flatout.report import Report
from flatout.techniques import Switch
from tests.jobs import QUICK, make_job


class Slow(Dataset):
    """Samples that take a millisecond each."""

    def __len__(self):
        return 64

    def __getitem__(self, i):
        time.sleep(0.001)
        return torch.full((8,), float(i)), i % 3


class Stream(IterableDataset):
    def __iter__(self):
        return ((torch.full((8,), float(i)), i % 3) for i in range(64))


def track(loader) -> Track:
    model, _, opt = make_job()
    return Track(Job(model, loader, loader, opt, functional.cross_entropy, None, torch.device("cpu")), loader)


def test_a_pace_is_of_the_middle_half():
    usual = [Stretch(seconds=0.2 + i / 1000, waited=0.1, samples=40, steps=10) for i in range(4)]
    disturbed = Stretch(seconds=9.0, waited=0.1, samples=40, steps=10)
    lucky = Stretch(seconds=0.01, waited=0.001, samples=40, steps=10)
    pace = pace_of([disturbed, *usual, lucky])
    assert pace.total_ms == pytest.approx(20.15)
    assert pace.load_ms == pytest.approx(10.0)
    assert pace.samples_per_second == pytest.approx(4 / 0.02015)
    assert pace_of([disturbed]).total_ms == pytest.approx(900)
    assert pace_of([lucky, disturbed]).total_ms == pytest.approx(450.5)


def test_a_stretch_is_what_its_pace_says():
    one = track(DataLoader(Slow(), batch_size=8))
    took = one.stretch(4, settle=1)
    assert one.pace.total_ms == pytest.approx(1e3 * took / 4)
    assert one.pace.samples_per_second == pytest.approx(32 / took)
    assert one.pace.load_ms >= 8  # of samples that take 1 ms each
    assert one.pace.step_per_second == pytest.approx(8e3 / one.pace.step_ms)
    one.close()


def test_the_loaders_own_rate_is_of_batches_without_steps():
    one = track(DataLoader(Slow(), batch_size=8))
    before = [p.detach().clone() for p in one._job.model.parameters()]
    assert 0 < one.alone() <= 1000
    for p, old in zip(one._job.model.parameters(), before, strict=True):
        assert torch.equal(p, old)
    one.close()


def test_what_workers_have_ready_does_not_count():
    one = track(DataLoader(Slow(), batch_size=8, num_workers=1, prefetch_factor=3))
    assert one.fewest_alone == 3 + 1 + 1
    taken = []
    batches, one._batches = one._batches, (taken.append(0) or batch for batch in one._batches)
    rate = one.alone()
    timed = len(taken) - 4
    assert timed >= 1
    assert 0 < rate <= 8 * timed / ALONE_SECONDS
    batches.close()


def test_the_last_has_its_share_of_the_budget(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("flatout.measure.budget.time.perf_counter", lambda: now[0])
    budget = Budget(100.0)
    now[0] = 40.0
    budget.allow(0.05)
    assert budget.left == 60.0
    now[0] = 97.0
    budget.allow(0.05)
    assert budget.left == pytest.approx(5.0)
    now[0] = 130.0
    assert budget.left == 0.0
    budget.allow(0.05)
    assert budget.left == pytest.approx(5.0)


def test_what_is_off_in_a_block_is_on_again_in_its_order():
    told = []

    class Told(Switch):
        def __init__(self, label):
            self.label = self.value = label

        def _turn_on(self):
            told.append(f"+{self.label}")

        def _turn_off(self):
            told.append(f"-{self.label}")

    switches = [Told("a"), Told("b")]
    for switch in switches:
        switch.enable()
    with pytest.raises(ZeroDivisionError), off(*switches):
        raise ZeroDivisionError
    assert told == ["+a", "+b", "-b", "-a", "+a", "+b"]


@pytest.fixture(autouse=True)
def one_thread():
    """Small operators on a busy machine wait for one another otherwise."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


ALONE = QUICK | dict.fromkeys(["channels_last", "cpu_threads", "torchscript", "transforms", "sdpa_backend"], False)
"""The fused optimizer and data in memory are what is left to try."""


@pytest.fixture
def everything_pays(monkeypatch):
    """Every candidate is twice as fast, and so is the whole."""
    monkeypatch.setattr("flatout.measure.tuner.HOPELESS", float("inf"))
    monkeypatch.setattr(Bench, "interleave", lambda self, old, new: ([2.0] * 10, [1.0] * 10))

    def alternate(self, old, new, to_new=(), scale=1.0):
        for one in (old, new):
            one.stretch(2, settle=0)
            one.close()
        return [2.0] * 10, [1.0] * 10

    monkeypatch.setattr(Bench, "alternate", alternate)


def optimized(loader, **techniques):
    model, _, opt = make_job()
    return flatout.optimize(
        model, loader, opt, functional.cross_entropy, techniques=ALONE | techniques, budget=1000
    ).report.summary


def test_the_report_knows_what_trials_kept_and_the_loaders_rate(everything_pays):
    summary = optimized(DataLoader(Slow(), batch_size=8), in_memory=True)
    rows = {row.technique: row for row in summary.rows}
    assert summary.won == ("fused_optimizer",)
    assert rows["in_memory"].status == "kept"  # asked for, not won
    for name in summary.won:
        assert rows[name].status == "kept"
        assert rows[name].chosen_trial.baseline_ms == 2000.0
        assert rows[name].chosen_trial.candidate_ms == 1000.0
    assert 0 < summary.before.loader_per_second <= 1000  # of the user's loader
    assert summary.after.loader_per_second > 0
    assert summary.notes == ()
    assert rows["fused_optimizer"].purpose.startswith("updates parameters and moments in one pass")


def test_a_loader_that_cannot_be_rewound_has_a_pace_before_and_after_and_says_what_is_missing(everything_pays):
    summary = optimized(DataLoader(Stream(), batch_size=8))
    assert summary.before.total_ms == 2000.0
    assert summary.after.total_ms == 1000.0
    assert summary.after.samples_per_second == 8.0
    assert summary.before.loader_per_second is None
    assert summary.won == ("fused_optimizer",)
    assert any("cannot be rewound" in note for note in summary.notes)


def test_what_is_won_is_told_in_the_order_of_the_trials(everything_pays):
    assert optimized(DataLoader(Slow(), batch_size=8)).won == ("fused_optimizer", "in_memory")


def test_nothing_is_won_where_the_whole_is_taken_back(everything_pays, monkeypatch):
    alternate = Bench.alternate
    monkeypatch.setattr(Bench, "alternate", lambda *args, **kinds: alternate(*args, **kinds)[::-1])
    summary = optimized(DataLoader(Slow(), batch_size=8), in_memory=False)
    assert summary.won == ()
    assert summary.after.total_ms == summary.before.total_ms
    assert {row.status for row in summary.rows if "together" in row.why} == {"rejected"}


@pytest.mark.parametrize("fits", [False, True])
def test_a_race_that_does_not_fit_is_not_made_up(everything_pays, monkeypatch, fits):
    monkeypatch.setattr(Budget, "allow", lambda self, share: setattr(self, "seconds", 1e9 if fits else 0))
    decide = Tuner.decide

    def last(self, technique):
        row = decide(self, technique)
        if technique.name == "fused_optimizer":
            self._bench.budget.seconds = 1e-9
        return row

    monkeypatch.setattr(Tuner, "decide", last)
    summary = optimized(DataLoader(Slow(), batch_size=8), in_memory=False)
    assert summary.won == ("fused_optimizer",)
    assert summary.after is not None
    assert (summary.before is not None) == fits
    for text in (str(Report(summary)), Report(summary)._repr_html_()):
        assert ("no time left to race it" in text) != fits


def test_nothing_beyond_the_budget_is_looked_at(monkeypatch):
    monkeypatch.setattr(Bench, "_affords", lambda self, ms: False)
    summary = optimized(DataLoader(Slow(), batch_size=8), in_memory=False, fused_optimizer=False)
    assert summary.before.loader_per_second is None
    assert summary.before.phases == {}


def test_training_is_the_first_to_run_what_was_gathered_in_a_trial():
    def loader():
        data = TensorDataset(torch.randn(32, 8), torch.arange(32) % 3)
        generator = torch.Generator().manual_seed(3)
        return DataLoader(
            data, 8, shuffle=True, generator=generator, num_workers=1, persistent_workers=True
        )  # workers that stay are given their seed once

    expected = InMemoryLoader(loader())
    order = [batch[1].tolist() for _ in range(2) for batch in expected]
    tried = InMemoryLoader(loader())
    before = tried.loader.generator.get_state()
    one = track(tried)
    one.stretch(6, settle=1)
    one.close()
    tried.loader.generator.set_state(before)
    assert [batch[1].tolist() for _ in range(2) for batch in tried] == order
