"""Loops as users write them: after ``model, loader = optimize(model, loader)`` they train as before."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn
from torch.utils.data import DataLoader

import flatout
from tests.clock import Clock
from tests.helpers import bits, snapshot
from tests.jobs import NO_TECHNIQUES, QUICK, Net, loss_of
from tests.own_loops.harness import BF16, EXACT, Loop, assert_alike, make, plain, sgd


def grad_scaler(model: nn.Module, loader: Any) -> list[float]:
    optimizer, scaler, losses = sgd(model), torch.amp.GradScaler("cpu", init_scale=1024.0), []
    for x, y in loader:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    assert scaler.get_scale() == 1024.0  # no step is skipped
    return losses


def flatouts_scaler(model: nn.Module, loader: Any) -> list[float]:
    optimizer, scaler, losses = sgd(model), flatout.amp.GradScaler("cpu", init_scale=1024.0), []
    for x, y in loader:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer, max_grad_norm=0.5)
        scaler.update()
        losses.append(loss.item())
    return losses


def accumulation(model: nn.Module, loader: Any) -> list[float]:
    optimizer, losses, accumulate = sgd(model), [], 4
    for i, (x, y) in enumerate(loader):
        loss = functional.cross_entropy(model(x), y) / accumulate
        loss.backward()
        if (i + 1) % accumulate == 0 or i + 1 == len(loader):
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def several_optimizers(model: nn.Module, loader: Any) -> list[float]:
    first = torch.optim.SGD(model.body[:2].parameters(), lr=0.05)
    second = torch.optim.AdamW(model.body[2:].parameters(), lr=0.01)
    losses = []
    for x, y in loader:
        loss = functional.cross_entropy(model(x), y)
        first.zero_grad()
        second.zero_grad()
        loss.backward()
        first.step()
        second.step()
        losses.append(loss.item())
    return losses


def closures(model: nn.Module, loader: Any) -> list[float]:
    optimizer, losses = torch.optim.LBFGS(model.parameters(), lr=0.01, max_iter=3), []
    for x, y in loader:

        def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(x), y)
            loss.backward()
            return loss

        losses.append(optimizer.step(closure).item())
    return losses


def evaluation_between_epochs(model: nn.Module, loader: Any) -> list[float]:
    losses = []
    for _ in range(2):
        model.train()
        losses += plain(model, loader)
        model.eval()
        with torch.no_grad():
            losses += [functional.cross_entropy(model(x), y).item() for x, y in loader]
        assert not any(module.training for module in model.modules())
    return losses


def progressive_unfreezing(model: nn.Module, loader: Any) -> list[float]:
    model.body[0].requires_grad_(False)
    losses = plain(model, loader)
    model.body[0].requires_grad_(True)
    return losses + plain(model, loader)


def schedule_per_batch(model: nn.Module, loader: Any) -> list[float]:
    optimizer, losses = sgd(model), []
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=len(loader))
    for x, y in loader:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    assert scheduler.last_epoch == len(loader)
    return losses


def gradient_penalty(model: nn.Module, loader: Any) -> list[float]:
    optimizer, losses = sgd(model), []
    for x, y in loader:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        loss = loss + sum(grad.pow(2).sum() for grad in grads).sqrt()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def saved_on_the_way(model: nn.Module, loader: Any) -> list[float]:
    """Save and load the state dict and the whole model. The pickle must not name flatout."""
    losses = plain(model, loader)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    fresh = Net()
    fresh.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
    whole = pickle.dumps(model)
    assert b"flatout" not in whole
    for copied in (fresh, pickle.loads(whole), copy.deepcopy(model)):
        assert type(copied) is Net
        assert [bits(p) for p in copied.parameters()] == [bits(p) for p in model.parameters()]
    model.load_state_dict(fresh.state_dict())
    return losses + plain(model, loader)


def averaged(model: nn.Module, loader: Any) -> list[float]:
    """Train with torch's EMA, and compute the BatchNorm statistics of the average from the loader at the end."""
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer, losses = sgd(model), []
    for x, y in loader:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        ema.update_parameters(model)
        losses.append(loss.item())
    assert type(ema.module) is Net
    update_bn(loader, ema)
    ema.eval()
    with torch.no_grad():
        losses += [functional.cross_entropy(ema(x), y).item() for x, y in loader]
    return losses


def copied_average(model: nn.Module, loader: Any) -> list[float]:
    """Train with a common form of EMA: a deepcopy and a lerp."""
    ema = copy.deepcopy(model).requires_grad_(False)
    optimizer, losses = sgd(model), []
    for x, y in loader:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for average, parameter in zip(ema.parameters(), model.parameters(), strict=True):
                average.lerp_(parameter, 0.1)
            for average, buffer in zip(ema.buffers(), model.buffers(), strict=True):
                average.copy_(buffer)
        losses.append(loss.item())
    ema.eval()
    assert not any(p.requires_grad for p in ema.parameters())
    assert all(p.requires_grad for p in model.parameters())
    with torch.no_grad():
        losses += [functional.cross_entropy(ema(x), y).item() for x, y in loader]
    return losses


LOOPS: list[Loop] = [
    plain,
    grad_scaler,
    flatouts_scaler,
    accumulation,
    several_optimizers,
    closures,
    evaluation_between_epochs,
    progressive_unfreezing,
    schedule_per_batch,
    gradient_penalty,
    saved_on_the_way,
    averaged,
    copied_average,
]


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_a_loop_trains_as_it_did(loop: Loop) -> None:
    assert_alike(make, loop, EXACT, rel=1e-4)


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_a_loop_trains_on_in_sixteen_bits(loop: Loop) -> None:
    assert_alike(make, loop, BF16, rel=0.2 if loop is closures else 0.05)


@pytest.mark.usefixtures("short_trials")
def test_what_trials_decide_trains_alike(clock: Clock) -> None:
    def make_slow() -> tuple[nn.Module, DataLoader[Any]]:
        model, loader = make()
        model.register_forward_hook(lambda *_: clock.advance(0.01 if torch.get_num_threads() == 1 else 0.02))
        return model, loader

    def loop(model: nn.Module, loader: Any) -> list[float]:
        threads.append(torch.get_num_threads())
        return plain(model, loader)

    threads: list[int] = []
    assert_alike(make_slow, loop, QUICK, rel=1e-4, budget=20)
    assert threads == [2, 1]


def test_trials_of_an_own_loop_compare_what_compute_loss_returns(clock: Clock) -> None:
    model, loader = make()
    model.body.register_forward_hook(lambda *_: clock.advance(0.01 if torch.is_autocast_enabled("cpu") else 0.02))
    techniques = NO_TECHNIQUES | {"precision": None}
    run = flatout.optimize(model, loader, compute_loss=loss_of, techniques=techniques, budget=20)
    row = run.report.row("precision")
    assert row.status == "kept"
    assert 0 < row.trials[0].output_difference < 0.1  # the loss is the only output


def test_twice_is_once() -> None:
    def twice(model: nn.Module, loader: Any) -> list[float]:
        if isinstance(loader, DataLoader):
            return plain(model, loader)
        model, loader = flatout.optimize(model, loader, techniques=EXACT, budget=0)
        return plain(model, loader)

    assert_alike(make, twice, EXACT, rel=1e-4)


def test_nothing_of_a_run_is_left_behind_an_own_loop() -> None:
    model, loader = make()
    before = snapshot(model)
    _, batches = flatout.optimize(model, loader, techniques=BF16, budget=0)
    flatout.undo(model)
    del batches
    assert snapshot(model) == before
