"""Training that becomes infinite or NaN: it is said once, and ends with the name of where it began."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import flatout
from flatout import finite
from tests.jobs import make_data


class Spoils(nn.Module):
    """Divides by what it is told."""

    by = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x / self.by


def run_of(middle: nn.Module, loss_fn: Callable[[Tensor, Tensor], Tensor] = functional.cross_entropy, **how: object):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 4), middle, nn.Linear(4, 3))
    loader = torch.utils.data.DataLoader(make_data(), batch_size=16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return flatout.optimize(model, loader, optimizer, loss_fn, budget=0, **how)


def train(run: flatout.Run, steps: int) -> int:
    done = 0
    while True:
        for batch in run.loader:
            if done == steps:
                return done
            run.step(batch)
            done += 1


def test_finite_training_says_nothing() -> None:
    run = run_of(nn.Tanh())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert train(run, 120) == 120


def test_the_first_bad_module_is_named_when_skipping_does_not_end() -> None:
    spoils = Spoils()
    run = run_of(nn.Sequential(nn.Tanh(), spoils), precision="fp16")
    run.stop_after_bad = 5
    train(run, 12)
    spoils.by = 0.0
    with pytest.raises(FloatingPointError, match=r"5 steps in a row.* the output of 1\.1 \(Spoils\) is the first"):
        train(run, 200)


def test_a_bad_batch_now_and_then_stops_nothing() -> None:
    spoils = Spoils()
    run = run_of(spoils, lambda output, y: functional.cross_entropy(output, y) * 0 + spoils.by)
    run.stop_after_bad = 2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(40):
            for i, batch in enumerate(run.loader):
                spoils.by = float("inf") if i % 2 else 1.0
                run.step(batch)


def test_a_parameter_that_has_gone_is_named() -> None:
    run = run_of(nn.Tanh())
    run.stop_after_bad = 3
    with torch.no_grad():
        run.model[0].weight[0, 0] = float("nan")
    with pytest.warns(RuntimeWarning, match="is nan"), pytest.raises(FloatingPointError, match=r"parameter 0\.weight"):
        train(run, 200)


def test_a_scaler_that_skips_on_and_on_is_told_by_its_gradient() -> None:
    class Steep(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx, gradient: Tensor) -> Tensor:
            return gradient * float("inf")

    class Wall(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Steep.apply(x)

    run = run_of(Wall(), precision="fp16")
    run.stop_after_bad = 4
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(FloatingPointError, match=r"gradient of 0\.bias is the first"):
            train(run, 200)


def test_what_a_loss_function_makes_infinite_is_said() -> None:
    run = run_of(nn.Tanh(), lambda output, y: output.sum() / 0, precision="fp16")
    run.stop_after_bad = 2
    with pytest.raises(FloatingPointError, match="every module's output is finite"):
        train(run, 200)


def test_looks_are_few_while_all_is_well(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    monkeypatch.setattr(finite.Logs, "log", lambda self, name, value, step: looked.append(step))
    train(run_of(nn.Tanh()), 100)
    assert looked == list(range(1, 101, finite.LOOK_EVERY))


def test_patience_is_a_number_of_steps() -> None:
    with pytest.raises(ValueError, match="stop_after_bad must be >= 1, got 0"):
        run_of(nn.Tanh()).stop_after_bad = 0
