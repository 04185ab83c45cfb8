"""Loaders whose samples are read once, in the order of the training, because reading them leaves a trace."""

import gzip
import itertools
import queue
import sqlite3
import threading

import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset

import flatout
from flatout.data.loaders import is_rewindable, why_not_read
from tests.jobs import QUICK, Net
from tests.reasons import reasons


class Samples(Dataset):
    """Dataset whose sample is the number of earlier reads, according to an iterator."""

    def __init__(self, held):
        self.held = held

    def __len__(self):
        return 32

    def __getitem__(self, i):
        return torch.full((8,), float(next(self.held))), i % 3


class Stream(IterableDataset):
    position = 0

    def __iter__(self):
        for _ in range(32):
            yield torch.full((8,), float(self.position)), self.position % 3
            self.position += 1


class Written(Samples):
    """Dataset that writes each sample to a file."""

    def __getitem__(self, i):
        with open(self.held, "a") as file:
            file.write(f"{i} ")
        return torch.full((8,), float(i)), i % 3


class Weighted:
    """Sampler of the number that the training has set."""

    def __init__(self):
        self.following = [0]

    def __len__(self):
        return 8

    def __iter__(self):
        for _ in range(8):
            yield [self.following[0]] * 4


def counting():
    yield from itertools.count()


def compressed(folder):
    with gzip.open(folder / "data.gz", "wb") as file:
        file.write(b"0")
    return gzip.open(folder / "data.gz")


HELD = {
    "generator": lambda folder: counting(),
    "iterator": lambda folder: itertools.count(),
    "queue": lambda folder: queue.Queue(),
    "event": lambda folder: threading.Event(),
    "database": lambda folder: sqlite3.connect(":memory:"),
    "compressed": compressed,
}


@pytest.mark.parametrize("name", HELD)
def test_what_cannot_be_put_back(name, tmp_path):
    nested = ConcatDataset([Subset(Samples(HELD[name](tmp_path)), [0, 1]), Subset(Samples(None), [0])])
    loader = DataLoader(nested, 1)
    assert "cannot-be-restored" in reasons(why_not_read(loader))
    assert not is_rewindable(loader)


def test_what_can_be_put_back(tmp_path):
    (tmp_path / "data").write_text("0")
    with open(tmp_path / "data") as file:
        for held in (file, iter([]), threading.Lock(), {"a": [0]}):
            assert is_rewindable(DataLoader(Samples(held)))


def values(loader):
    return [float(x) for batch, _ in loader for x in batch[:, 0]]


@pytest.mark.parametrize("make", [lambda: Samples(counting()), Stream], ids=["generator", "stream"])
def test_no_number_is_lost(make):
    run = flatout.optimize(Net(), DataLoader(make(), 4), plan=None, budget=1, techniques=QUICK)
    assert values(run.loader) + values(run.loader) == list(range(64))


@pytest.mark.parametrize("technique", [{"workers": 1}, {"in_memory": True}])
def test_a_forced_technique_is_refused_before_a_number_is_read(technique):
    dataset = Samples(counting())
    with pytest.raises(ValueError, match=next(iter(technique))):
        flatout.optimize(Net(), DataLoader(dataset, 4), plan=None, techniques=QUICK | technique)
    assert next(dataset.held) == 0


def test_a_file_is_written_once(tmp_path):
    loader = DataLoader(Written(tmp_path / "log"), 4)
    run = flatout.optimize(Net(), loader, plan=None, budget=1, techniques=QUICK | {"workers": None, "in_memory": None})
    assert "cannot-be-restored" in reasons(run.report.row("workers"))
    assert values(run.loader) == list(range(32))
    assert (tmp_path / "log").read_text().split() == [str(i) for i in range(32)]


@pytest.mark.parametrize("writes", [False, True])
def test_a_batch_that_the_training_decides_is_read_when_its_step_begins(tmp_path, writes):
    """A step that writes a file is not tried. The batch that was read for its trials is not read again."""
    sampler = Weighted()
    dataset = [(torch.full((8,), float(i)), i % 3) for i in range(32)]

    def loss(model, batch):
        if writes:
            (tmp_path / "log").write_text("")
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])

    loader = DataLoader(dataset, batch_sampler=sampler)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    run = flatout.optimize(model, loader, optimizer, compute_loss=loss, plan=None, budget=1, techniques=QUICK)
    seen = []
    for batch in run.loader:
        seen.append(int(batch[0][0, 0]))
        run.step(batch)
        sampler.following[0] += 1
    assert seen == list(range(8))
