"""Advice about a step on a real GPU: lines that synchronize, and layers that underuse tensor cores."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

import flatout
from tests.helpers import line_of
from tests.jobs import QUICK, Net, make_data
from tests.reasons import reasons
from tests.techniques.harness import findings, refusal
from tests.techniques.test_sync_points import Waits, small_job

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU: none found"),
    pytest.mark.usefixtures("short_trials"),
]


def test_lines_that_wait_are_named():
    lines = findings("sync_points", small_job(Waits(), device="cuda"))
    for part in ("max().item()", "if x.sum()", "[x > 2]"):
        assert any(line_of(Waits, part) in line for line in lines)
    often = next(line for line in lines if line_of(Waits, "max().item()") in line)
    assert "waits-for-gpu" in reasons(often)
    assert " 2 times" in often


def test_nothing_is_said_of_a_step_that_does_not_wait():
    model = nn.Sequential(nn.Linear(8, 3))
    opt = torch.optim.SGD(model.parameters(), 0.01)
    form = {"optimizer": opt, "loss_fn": functional.cross_entropy}
    assert "no-waits" in refusal("sync_points", small_job(model, "cuda", **form))


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
    assert all(fact in row.why.splitlines()[0] for fact in ("body.4", "Linear", "out_features 3", "8"))
    assert run.report.row("cpu_threads").status == "not applicable"
