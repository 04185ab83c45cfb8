"""Logged values reach all listeners, exact and in order. For a GPU see tests/gpu/test_logs.py."""

import threading

import numpy as np
import pytest
import torch
from torch.nn import functional

import flatout
from flatout.training.logged_metrics import Logs
from tests.jobs import QUICK, make_job

VALUES = [
    torch.tensor(0.1),
    torch.tensor(0.1, dtype=torch.float64),
    torch.tensor(0.1, dtype=torch.bfloat16),
    torch.tensor(2**62 + 1),
    torch.tensor(True),
    torch.tensor([[3.0]]),
    torch.tensor(1.5, requires_grad=True) * 2,
    torch.tensor(float("inf")),
    7,
    0.1,
    np.float32(0.1),
]


@pytest.mark.parametrize("value", VALUES, ids=str)
def test_values_are_exact(value):
    logs = Logs()
    logs.log("x", value, 3)
    assert list(logs) == [(3, "x", value.item() if isinstance(value, torch.Tensor) else value)]


def test_a_tensor_may_change_afterwards():
    logs, x = Logs(), torch.tensor(1.0)
    logs.log("x", x, 0)
    x.fill_(2.0)
    assert logs.latest("x") == 1.0


def test_on_a_cpu_nothing_is_on_its_way():
    logs = Logs()
    logs.log("x", torch.tensor(1.0), 0)
    assert not logs.poll()


def test_listeners_hear_everything_in_order_until_they_stop():
    logs, heard = Logs(keep=2), []
    logs.log("before", 0, 0)
    stop = logs.listen(lambda *what: heard.append(what))
    for step in range(4):
        logs.log("x", torch.tensor(float(step)), step)
    stop()
    logs.log("after", 5, 5)
    assert heard == [(step, "x", float(step)) for step in range(4)]
    assert list(logs) == [(3, "x", 3.0), (5, "after", 5)]  # memory is limited
    assert logs.latest("x") == 3.0
    assert logs.latest("before") is None


def test_a_listener_may_log_and_flush():
    logs, heard = Logs(), []

    def listener(step, name, value):
        heard.append((name, value))
        if name == "x":
            logs.log("twice x", 2 * value, step)
            logs.flush()
        heard.append("end")

    logs.listen(listener)
    logs.log("x", 1, 0)
    assert heard == [("x", 1), "end", ("twice x", 2), "end"]


def test_a_listener_that_raises_is_heard_and_blocks_nobody():
    logs = Logs()

    def listener(step, name, value):
        raise RuntimeError("the disk is full")

    stop = logs.listen(listener)
    with pytest.raises(RuntimeError, match="disk"):
        logs.log("x", 1, 0)
    stop()
    logs.log("x", 2, 1)
    assert [value for _, _, value in logs] == [1, 2]


def test_threads_lose_nothing_and_keep_their_order():
    logs, heard = Logs(keep=100_000), []
    logs.listen(lambda *what: heard.append(what))

    def work(name):
        for step in range(500):
            logs.log(name, torch.tensor(step), step)

    threads = [threading.Thread(target=work, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    logs.flush()
    assert heard == list(logs)
    for name in "abcd":
        assert [value for _, n, value in heard if n == name] == list(range(500))


@pytest.mark.parametrize(
    ("value", "error", "what"),
    [
        (torch.zeros(2), ValueError, r"\(2,\).*'x'"),
        (torch.zeros(0), ValueError, r"\(0,\).*'x'"),
        ("1", TypeError, "str.*'x'"),
        (None, TypeError, "NoneType.*'x'"),
    ],
)
def test_what_is_no_number_is_refused_by_name(value, error, what):
    logs = Logs()
    with pytest.raises(error, match=what):
        logs.log("x", value, 0)
    assert list(logs) == []


def test_a_run_counts_the_steps():
    model, loader, opt = make_job()
    run = flatout.optimize(model, loader, opt, functional.cross_entropy, techniques=QUICK, budget=0)
    losses = []
    for batch in run.loader:
        loss = run.step(batch)
        losses.append(loss.item())
        run.log("loss", loss)
    run.log("lr", 0.01, step=100)
    run.flush_logs()
    assert list(run.logs) == [*((i + 1, "loss", loss) for i, loss in enumerate(losses)), (100, "lr", 0.01)]


def test_a_loop_of_ones_own_says_the_step():
    model, loader, _ = make_job()
    run = flatout.optimize(model, loader, techniques=QUICK, budget=0)
    run.log("x", 1.0, step=4)
    assert list(run.logs) == [(4, "x", 1.0)]
    with pytest.raises(ValueError, match="step="):
        run.log("x", 1.0)


def test_fit_hands_over_what_listeners_wait_for():
    class Counting(Logs):
        flushes = 0

        def flush(self):
            self.flushes += 1
            super().flush()

    model, loader, opt = make_job()
    run = flatout.optimize(model, loader, opt, functional.cross_entropy, techniques=QUICK, budget=0)
    run.logs = Counting()
    run.fit(2, progress=False)
    assert run.logs.flushes == 2
