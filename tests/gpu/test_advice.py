"""What is said about a step on a real GPU: lines that wait for it, and layers that tensor cores cannot use fully."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

import flatout
from tests.jobs import QUICK, Net, make_data
from tests.techniques.test_sync_points import REST, Waits, line_of, row_of

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU: none found"),
    pytest.mark.usefixtures("short_trials"),
]


def test_lines_that_wait_are_named():
    why = row_of(Waits(), device="cuda").why
    for part in ("max().item()", "if x.sum()", "[x > 2]"):
        assert line_of(Waits, part) in why
    assert "makes Python wait for the GPU 2 times in a step" in why


def test_nothing_is_said_of_a_step_that_does_not_wait():
    model = nn.Sequential(nn.Linear(8, 3))
    opt = torch.optim.SGD(model.parameters(), 0.01)
    row = row_of(model, device="cuda", optimizer=opt, loss_fn=functional.cross_entropy, techniques=REST)
    assert row.status == "not applicable"


def test_odd_layers_are_named_in_the_precision_that_is_used():
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("needs a GPU that computes in bf16")
    model = Net()
    opt = torch.optim.SGD(model.parameters(), 0.01)
    loader = torch.utils.data.DataLoader(make_data(), 16)
    techniques = QUICK | {"precision": "bf16"}
    run = flatout.optimize(model, loader, opt, functional.cross_entropy, techniques=techniques, budget=2)
    row = run.report.row("multiples_of_8")
    assert row.status == "advice"
    assert row.why.startswith("body.4 (Linear) has out_features 3: 8 would do (no multiple of 8)")
    assert run.report.row("cpu_threads").status == "not applicable"
