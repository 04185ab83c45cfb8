"""torch's OpenMP threads stay asleep inside `serial`, and are the user's own again behind it."""

from __future__ import annotations

import threading

import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from flatout.data import InMemoryLoader
from flatout.data.openmp import serial

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


def test_the_order_of_an_epoch_wakes_no_thread(monkeypatch):
    seen = []
    permute = torch.randperm

    def randperm(*args, **kwargs):
        seen.append(torch.get_num_threads())
        return permute(*args, **kwargs)

    monkeypatch.setattr(torch, "randperm", randperm)
    dataset = TensorDataset(torch.arange(100))
    for _ in InMemoryLoader(DataLoader(dataset, 10, sampler=RandomSampler(dataset))):
        assert torch.get_num_threads() == 3
    assert seen == [1]
