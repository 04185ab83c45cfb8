"""Data that changes after it was kept in memory: batches are those of the plain loader, before and after the change."""

from __future__ import annotations

import functools
import multiprocessing
import os
import warnings

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from flatout.data import CachedDataset, InMemoryLoader, Prefetcher, cache_in_memory, clone_loader
from flatout.data.workers_watch import check_epochs
from tests.helpers import bits


class Labeled(Dataset):
    """Samples of an array, a list, an attribute and a shared number."""

    def __init__(self, path):
        self.x = np.arange(40, dtype=np.float32)
        self.items = list(range(40))
        self.epoch, self.value, self.path = 0, multiprocessing.Value("i", 0), path

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.x[i % 40], self.items[i], self.epoch, self.value.value, len(self.path.read_text())


def set_value(data):
    data.value.value += 1


CHANGES = {
    "array": lambda data: data.x.__iadd__(1),
    "attribute": lambda data: setattr(data, "epoch", data.epoch + 1),
    "shared number": set_value,
    "longer": lambda data: data.items.extend(range(8)),
    "shorter": lambda data: data.items.__delitem__(slice(30, None)),
    "element": lambda data: data.items.__setitem__(3, 100),
    "file": lambda data: data.path.write_text("longer"),
}
IN_MID_EPOCH = ("attribute", "shared number", "longer")


def own_collate(samples):
    return torch.tensor([[float(value) for value in sample] for sample in samples])


def collated(loader):
    samples = CachedDataset(loader.dataset)
    samples.fill()
    return check_epochs(clone_loader(loader, dataset=samples, collate_fn=own_collate))


WAYS = {
    "plain": lambda loader: loader,
    "plain, own collate": lambda loader: clone_loader(loader, collate_fn=own_collate),
    "gathered": cache_in_memory,
    "deep": functools.partial(cache_in_memory, depth=5),
    "prefetched": lambda loader: Prefetcher(cache_in_memory(loader), "cpu"),
    "samples": lambda loader: clone_loader(loader, dataset=CachedDataset(loader.dataset)),
    "collated": collated,
    "collated, prefetched": lambda loader: Prefetcher(collated(loader), "cpu"),
}


def trained(way, path, change, *, split, mid):
    """Return the batches of four epochs, with a change before the third one or in the middle of each."""
    torch.manual_seed(3)
    path.write_text("short")
    data = Labeled(path)
    loader = WAYS[way](DataLoader(Subset(Subset(data, range(24)), range(20)) if split else data, 4, shuffle=True))
    seen = []
    for epoch in range(4):
        if epoch == 2 and not mid:
            change(data)
        for number, batch in enumerate(loader):
            seen.append(bits(torch.cat([part.double().reshape(-1) for part in batch])))
            if mid and number == 2:
                change(data)
    return seen, torch.get_rng_state().tolist()


@pytest.mark.parametrize("way", [way for way in WAYS if not way.startswith("plain")])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("mid", [False, True])
@pytest.mark.filterwarnings("ignore:(samples are not cached|batches are not gathered) any more")
def test_batches_are_those_of_the_plain_loader(way, change, split, mid, tmp_path):
    if mid and change not in IN_MID_EPOCH:
        pytest.skip("seen at the start of the next epoch")
    plain = "plain, own collate" if "collated" in way else "plain"
    theirs = trained(plain, tmp_path / "file", CHANGES[change], split=split, mid=mid)
    ours = trained(way, tmp_path / "file", CHANGES[change], split=split, mid=mid)
    assert ours == theirs


def test_a_change_is_reported_once(tmp_path):
    (tmp_path / "file").write_text("short")
    data, reported = Labeled(tmp_path / "file"), []
    loader = cache_in_memory(DataLoader(data, 4))
    loader.report_change(reported.append)
    for data.epoch in range(3):
        list(loader)
    assert len(reported) == 1
    assert "'epoch'" in reported[0]
    assert loader.is_off


def test_a_change_is_warned_of_without_a_listener(tmp_path):
    (tmp_path / "file").write_text("short")
    data = Labeled(tmp_path / "file")
    loader = cache_in_memory(DataLoader(data, 4))
    data.epoch = 1
    with pytest.warns(UserWarning, match="'epoch'"):
        list(loader)


def test_nothing_is_reported_without_a_change(tmp_path):
    (tmp_path / "file").write_text("short")
    loader = cache_in_memory(DataLoader(Labeled(tmp_path / "file"), 4, shuffle=True))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            list(loader)
    assert not loader.is_off


def grown(wrap, change, *, mid):
    torch.manual_seed(3)
    x = torch.arange(40.0)
    data = Subset(TensorDataset(x, x.clone()), list(range(20)))
    loader = wrap(DataLoader(data, 4, shuffle=True))
    seen = []
    for epoch in range(3):
        if epoch and not mid:
            change(data)
        for number, batch in enumerate(loader):
            seen.append(bits(torch.cat(batch)))
            if mid and number == 2:
                change(data)
    return seen


TENSOR_CHANGES = {
    "indices": lambda data: data.indices.extend([20, 21]),
    "fewer": lambda data: data.indices.pop(),
    "tensor": lambda data: data.dataset.tensors[0].add_(1),
    "tensors": lambda data: setattr(data.dataset, "tensors", (torch.zeros(40), torch.ones(40))),
    "type": lambda data: setattr(data.dataset, "tensors", (torch.zeros(40, dtype=torch.int32), torch.ones(40))),
    "dataset": lambda data: setattr(data, "dataset", TensorDataset(torch.ones(50), torch.ones(50))),
}


@pytest.mark.parametrize("device", [None, "cpu"])
@pytest.mark.parametrize("change", TENSOR_CHANGES)
@pytest.mark.parametrize("mid", [False, True])
def test_tensors(change, mid, device):
    if mid and change == "fewer":
        pytest.skip("the drawn order still has the index")
    theirs = grown(lambda loader: loader, TENSOR_CHANGES[change], mid=mid)
    ours = grown(lambda loader: InMemoryLoader(loader, depth=3, device=device), TENSOR_CHANGES[change], mid=mid)
    assert list(map(str, ours)) == list(map(str, theirs))


class Sparse(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, i):
        return torch.tensor(float(i))


def test_data_that_is_no_longer_tensors_is_read():
    data = Subset(TensorDataset(torch.arange(8.0)), [0, 1])
    loader = InMemoryLoader(DataLoader(data, 2))
    assert next(iter(loader))[0].tolist() == [0, 1]
    data.dataset = Sparse()
    with pytest.warns(UserWarning, match="'dataset'"):
        assert next(iter(loader)).tolist() == [0, 1]
    assert loader.is_off


class Opening(Dataset):
    """Samples that open a file, and depend on an environment variable."""

    def __init__(self, path):
        self.path = path

    def __len__(self):
        return 20

    def __getitem__(self, i):
        with open(self.path) as file:
            file.read(1)
        return i + len(os.environ.get("SHIFT", ""))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_file_that_was_opened_is_watched(tmp_path, workers):
    path = tmp_path / "file"
    path.write_text("a")
    loader = cache_in_memory(DataLoader(Opening(path), 4, num_workers=workers))
    list(loader)
    path.write_text("ab")  # no sample differs
    with pytest.warns(UserWarning, match="file"):
        list(loader)


def test_samples_are_read_again(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("a")
    loader = cache_in_memory(DataLoader(Opening(tmp_path / "file"), 20))
    assert next(iter(loader)).tolist() == list(range(20))
    monkeypatch.setenv("SHIFT", "abc")  # nothing that the dataset reaches has changed
    with pytest.warns(UserWarning, match="read again"):
        assert next(iter(loader)).tolist() == list(range(3, 23))
