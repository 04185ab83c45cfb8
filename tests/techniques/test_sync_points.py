"""Names of the lines in model and loss that would synchronize with a GPU."""

import re

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

import flatout
from tests.helpers import line_of, snapshot
from tests.jobs import NO_TECHNIQUES, Net, job_of, make_data, make_job
from tests.reasons import reasons
from tests.techniques.harness import findings, forced, refusal, step


class Waits(Net):
    def __init__(self):
        super().__init__()
        self.largest = 0.0
        self.register_buffer("kept", torch.zeros(0))

    def forward(self, x):
        if x.sum() > 1e9:
            x = x / 2
        for row in x[:2]:
            self.largest = max(self.largest, row.max().item())
        self.kept = x.detach()[x > 2]
        return super().forward(x)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad if grad.tolist() else grad


def printing(model, batch):
    x, y = batch
    loss = functional.cross_entropy(model(x), y)
    str(loss)
    kept = loss[None][loss[None] > -1]
    return Doubled.apply(kept.sum())


def small_job(model, device="cpu", **form):
    torch.manual_seed(0)
    batches = [(x.to(device), y.to(device)) for x, y in DataLoader(make_data(), batch_size=16)]
    form = form or {"optimizer": torch.optim.SGD(model.parameters(), 0.01), "loss_fn": functional.cross_entropy}
    return job_of(model.to(device), batches, device=device, **form)


def words_of(line):
    return set(re.findall(r"\w+", line))


def test_lines_of_the_forward_are_named_with_how_often():
    often, once, mask, *remedies = findings("sync_points", small_job(Waits()))
    assert line_of(Waits, "max().item()") in often
    assert {"2", "item"} <= words_of(often)
    assert "self.largest = max(self.largest, row.max().item())" in often
    assert line_of(Waits, "if x.sum()") in once
    assert "once-per-step" in reasons(once)
    assert line_of(Waits, "[x > 2]") in mask
    assert "(mask)" in mask
    assert [("log-instead" in reasons(line), "mask-instead" in reasons(line)) for line in remedies] == [
        (True, False),
        (False, True),
    ]


def test_lines_of_the_loss_and_of_a_backward_are_named():
    model = Net()
    opt = torch.optim.SGD(model.parameters(), 0.01)
    *lines, first, second = findings("sync_points", small_job(model, optimizer=opt, compute_loss=printing))
    places = {
        "(print)": line_of(printing, "str(loss)"),
        "(mask": line_of(printing, "kept ="),
        "(tolist)": line_of(Doubled, "tolist"),
    }
    assert len(lines) == len(places)
    for call, place in places.items():
        assert sum(call in line and place in line for line in lines) == 1
    assert "log-instead" in reasons(first)
    assert "mask-instead" in reasons(second)


@pytest.mark.parametrize("form", ["run", "own loop", "inference"])
def test_every_form_is_checked(form):
    model = Waits().train(form != "inference")
    settings = {
        "run": {"optimizer": torch.optim.Adam(model.parameters()), "loss_fn": functional.cross_entropy},
        "own loop": {"inference": False},
        "inference": {"inference": True},
    }[form]
    assert any(line_of(Waits, "[x > 2]") in line for line in findings("sync_points", small_job(model, **settings)))


def test_torch_and_flatout_themselves_are_not_named():
    model = nn.Sequential(nn.Linear(8, 3))
    opt = torch.optim.SGD(model.parameters(), 0.01)
    form = {"optimizer": opt, "loss_fn": functional.cross_entropy, "max_grad_norm": 1.0, "accumulate": 2}
    assert "no-waits" in refusal("sync_points", small_job(model, **form))


def test_waits_of_torchs_own_modules_are_not_reported_for_the_calling_line():
    model = nn.AdaptiveLogSoftmaxWithLoss(8, 10, [3, 6], 2.0)  # looks for non-zero elements
    batches = [{"input_": torch.randn(16, 8), "target_": torch.randint(0, 10, (16,))} for _ in range(2)]
    opt = torch.optim.SGD(model.parameters(), 0.01)
    assert "no-waits" in refusal("sync_points", job_of(model, batches, optimizer=opt))


def test_optimize_reports_it_in_a_row_without_side_effects():
    torch.manual_seed(0)
    model = Waits()
    opt = torch.optim.Adam(model.parameters(), 0.01)
    loader = DataLoader(make_data(), batch_size=16, shuffle=True)
    before, tolist = snapshot(model, opt), torch.Tensor.tolist
    run = flatout.optimize(
        model, loader, opt, functional.cross_entropy, techniques=NO_TECHNIQUES, budget=1, device="cpu"
    )
    row = run.report.row("sync_points")
    assert row.status == "advice"
    assert line_of(Waits, "max().item()") in row.why
    run.undo()
    assert snapshot(model, opt) == before
    assert torch.Tensor.tolist is tolist


def test_a_compiled_model_is_seen_through(compiler):
    model = Waits()
    opt = torch.optim.SGD(model.parameters(), 0.01)
    job = small_job(model, optimizer=opt, compute_loss=lambda m, b: m(b[0]).mean())
    with forced("compile", True, job) as candidate:
        step(job, next(iter(DataLoader(make_data(), batch_size=16))))
        candidate.end_warmup()
        assert compiler.runs > 0
        lines = findings("sync_points", job)
    assert any(line_of(Waits, "max().item()") in line for line in lines)


def test_it_can_be_forbidden_and_takes_no_time_without_a_budget():
    for techniques, expected in (({"sync_points": False}, "forbidden"), ({}, "nothing-measured")):
        model, loader, opt = make_job()
        run = flatout.optimize(model, loader, opt, functional.cross_entropy, techniques=techniques, budget=0)
        row = run.report.row("sync_points")
        assert row.status == "not tried"
        assert expected in reasons(row)
