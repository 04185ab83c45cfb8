"""Techniques that pay only in combination: tried as a pair, and kept as two rows."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import flatout
from tests.clock import TimedStep
from tests.helpers import snapshot
from tests.process_state import attention
from tests.reasons import reasons

ONLY_THESE = dict.fromkeys(
    ["compile", "cpu_threads", "fused_optimizer", "in_memory", "torchscript", "workers", "channels_last"], False
)
SLOWER, FASTER = 2.0, 0.5
"""Seconds of a step, if a step without the techniques takes one second."""


class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        q, k, v = self.qkv(x).view(len(x), 4, 3, 2, 4).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v)
        return self.head(attended.transpose(1, 2).reshape(len(x), 4, 8).mean(1))


class WrongIn16Bits(Attends):
    def forward(self, x):
        return super().forward(x) * (3 if torch.is_autocast_enabled("cpu") else 1)


@pytest.fixture
def tuned(clock):
    """Function ``tuned(bf16, math, both)`` that returns a run with these seconds per step and its rows by technique."""
    runs = []

    def tune(bf16, math, both, model=Attends, **techniques):
        seconds = {(): 1.0, ("precision",): bf16, ("sdpa_backend",): math, ("precision", "sdpa_backend"): both}
        torch.manual_seed(0)
        model = model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        loader = DataLoader(TensorDataset(torch.randn(64, 4, 8), torch.arange(64) % 3), batch_size=16)
        step = TimedStep(clock, lambda samples, active: seconds[tuple(sorted(active))]).watch(model, optimizer)
        tune.before = snapshot(model, optimizer)
        run = flatout.optimize(model, loader, optimizer, step, techniques=ONLY_THESE | techniques, budget=1000)
        runs.append(run)
        return run, {row.technique: row for row in run.report.rows}

    yield tune
    for run in runs:
        run.undo()


def timed(row):
    """Return the seconds per step of baseline and candidate for each trial."""
    return [(round(trial.baseline_ms / 1e3, 2), round(trial.candidate_ms / 1e3, 2)) for trial in row.trials]


def computes_in_16_bits(run):
    seen = []
    handle = run.model.qkv.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    run.step(next(iter(run.loader)))
    handle.remove()
    return seen == [torch.bfloat16]


def attends_by_products():
    return not torch.backends.cuda.flash_sdp_enabled()


def test_candidates_that_pay_only_together_are_kept_as_two(tuned):
    before = attention()
    run, rows = tuned(bf16=SLOWER, math=SLOWER, both=FASTER)
    assert run.plan.decisions == {"precision": "bf16", "sdpa_backend": "math"}
    both, math = rows["precision"], rows["sdpa_backend"]
    assert timed(both) == [(1.0, SLOWER), (1.0, FASTER)]  # bf16, then both
    assert both.status == math.status == "kept"
    assert [trial.candidate for trial in both.trials] == ["bf16", "bf16 + SDPA backend math"]
    assert both.gain.ratio == pytest.approx(1 / FASTER, rel=1e-3)
    assert "pays-together-only" in reasons(both)
    assert math.chosen == "math"
    assert math.trials == ()  # decided with the pair
    assert math.gain is None
    assert "tried-as-pair" in reasons(math)
    assert attends_by_products()
    run.undo()
    assert snapshot(run.model, run.optimizer) == tuned.before
    assert attention() == before


def test_a_plan_of_a_pair_is_applied_again(tuned):
    run, _ = tuned(bf16=SLOWER, math=SLOWER, both=FASTER)
    run.undo()
    again = flatout.optimize(run.model, run.loader, run.optimizer, functional.cross_entropy, plan=run.plan, budget=0)
    assert computes_in_16_bits(again)
    assert attends_by_products()
    again.undo()


def test_a_pair_that_is_slower_too_leaves_each_to_its_own_trial(tuned):
    run, rows = tuned(bf16=SLOWER, math=FASTER, both=SLOWER)
    assert run.plan.decisions == {"sdpa_backend": "math"}
    assert timed(rows["precision"]) == [(1.0, SLOWER), (1.0, SLOWER)]
    assert timed(rows["sdpa_backend"]) == [(1.0, FASTER)]
    assert rows["precision"].status == "rejected"
    assert not computes_in_16_bits(run)


def test_a_candidate_that_pays_alone_is_kept_alone(tuned):
    run, rows = tuned(bf16=FASTER, math=1.0, both=1.0)
    assert run.plan.decisions == {"precision": "bf16"}
    assert timed(rows["precision"]) == [(1.0, FASTER), (1.0, 1.0)]
    assert timed(rows["sdpa_backend"]) == [(1.0, 1.0)]


@pytest.mark.parametrize("choice", [False, "math"])
def test_a_companion_that_was_decided_about_makes_no_pair(tuned, choice):
    _, rows = tuned(bf16=SLOWER, math=1.0, both=FASTER, sdpa_backend=choice)
    assert timed(rows["precision"]) == [(1.0, SLOWER)]


def test_a_failed_candidate_makes_no_pair(tuned):
    _, rows = tuned(bf16=SLOWER, math=SLOWER, both=FASTER, model=WrongIn16Bits)
    assert "numerics-differ" in reasons(rows["precision"])
    assert len(rows["precision"].trials) == 1
