"""Logging on a real GPU: no synchronization, and the values at the time of the call."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn
from torch.nn import functional

import flatout
from flatout.training.logged_metrics import _BLOCK, Logs
from tests.gpu.trace import traced

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU: none found")

DEVICE = torch.device("cuda")
LONG = 500_000_000
"""Cycles that keep the GPU busy for about a quarter of a second."""


@pytest.fixture
def logs():
    """Return logs whose pinned memory exists, because the first allocation may synchronize."""
    logs = Logs()
    logs.log("warm-up", torch.zeros((), device=DEVICE), -1)
    logs.flush()
    return logs


@pytest.fixture
def no_syncs():
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    "value",
    [
        torch.tensor(0.1),
        torch.tensor(0.1, dtype=torch.float64),
        torch.tensor(0.1, dtype=torch.float16),
        torch.tensor(0.1, dtype=torch.bfloat16),
        torch.tensor(2**62 + 1),
        torch.tensor(True),
        torch.tensor([[3.0]]),
        torch.tensor(1.5, requires_grad=True),
    ],
    ids=str,
)
def test_values_are_exact(value):
    logs = Logs()
    logs.log("x", value.to(DEVICE), 1)
    assert list(logs) == [(1, "x", value.item())]


def test_it_does_not_wait_and_values_come_later_in_order(logs, no_syncs):
    x = torch.zeros((), device=DEVICE)
    torch.cuda._sleep(LONG)
    for step in range(10):
        x += 1
        logs.log("x", x, step)
        logs.log("host", step, step)
    assert logs.latest("x") is None  # the GPU is still busy
    assert logs.latest("host") is None  # values keep their order
    x.fill_(-1.0)
    logs.flush()
    assert [(step, value) for step, name, value in logs if name == "x"] == [(i, i + 1.0) for i in range(10)]
    assert [value for _, name, value in logs if name == "host"] == list(range(10))


def test_a_trace_has_no_wait(logs):
    x = torch.ones((), device=DEVICE)
    trace = traced(lambda: [logs.log("x", x * i, i) for i in range(5)])
    assert not [name for name in trace.waits if "Synchronize" in name]


def test_slots_are_used_again(logs):
    x = torch.zeros((), device=DEVICE)
    for step in range(5 * _BLOCK):
        logs.log("x", x + step, step)
        if step % 10 == 0:
            logs.flush()
    logs.flush()
    assert len(logs._pools[x.device, x.dtype]) == _BLOCK
    assert [value for _, name, value in logs if name == "x"] == [float(i) for i in range(5 * _BLOCK)]


def test_streams_and_threads(logs):
    def work(name):
        with torch.cuda.stream(torch.cuda.Stream()):
            x = torch.zeros((), device=DEVICE)
            for step in range(300):
                x += 1
                logs.log(name, x, step)
            torch.cuda.current_stream().synchronize()

    threads = [threading.Thread(target=work, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name in "ab":
        assert [value for _, n, value in logs if n == name] == [i + 1.0 for i in range(300)]


def test_slots_made_in_inference_serve_training_too():
    logs, x = Logs(), torch.ones((), device=DEVICE)
    with torch.inference_mode():
        logs.log("x", x + 1, 0)
    logs.log("x", (x * 3).requires_grad_(), 1)
    assert [value for _, _, value in logs] == [2.0, 3.0]


def test_a_training_step_that_logs_does_not_wait():
    torch.manual_seed(0)
    model = nn.Linear(64, 10, device=DEVICE)
    batches = [(torch.randn(32, 64, device=DEVICE), torch.randint(0, 10, (32,), device=DEVICE))] * 6
    opt = torch.optim.AdamW(model.parameters())
    run = flatout.optimize(model, batches, opt, functional.cross_entropy, budget=0)

    def step(batch):
        run.log("loss", run.step(batch))

    for batch in batches[:3]:
        step(batch)
    run.flush_logs()
    trace = traced(lambda: [step(batch) for batch in batches[3:]])
    assert not [name for name in trace.waits if "Synchronize" in name]
    assert [step for step, _, _ in run.logs] == [1, 2, 3, 4, 5, 6]
