"""The advice row: what it says, when it says nothing, and that looking leaves no trace."""

import pytest
import torch
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset

import flatout
from flatout.data import movable
from flatout.report import terminal
from tests.helpers import bits, snapshot
from tests.jobs import QUICK, Net, SlowSamples, make_data

pytestmark = pytest.mark.usefixtures("short_trials")


class Scaled(SlowSamples):
    """Samples that torch scales one by one."""

    def __getitem__(self, i):
        x, y = super().__getitem__(i)
        return x.mul(2).sub(1), y


class Stream(IterableDataset):
    def __iter__(self):
        yield from make_data(32)


def row_of(loader, techniques=None, **options):
    model = Net()
    opt = torch.optim.SGD(model.parameters(), 0.1)
    run = flatout.optimize(
        model,
        loader,
        opt,
        functional.cross_entropy,
        techniques=QUICK | {"in_memory": False, "fused_optimizer": False} | (techniques or {}),
        **{"budget": 5, **options},
    )
    return run.report.row("transforms")


def test_work_for_the_device_is_told_by_file_and_line(monkeypatch):
    monkeypatch.setattr(movable, "WORTH_NAMING", 0.0)
    row = row_of(DataLoader(Scaled(), 8, shuffle=True))
    assert (row.status, row.number, row.chosen, row.gain, row.trials) == ("advice", 13, "", None, ())
    finding, advice = row.why.splitlines()
    assert "test_transforms.py:" in finding
    assert "__getitem__ (mul, sub) takes" in finding
    assert advice.startswith("What to do: ")
    assert "Prefetcher(transform=...)" in advice


class Broken(SlowSamples):
    """Trained on by keys that are not the numbers from 0 on."""

    def __len__(self):
        return 128

    def __getitem__(self, i):
        if i < 64:
            raise KeyError(i)
        return super().__getitem__(i - 64)


QUIET = {
    "not a DataLoader": lambda: list(DataLoader(make_data(), 16)),
    "cannot be rewound": lambda: DataLoader(Stream(), 8),
    "no torch operation": lambda: DataLoader(SlowSamples(), 8),
    r"raised KeyError: 0": lambda: DataLoader(Broken(), batch_sampler=[[64, 65, 66]] * 4),
}


@pytest.mark.parametrize("why", QUIET)
def test_where_nothing_is_to_be_said_the_row_says_why(why):
    row = row_of(QUIET[why]())
    assert row.status == "not applicable"
    assert why in row.why


def test_nothing_is_looked_at_with_no_budget_with_a_plan_or_when_forbidden(monkeypatch):
    monkeypatch.setattr("flatout.techniques.transforms.movable_transforms", None)  # whoever calls it fails
    loader = DataLoader(Scaled(), 8)
    for why, options in {
        "budget=0": {"budget": 0},
        "does without": {"budget": 1, "techniques": {"transforms": False}},
    }.items():
        row = row_of(loader, **options)
        assert row.status == "not tried"
        assert why in row.why
    model = Net()
    run = flatout.optimize(model, loader, compute_loss=lambda m, b: m(b[0]).sum(), budget=0)
    again = flatout.optimize(model, loader, compute_loss=lambda m, b: m(b[0]).sum(), plan=run.plan)
    assert again.report.row("transforms").status == "not tried"
    assert "a plan" in again.report.row("transforms").why


def test_advice_can_be_forbidden_and_not_forced():
    with pytest.raises(ValueError, match=r"techniques\['transforms'\] must be False"):
        row_of(DataLoader(Scaled(), 8), {"transforms": True})


def test_it_takes_a_twentieth_of_the_budget_at_most(monkeypatch):
    asked = []
    monkeypatch.setattr(
        "flatout.techniques.transforms.movable_transforms", lambda loader, seconds: asked.append(seconds) or ()
    )
    row_of(DataLoader(Scaled(), 8), budget=4)
    assert asked == [pytest.approx(0.2)]


def test_looking_leaves_no_trace():
    class Random(Scaled):
        def __getitem__(self, i):
            return super().__getitem__(i)[0] + torch.rand(8), i % 3

    generator = torch.Generator().manual_seed(5)
    loader = DataLoader(Random(), 16, shuffle=True, generator=generator)
    model = Net()
    opt = torch.optim.Adam(model.parameters())
    before, drawn = snapshot(model, opt), bits(generator.get_state())
    flatout.optimize(
        model, loader, opt, functional.cross_entropy, techniques=QUICK | {"fused_optimizer": False}, budget=3
    ).undo()
    assert snapshot(model, opt) == before
    assert bits(generator.get_state()) == drawn


@pytest.mark.parametrize("width", [60, 80, 140])
def test_the_row_is_whole_at_every_width(width, monkeypatch):
    monkeypatch.setattr(movable, "WORTH_NAMING", 0.0)
    monkeypatch.chdir("/")
    row = row_of(DataLoader(Scaled(), 8))
    text = terminal.to_text(flatout.report.Summary((row,), {}), width, False)
    assert max(map(len, text.splitlines())) <= width
    squeezed = "".join(text.split())
    assert all("".join(line.split()) in squeezed for line in row.why.splitlines()) or width >= terminal.WIDE
