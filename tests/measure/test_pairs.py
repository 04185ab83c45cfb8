"""Techniques that pay in each other's company alone: tried as a pair, kept as two rows."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import flatout
from flatout.measure import equivalence
from flatout.measure.bench import Bench
from flatout.measure.equivalence import Allowed
from flatout.techniques.autocast import autocast_dtype
from tests.helpers import snapshot

ONLY_THESE = dict.fromkeys(
    ["compile", "cpu_threads", "fused_optimizer", "in_memory", "torchscript", "workers", "channels_last"], False
)
SLOWER, FASTER = 2.0, 0.5


class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        q, k, v = self.qkv(x).view(len(x), 4, 3, 2, 4).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v)
        return self.head(attended.transpose(1, 2).reshape(len(x), 4, 8).mean(1))


@pytest.fixture
def job():
    torch.manual_seed(0)
    model = Attends()
    data = TensorDataset(torch.randn(64, 4, 8), torch.arange(64) % 3)
    return model, DataLoader(data, batch_size=16), torch.optim.SGD(model.parameters(), lr=0.01)


@pytest.fixture
def clock(monkeypatch, job):
    """Trials that take the seconds that a test says, by what is on: nothing, ``"bf16"``, ``"math"`` or both."""
    costs = {(): 1.0}
    timed = []

    def cost():
        names = ("bf16", "math")
        flags = (autocast_dtype(job[0]) is not None, not torch.backends.cuda.flash_sdp_enabled())
        return costs[tuple(name for name, flag in zip(names, flags, strict=True) if flag)]

    now = []
    plain_update = Bench.update

    def update(self, *args):
        now.append(cost())
        plain_update(self, *args)

    def interleave(self, old, new):
        old(0)
        before = now[-1]
        new(0)
        timed.append((before, now[-1]))
        return [before] * 8, [now[-1]] * 8

    monkeypatch.setattr("flatout.measure.tuner.HOPELESS", float("inf"))
    monkeypatch.setattr(Bench, "update", update)
    monkeypatch.setattr(Bench, "interleave", interleave)
    monkeypatch.setattr("flatout.measure.tuner.Tuner.race", lambda self, rows: None)
    return costs, timed


def tuned(job, **techniques):
    run = flatout.optimize(*job, functional.cross_entropy, techniques=ONLY_THESE | techniques, budget=100.0)
    return run, {row.technique: row for row in run.report.rows}


def test_what_pays_together_alone_is_kept_as_two(clock, job):
    clock[0].update({("bf16",): SLOWER, ("math",): SLOWER, ("bf16", "math"): FASTER})
    before = snapshot(job[0], job[2])
    run, rows = tuned(job)
    assert run.plan.decisions == {"precision": "bf16", "sdpa_backend": "math"}
    assert clock[1] == [(1.0, SLOWER), (1.0, FASTER)]  # bf16, then both; math is settled with that
    assert autocast_dtype(job[0]) is torch.bfloat16
    assert not torch.backends.cuda.flash_sdp_enabled()
    both, math = rows["precision"], rows["sdpa_backend"]
    assert both.status == math.status == "kept"
    assert [trial.candidate for trial in both.trials] == ["bf16", "bf16 + SDPA backend math"]
    assert both.gain.ratio == pytest.approx(1 / FASTER)
    assert "in the company of SDPA backend alone" in both.why
    assert math.chosen == "math"
    assert math.gain is None
    assert "together with mixed precision" in math.why
    run.undo()
    assert snapshot(job[0], job[2]) == before


def test_a_plan_of_a_pair_is_applied_again(clock, job):
    clock[0].update({("bf16",): SLOWER, ("math",): SLOWER, ("bf16", "math"): FASTER})
    run, _ = tuned(job)
    run.undo()
    flatout.optimize(*job, functional.cross_entropy, plan=run.plan)
    assert autocast_dtype(job[0]) is torch.bfloat16
    assert not torch.backends.cuda.flash_sdp_enabled()
    flatout.undo(job[0])


def test_a_pair_that_is_slower_too_leaves_each_to_its_own_trial(clock, job):
    clock[0].update({("bf16",): SLOWER, ("math",): FASTER, ("bf16", "math"): SLOWER})
    run, rows = tuned(job)
    assert run.plan.decisions == {"sdpa_backend": "math"}
    assert clock[1] == [(1.0, SLOWER), (1.0, SLOWER), (1.0, FASTER)]
    assert rows["precision"].status == "rejected"
    assert len(rows["precision"].trials) == 2
    assert autocast_dtype(job[0]) is None
    run.undo()


def test_what_pays_alone_is_tried_alone(clock, job):
    clock[0].update({("bf16",): FASTER, ("math",): 1.0, ("bf16", "math"): SLOWER})
    run, _ = tuned(job)
    assert run.plan.decisions == {"precision": "bf16"}
    assert clock[1] == [(1.0, FASTER), (FASTER, SLOWER)]
    run.undo()


@pytest.mark.parametrize("choice", [False, "math"])
def test_a_companion_that_was_decided_about_makes_no_pair(clock, job, choice):
    clock[0].update({("bf16",): SLOWER, ("math",): 1.0, ("bf16", "math"): FASTER})
    run, rows = tuned(job, sdpa_backend=choice)
    assert len(rows["precision"].trials) == 1
    run.undo()


def test_what_failed_makes_no_pair(clock, job, monkeypatch):
    clock[0].update({("bf16",): SLOWER, ("math",): SLOWER, ("bf16", "math"): FASTER})
    nothing = Allowed(outputs=1.0, gradients=1.0, losses=-1.0)
    monkeypatch.setattr(equivalence, "ALLOWED", dict.fromkeys(equivalence.ALLOWED, nothing))
    run, rows = tuned(job)
    assert "losses differ" in rows["precision"].why
    assert len(rows["precision"].trials) == 1
    run.undo()
