"""torch runs on one thread inside `serial`, and on the user's number of threads after it."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading

import pytest
import torch

from flatout.core.torch_state import serial

pytestmark = pytest.mark.skipif(not torch.backends.openmp.is_available(), reason="torch was built without OpenMP")


@pytest.fixture(autouse=True)
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def test_serial_inside_and_as_before_behind():
    with serial():
        assert torch.get_num_threads() == 1
        with serial():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 3


def test_an_error_passes_and_the_threads_come_back():
    with pytest.raises(ZeroDivisionError), serial():
        raise ZeroDivisionError
    assert torch.get_num_threads() == 3


def test_other_threads_keep_theirs():
    seen = []
    with serial():
        other = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        other.start()
        other.join()
    assert seen == [3]


def test_a_thread_that_has_never_asked_has_torchs_number_behind():
    seen = []

    def work() -> None:
        with serial():
            torch.ones(10**6).sum()
            seen.append(torch.get_num_threads())
        seen.append(torch.get_num_threads())

    fresh = threading.Thread(target=work)
    fresh.start()
    fresh.join()
    assert seen == [1, 3]


@pytest.mark.slow
def test_the_order_of_an_epoch_wakes_no_thread():
    program = """
        import os, torch
        from torch.utils.data import *
        from flatout.data import InMemoryLoader

        torch.set_num_threads(1)
        n = 100_000
        data = TensorDataset(torch.arange(n))
        last = Subset(data, torch.arange(n).flip(0))
        loaders = [
            DataLoader(data, 10, shuffle=True),
            DataLoader(data, 10, sampler=RandomSampler(data, num_samples=2 * n)),
            DataLoader(data, 10, sampler=SubsetRandomSampler(torch.arange(n))),
            DataLoader(data, 10, sampler=DistributedSampler(data, 2, 0)),
            DataLoader(last, 10, shuffle=True),
        ]
        loaders = [InMemoryLoader(loader) for loader in loaders]

        torch.set_num_threads(3)
        before = len(os.listdir("/proc/self/task"))
        for loader in loaders:
            next(iter(loader))  # of one small batch: it needs no thread of ours
        assert len(os.listdir("/proc/self/task")) == before
        torch.arange(n)  # which does wake them
        assert len(os.listdir("/proc/self/task")) == before + 2
        print("asleep")
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], timeout=600, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "asleep\n"), done.stderr
