"""Inference by ``optimize(model.eval(), loader)``: forward passes without gradients or an optimizer."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import flatout
from tests.clock import Clock
from tests.helpers import snapshot
from tests.jobs import Net, job_of, make_data, tried
from tests.reasons import reasons
from tests.unseen import Unseen

LIGHT = {"compile": False, "workers": False, "cpu_threads": False}


@pytest.fixture
def loader() -> DataLoader:
    return DataLoader(make_data(), batch_size=16)


@pytest.mark.usefixtures("clock")
def test_a_model_in_eval_mode_is_tuned_for_inference(loader: DataLoader) -> None:
    torch.manual_seed(0)
    model = Net().eval().requires_grad_(False)
    plain = copy.deepcopy(model)
    before = snapshot(model)
    run = flatout.optimize(model, loader, techniques=LIGHT | {"precision": False}, budget=1)
    tuned, batches = run
    assert tuned is model
    assert snapshot(model) == before
    assert run.report.summary.before is not None  # something was timed
    assert "for-inference" in reasons(run.report.summary.notes[0])
    seen = 0
    with torch.inference_mode():
        for x, _ in batches:
            torch.testing.assert_close(model(x), plain(x))
            seen += len(x)
    assert seen == 96
    with pytest.raises(RuntimeError, match="optimizer"):
        run.step(next(iter(loader)))
    run.undo()
    assert type(model) is Net


def test_its_steps_are_only_forwards(loader: DataLoader) -> None:
    unseen = Unseen(seen=[])

    class Watched(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            unseen.seen.append((self.training, torch.is_grad_enabled(), torch.is_inference_mode_enabled()))
            return super().forward(x)

    model = Watched(8, 3).eval()
    tried(model, loader)
    assert len(unseen.seen) > 2  # a check, a count of FLOPs, and a step of the forced technique
    assert set(unseen.seen) == {(False, False, True)}
    assert model.weight.grad is None
    count = job_of(model, loader=loader, inference=True).work(next(iter(loader))).flops
    assert count.forward == 2 * 16 * 8 * 3
    assert count.backward == 0


def test_compute_loss_says_what_inference_computes(loader: DataLoader, clock: Clock) -> None:
    class Encoder(nn.Linear):
        def encode(self, x: torch.Tensor) -> torch.Tensor:
            return self(x) * 2

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            clock.advance(0.01 if torch.is_autocast_enabled("cpu") else 0.02)
            return super().forward(x)

    unseen = Unseen(calls=[])

    def code(model: Encoder, batch: tuple[torch.Tensor, torch.Tensor]) -> dict[str, torch.Tensor]:
        unseen.calls.append(len(batch[0]))
        return {"code": model.encode(batch[0])}

    run = flatout.optimize(Encoder(8, 3).eval(), loader, compute_loss=code, techniques=LIGHT, budget=20)
    assert set(unseen.calls) == {16}
    assert run.report.row("precision").status == "kept"


def test_what_cannot_be_tuned_is_refused(loader: DataLoader) -> None:
    class Silent(nn.Linear):
        def forward(self, x: torch.Tensor) -> str:
            return "nothing"

    with pytest.raises(TypeError, match="output"):
        flatout.optimize(Silent(8, 3).eval(), loader, budget=0)
    with pytest.raises(ValueError, match=r"^model"):
        flatout.optimize(nn.Linear(8, 3).requires_grad_(False), loader, budget=0)
