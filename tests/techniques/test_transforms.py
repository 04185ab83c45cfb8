"""Advice about slow transforms: its text, its limits, and no side effects."""

import numpy as np
import pytest
import torch
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset

import flatout
from flatout.report import Summary
from flatout.report.model import Row
from flatout.report.terminal import plain_text
from flatout.report.wording import full
from tests.helpers import bits, line_of, snapshot
from tests.jobs import NO_TECHNIQUES, Net, SlowSamples, job_of, make_data
from tests.reasons import reasons
from tests.techniques.harness import findings, refusal


class Scaled(SlowSamples):
    """Samples that spend nearly all their time in torch operations."""

    def __getitem__(self, i):
        return torch.from_numpy(np.full(100_000, i, np.float32)).mul(2).sub(1), i % 3


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
    return run.report.row("transforms")


def test_work_for_the_device_is_reported_with_file_and_line():
    finding, advice = findings("transforms", over(DataLoader(Scaled(), 8, shuffle=True)))
    assert line_of(Scaled.__getitem__, "mul(2)") in finding
    assert "(mul, sub)" in finding
    assert "Prefetcher(transform=...)" in advice


class Broken(SlowSamples):
    """Dataset whose valid keys begin at 64."""

    def __len__(self):
        return 128

    def __getitem__(self, i):
        if i < 64:
            raise KeyError(i)
        return super().__getitem__(i - 64)


QUIET = {
    "not-a-dataloader": lambda: list(DataLoader(make_data(), 16)),
    "not-rewindable": lambda: DataLoader(Stream(), 8),
    "nothing-to-move": lambda: DataLoader(SlowSamples(), 8),
    "sample-failed": lambda: DataLoader(Broken(), batch_sampler=[[64, 65, 66]] * 4),
}


@pytest.mark.parametrize("why", QUIET)
def test_a_loader_that_no_advice_helps_has_a_reason(why):
    assert why in refusal("transforms", over(QUIET[why]()))


def test_samples_in_memory_are_left_alone():
    loader = DataLoader(make_data(), 16)
    row = row_of(loader, techniques=NO_TECHNIQUES | {"in_memory": True})
    assert row.status == "not applicable"
    assert "samples-in-memory" in reasons(row)


def test_nothing_is_analyzed_with_no_budget_with_a_plan_or_when_forbidden():
    loader = DataLoader(Scaled(), 8)
    forbidden = row_of(loader, techniques={"transforms": False})
    assert (forbidden.status, forbidden.trials) == ("not tried", ())
    assert "forbidden" in reasons(forbidden)
    free = row_of(loader)
    assert free.status == "not tried"
    assert "nothing-measured" in reasons(free)
    model = Net()
    run = flatout.optimize(model, loader, compute_loss=lambda m, b: m(b[0][:, :8]).sum(), budget=0)
    again = flatout.optimize(model, loader, compute_loss=lambda m, b: m(b[0][:, :8]).sum(), plan=run.plan)
    assert again.report.row("transforms").status == "not tried"
    assert "nothing-measured" in reasons(again.report.row("transforms"))


def test_advice_can_be_forbidden_and_not_forced():
    with pytest.raises(ValueError, match=r"techniques\['transforms'\].*False.*True"):
        row_of(DataLoader(Scaled(), 8), techniques={"transforms": True})


def test_it_takes_a_twentieth_of_the_budget_at_most(clock):
    class Slow(SlowSamples):
        def __getitem__(self, i):
            clock.advance(0.3)
            return super().__getitem__(i)

    row = row_of(DataLoader(Slow(), 8), budget=4)
    assert row.status == "not applicable"
    assert "out-of-time" in reasons(row)
    assert " 0.2 s" in row.why


def test_optimize_reports_it_in_a_row_without_side_effects():
    class Random(Scaled):
        def __getitem__(self, i):
            return super().__getitem__(i)[0][:8] + torch.rand(8), i % 3

    generator = torch.Generator().manual_seed(5)
    loader = DataLoader(Random(), 16, shuffle=True, generator=generator)
    model = Net()
    opt = torch.optim.Adam(model.parameters())
    before, drawn = snapshot(model, opt), bits(generator.get_state())
    run = flatout.optimize(model, loader, opt, functional.cross_entropy, techniques=NO_TECHNIQUES, budget=2)
    row = run.report.row("transforms")
    assert (row.number, row.chosen, row.gain, row.trials) == (13, "", None, ())
    run.undo()
    assert snapshot(model, opt) == before
    assert bits(generator.get_state()) == drawn


@pytest.mark.parametrize("width", [60, 80, 140])
def test_the_row_is_whole_at_every_width(width, monkeypatch):
    monkeypatch.chdir("/")
    why = "\n".join(findings("transforms", over(DataLoader(Scaled(), 8))))
    row = Row("transforms", 13, "transforms on the device", "advice", why)
    text = plain_text(full(Summary((row,), {})), width, False)
    assert max(map(len, text.splitlines())) <= width
    squeezed = "".join(text.split())
    assert all("".join(line.split()) in squeezed for line in row.why.splitlines()) or width >= 120
