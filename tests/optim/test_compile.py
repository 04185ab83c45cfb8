"""Train steps under torch.compile: the update runs after a graph break, with equal numbers, and compiles once."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.utils import counters

import flatout.amp as fa
import flatout.optim as fo

STEPS = 5


@pytest.fixture(autouse=True)
def _no_recompiles():
    torch._dynamo.reset()
    counters.clear()
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield
    torch._dynamo.reset()


def batches():
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(16, 4, generator=generator), torch.randn(16, 2, generator=generator)) for _ in range(STEPS)]


def plainly(model, loss, optimizer, scaler):
    loss.backward()
    optimizer.step()


def clipped(model, loss, optimizer, scaler):
    loss.backward()
    fo.update(optimizer, max_grad_norm=0.1)


def by_hand(model, loss, optimizer, scaler):
    (loss * 4).backward()
    fa.unscale_and_check_(model.parameters(), 0.25)
    fa.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()


def lazily(model, loss, optimizer, scaler):
    scaler.scale(loss).backward()
    scaler.step(optimizer, max_grad_norm=0.1)
    scaler.update()


def eagerly(model, loss, optimizer, scaler):
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    fa.clip_grad_norm_(model.parameters(), 0.1)
    scaler.step(optimizer)
    scaler.update()


def trained(name, way, options, compiled):
    """Train. Return losses, parameters, state, and the number of compiled frames and graphs after each step."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    optimizer = getattr(fo, name)(model.parameters(), lr=1e-2, **options)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    scaler = fa.GradScaler("cpu", init_scale=8.0, growth_interval=2)

    def step(x, y):
        loss = (model(x) - y).square().mean()
        way(model, loss, optimizer, scaler)
        optimizer.zero_grad()
        return loss.detach()

    if compiled:
        step = torch.compile(step, backend="eager")
    numbers, work = [], []
    for x, y in batches():
        numbers.append(step(x, y))
        scheduler.step()
        work.append((counters["frames"]["total"], counters["stats"]["unique_graphs"]))
    numbers += [p.detach() for p in model.parameters()]
    numbers += [value for state in optimizer.state.values() for value in state.values()]
    return numbers, work


@pytest.mark.parametrize("way", [plainly, clipped, by_hand, lazily, eagerly], ids=lambda way: way.__name__)
@pytest.mark.parametrize(
    ("name", "options"),
    [("AdamW", {}), ("AdamW", {"ema_decay": 0.9}), ("SGD", {"momentum": 0.9}), ("Lion", {})],
    ids=str,
)
def test_a_compiled_train_step_is_the_train_step_and_compiled_once(name, options, way):
    expected, _ = trained(name, way, options, compiled=False)
    numbers, work = trained(name, way, options, compiled=True)
    assert len(expected) == len(numbers)
    assert all(map(torch.equal, expected, numbers))
    assert work[0][1] >= 1
    assert set(work[1:]) == {work[1]}, "whatever the learning rate and the scale"


def test_a_step_is_one_graph_break():
    p = torch.nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    optimizer = fo.SGD([p], lr=0.5)

    def function(x):
        y = x * 2
        optimizer.step()
        return y + p

    found = torch._dynamo.explain(function)(torch.ones(3))
    assert (found.graph_count, found.graph_break_count) == (2, 1)
