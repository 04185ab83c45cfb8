"""Advice on the stages of loading: its text, its limits, and no side effects."""

import time

import pytest
import torch
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset

import flatout
from flatout.data import PrefixCache, Stage
from flatout.data.stages import in_words
from flatout.report import Pace, Report, Summary
from flatout.report.terminal import plain_text
from flatout.report.wording import receipt
from tests.helpers import bits, line_of, snapshot
from tests.jobs import NO_TECHNIQUES, Net, SlowSamples, job_of, make_data
from tests.reasons import reasons
from tests.techniques.harness import findings, refusal


class Slept(SlowSamples):
    """Samples that take much longer than a step."""

    def __getitem__(self, i):
        time.sleep(2e-3)
        return super().__getitem__(i)


class Stream(IterableDataset):
    def __iter__(self):
        yield from make_data(32)


def over(loader):
    return job_of(Net(), loader=loader)


def row_of(loader, **options):
    model = Net()
    opt = torch.optim.SGD(model.parameters(), 0.1)
    run = flatout.optimize(
        model,
        loader,
        opt,
        compute_loss=lambda model, batch: model(batch[0][:, :8]).sum(),
        **{"techniques": NO_TECHNIQUES, "budget": 0, **options},
    )
    return run.report.row("loading_stages")


def test_stages_are_data_and_text_with_file_and_line():
    found = findings("loading_stages", over(DataLoader(Slept(), 8, shuffle=True)))
    assert found == [stage for stage in found if isinstance(stage, Stage)]
    assert found[0].what == "Slept.__getitem__"
    assert found[0].place.endswith(f"test_loading_stages.py:{line_of(Slept.__getitem__, 'sleep').rpartition(':')[2]}")
    assert {stage.name for stage in found} <= {"transform", "collate"}


def test_a_loop_that_does_not_wait_for_data_has_nothing_to_name():
    fed = Pace(step_ms=10.0, load_ms=0.5, samples_per_second=100.0)
    assert refusal("loading_stages", over(DataLoader(Slept(), 8)), fed) == {"loading-not-limit"}
    starved = Pace(step_ms=10.0, load_ms=2.0, samples_per_second=100.0)
    assert refusal("loading_stages", over(DataLoader(Slept(), 8)), starved) is None


class Broken(SlowSamples):
    """Dataset whose valid keys begin at 64."""

    def __len__(self):
        return 128

    def __getitem__(self, i):
        if i < 64:
            raise KeyError(i)
        return super().__getitem__(i - 64)


class Augmented(SlowSamples):
    """Samples with a transform that draws."""

    def __init__(self):
        self.transform = lambda x: x + torch.rand(8)

    def __getitem__(self, i):
        x, y = super().__getitem__(i)
        return self.transform(x), y


QUIET = {
    "front-in-memory": lambda: DataLoader(PrefixCache(Augmented()), 8),
    "not-a-dataloader": lambda: list(DataLoader(make_data(), 16)),
    "not-rewindable": lambda: DataLoader(Stream(), 8),
    "sample-failed": lambda: DataLoader(Broken(), batch_sampler=[[64, 65, 66]] * 4),
}


@pytest.mark.parametrize("why", QUIET)
def test_a_loader_that_no_advice_helps_has_a_reason(why):
    assert why in refusal("loading_stages", over(QUIET[why]()))


def test_samples_in_memory_are_left_alone():
    loader = DataLoader(make_data(), 16)
    row = row_of(loader, techniques=NO_TECHNIQUES | {"in_memory": True})
    assert row.status == "not applicable"
    assert "samples-in-memory" in reasons(row)


def test_nothing_is_examined_with_no_budget_with_a_plan_or_when_forbidden():
    loader = DataLoader(Slept(), 8)
    forbidden = row_of(loader, techniques={"loading_stages": False})
    assert (forbidden.status, forbidden.trials) == ("not tried", ())
    assert "forbidden" in reasons(forbidden)
    free = row_of(loader)
    assert free.status == "not tried"
    assert "nothing-measured" in reasons(free)
    model = Net()
    run = flatout.optimize(model, loader, compute_loss=lambda m, b: m(b[0][:, :8]).sum(), budget=0)
    again = flatout.optimize(model, loader, compute_loss=lambda m, b: m(b[0][:, :8]).sum(), plan=run.plan)
    assert again.report.row("loading_stages").status == "not tried"
    assert "nothing-measured" in reasons(again.report.row("loading_stages"))


def test_advice_can_be_forbidden_and_not_forced():
    with pytest.raises(ValueError, match=r"techniques\['loading_stages'\].*False.*True"):
        row_of(DataLoader(Slept(), 8), techniques={"loading_stages": True})


class Timed(SlowSamples):
    """Samples that take seconds of a simulated clock."""

    def __init__(self, clock, seconds):
        super().__init__()
        self.clock, self.seconds = clock, seconds

    def __getitem__(self, i):
        self.clock.advance(self.seconds)
        return super().__getitem__(i)


def test_it_takes_a_twentieth_of_the_budget_at_most(clock):
    row = row_of(DataLoader(Timed(clock, 0.3), 8), budget=4)
    assert row.status == "not applicable"
    assert "out-of-time" in reasons(row)
    assert " 0.2 s" in row.why


def test_optimize_reports_it_in_a_row_without_side_effects():
    class Random(SlowSamples):
        def __getitem__(self, i):
            return super().__getitem__(i)[0] + torch.rand(8), i % 3

    generator = torch.Generator().manual_seed(5)
    loader = DataLoader(Random(), 16, shuffle=True, generator=generator)
    model = Net()
    opt = torch.optim.Adam(model.parameters())
    before, drawn = snapshot(model, opt), bits(generator.get_state())
    run = flatout.optimize(model, loader, opt, functional.cross_entropy, techniques=NO_TECHNIQUES, budget=2)
    row = run.report.row("loading_stages")
    assert (row.number, row.chosen, row.gain, row.trials) == (13, "", None, ())
    run.undo()
    assert snapshot(model, opt) == before
    assert bits(generator.get_state()) == drawn


def test_the_report_names_the_stages_where_loading_is_the_limit(clock):
    row = row_of(DataLoader(Timed(clock, 0.01), 8), budget=60)
    assert row.status == "advice"
    assert row.stages
    assert row.why == in_words(row.stages)
    report = Report(Summary((row,), {}))
    assert Report.from_json(report.to_json()).rows == (row,)
    assert row.why in " ".join(plain_text(receipt(report.summary), 1000, False).split())
