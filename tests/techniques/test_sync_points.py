"""Lines of model and loss that would make Python wait are named, and nothing else is."""

import inspect
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

import flatout
from tests.helpers import snapshot
from tests.jobs import QUICK, Net, make_data, make_job

REST = QUICK | {"in_memory": False, "fused_optimizer": False, "cpu_threads": False}
FILE = Path(__file__).name


def line_of(function, part):
    lines, first = inspect.getsourcelines(function)
    return f"{FILE}:{first + next(i for i, line in enumerate(lines) if part in line)}"


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


def row_of(model=None, budget=1.0, device="cpu", **form):
    torch.manual_seed(0)
    model = model or Net()
    opt = torch.optim.SGD(model.parameters(), 0.01)
    loader = DataLoader(make_data(), batch_size=16)
    form = form or {"optimizer": opt, "loss_fn": functional.cross_entropy}
    form.setdefault("techniques", REST)
    return flatout.optimize(model, loader, budget=budget, device=device, **form).report.row("sync_points")


@pytest.fixture(autouse=True)
def _quick(short_trials):
    pass


def test_lines_of_the_forward_are_named_with_how_often():
    row = row_of(Waits(), budget=40)
    assert row.status == "advice"
    often, once, mask, remedy, other_remedy = row.why.splitlines()
    assert line_of(Waits, "max().item()") in often
    assert "would make Python wait for a GPU 2 times in a step (item)" in often
    assert "self.largest = max(self.largest, row.max().item())" in often
    assert line_of(Waits, "if x.sum()") in once
    assert "once in a step" in once
    assert line_of(Waits, "[x > 2]") in mask
    assert "(mask)" in mask
    assert "run.log" in remedy
    assert "a mask" in other_remedy


def test_lines_of_the_loss_and_of_a_backward_are_named():
    model = Net()
    opt = torch.optim.SGD(model.parameters(), 0.01)
    lines = row_of(model, optimizer=opt, compute_loss=printing).why.splitlines()
    places = {
        "(print)": line_of(printing, "str(loss)"),
        "(mask": line_of(printing, "kept ="),
        "(tolist)": line_of(Doubled, "tolist"),
    }
    for call, place in places.items():
        assert sum(call in line and place in line for line in lines) == 1
    assert len(lines) == 5
    assert "run.log" in lines[3]
    assert "size of a result" in lines[4]


@pytest.mark.parametrize("form", ["run", "own loop", "inference"])
def test_every_form_is_looked_at(form):
    model, more = Waits(), {}
    if form == "run":
        more = {"optimizer": torch.optim.Adam(model.parameters()), "loss_fn": functional.cross_entropy}
    if form == "inference":
        model.eval()
    assert line_of(Waits, "[x > 2]") in row_of(model, techniques=REST, **more).why


def test_what_torch_and_flatout_do_is_nobodys_fault():
    model = nn.Sequential(nn.Linear(8, 3))
    opt = torch.optim.SGD(model.parameters(), 0.01)
    row = row_of(model, optimizer=opt, loss_fn=functional.cross_entropy, max_grad_norm=1.0, accumulate=2)
    assert row.status == "not applicable"
    assert "flatout profile" in row.why


def test_what_torchs_own_modules_wait_for_is_not_said_of_the_line_that_called_optimize():
    model = nn.AdaptiveLogSoftmaxWithLoss(8, 10, [3, 6], 2.0)  # which looks for non-zero elements
    batches = [{"input_": torch.randn(16, 8), "target_": torch.randint(0, 10, (16,))} for _ in range(2)]
    opt = torch.optim.SGD(model.parameters(), 0.01)
    run = flatout.optimize(model, batches, opt, techniques=REST, budget=1, device="cpu")
    assert run.report.row("sync_points").status == "not applicable"


def test_looking_leaves_no_trace():
    model, loader, opt = make_job()
    before, item = snapshot(model, opt), torch.Tensor.tolist
    flatout.optimize(model, loader, opt, functional.cross_entropy, techniques=REST, budget=1, device="cpu").undo()
    assert snapshot(model, opt) == before
    assert torch.Tensor.tolist is item


def test_a_compiled_model_is_seen_through():
    row = row_of(Waits(), techniques=REST | {"compile": True}, compute_loss=lambda m, b: m(b[0]).mean())
    assert line_of(Waits, "max().item()") in row.why


def test_it_can_be_forbidden_and_takes_no_time_without_a_budget():
    assert row_of(Waits(), techniques=REST | {"sync_points": False}).status == "not tried"
    assert row_of(Waits(), budget=0).status == "not tried"
