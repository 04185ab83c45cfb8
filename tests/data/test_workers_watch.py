"""Watched workers: batches are those of a loader without workers, whatever the dataset and the script do."""

from __future__ import annotations

import multiprocessing
import os
import resource
from collections.abc import Iterator

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, RandomSampler, Sampler, Subset, TensorDataset

from flatout.data import Prefetcher
from flatout.data.feedback import why_not_ahead
from flatout.data.seeding import with_workers
from flatout.data.workers_watch import is_off, watch_workers


class Graded(Dataset):
    def __init__(self):
        self.level, self.value, self.labels = 0, multiprocessing.Value("i", 0), torch.zeros(32)

    def __len__(self):
        return 32

    def __getitem__(self, i):
        return i, self.level, self.value.value, float(self.labels[i]), os.getpid()


def set_value(data):
    data.value.value += 1


CHANGES = {
    "attribute": lambda data: setattr(data, "level", data.level + 1),
    "shared number": set_value,
    "labels": lambda data: data.labels.add_(1),
    "nothing": lambda data: None,
}


def watched(loader, on_change=lambda seen: None, **settings):
    return watch_workers(with_workers(loader, {"num_workers": 2, **settings}), on_change)


def epochs(loader, data, change, when):
    """Return the samples of three epochs, with a change in the middle of the second one or before the third one."""
    seen, makers = [], []
    for epoch in range(3):
        if when == "before" and epoch == 2:
            change(data)
        for number, batch in enumerate(loader):
            makers.append(set(batch[-1].tolist()))
            seen.append([part.tolist() for part in batch[:-1]])
            if when == "amid" and (epoch, number) == (1, 2):
                change(data)
    return seen, makers


@pytest.mark.parametrize("when", ["amid", "before"])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("prefetched", [False, True])
def test_batches_are_those_without_workers(when, change, persistent, prefetched):
    def run(wrap):
        torch.manual_seed(4)
        data, made = Graded(), {"generator": torch.Generator().manual_seed(1)}
        loader = wrap(DataLoader(Subset(data, range(30)), 4, sampler=RandomSampler(range(30), **made)))
        return epochs(loader, data, CHANGES[change], when), loader

    def with_watched_workers(loader):
        loader = watched(loader, reported.append, persistent_workers=persistent)
        return Prefetcher(loader, "cpu") if prefetched else loader

    reported = []
    (theirs, _), _ = run(lambda loader: loader)
    (ours, makers), loader = run(with_watched_workers)
    assert ours == theirs
    ends = when == "amid" and change != "nothing"
    assert len(reported) == ends
    assert is_off(loader.loader if prefetched else loader) == ends
    here = {os.getpid()}
    assert (makers[-1] == here) == ends
    assert makers[0] != here
    if change == "labels" and when == "before" and persistent:
        assert makers[-1].isdisjoint(set().union(*makers[:8]))  # new workers have the new labels


class Records(Dataset):
    def __init__(self, path):
        self.file = open(path, "rb")  # noqa: SIM115

    def __len__(self):
        return 256

    def __getitem__(self, i):
        self.file.seek(4096 * i)
        return int.from_bytes(self.file.read(4096)[:8], "little"), i


@pytest.mark.parametrize("prefetched", [False, True])
def test_workers_do_not_share_the_position_in_a_file(tmp_path, prefetched):
    path = tmp_path / "records"
    path.write_bytes(b"".join(i.to_bytes(8, "little") * 512 for i in range(256)))
    loader = watched(DataLoader(Records(path), 2, shuffle=True), num_workers=4)
    for _ in range(3):
        for found, wanted in Prefetcher(loader, "cpu") if prefetched else loader:
            assert found.tolist() == wanted.tolist()


class Small(Dataset):
    def __len__(self):
        return 400

    def __getitem__(self, i):
        return {"a": i, "b": i + 1}


@pytest.fixture
def few_descriptors():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 200, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_kept_batches_do_not_use_up_the_descriptors(few_descriptors):
    kept = list(watched(DataLoader(Small(), 1)))
    assert [int(batch["a"]) for batch in kept] == list(range(400))
    assert sum(batch["a"].is_shared() for batch in kept) < 200


def test_batches_that_are_dropped_are_not_copied():
    assert all(batch["a"].is_shared() for batch in watched(DataLoader(Small(), 1)))


SCORES = torch.zeros(8)
ORDER = [3, 1]


class Numbers(Sampler):
    def __init__(self, count):
        self.count = count

    def __iter__(self):
        yield from range(self.count)

    def __len__(self):
        return self.count


class ByGlobal(Numbers):
    def __iter__(self):
        for _ in range(self.count):
            yield int(SCORES.argmax())


class ByHelper(Numbers):
    def pick(self):
        return int(SCORES.argmax())

    def __iter__(self):
        for _ in range(self.count):
            yield self.pick()


class ByAttribute(Numbers):
    def __init__(self, count):
        super().__init__(count)
        self.weights = [1.0] * count

    def __iter__(self):
        for _ in range(self.count):
            yield self.weights.index(max(self.weights))


class ByDataset(Numbers):
    def __init__(self, count, dataset):
        super().__init__(count)
        self.dataset = dataset

    def __iter__(self):
        for _ in range(self.count):
            yield int(self.dataset.labels.argmax())


class Lazy(ByGlobal):
    def __iter__(self):
        return (int(SCORES.argmax()) for _ in range(self.count))


class Ready(ByAttribute):
    def __iter__(self):
        return iter(torch.multinomial(torch.tensor(self.weights), self.count).tolist())


class Mapped(ByAttribute):
    def __iter__(self):
        return map(self.weights.__getitem__, range(self.count))


class Position(Numbers):
    """Sampler that continues where an epoch ended."""

    next = 0

    def __iter__(self):
        for _ in range(self.count):
            yield self.next
            self.next += 1


class Incremented(Position):
    def __iter__(self):
        while True:
            self.next += 1
            yield self.next


class Shuffled(Numbers):
    def __init__(self, count):
        super().__init__(count)
        self.epoch, self.rng = 0, torch.Generator()

    def __iter__(self):
        self.epoch += 1
        yield from torch.randperm(self.count, generator=self.rng).tolist()


class Drawing(Shuffled):
    def __iter__(self):
        for _ in range(self.count):
            yield int(torch.randint(self.count, (), generator=self.rng))


def with_replacement(data, generator=None):
    return RandomSampler(data, replacement=True, generator=generator)


FIXED = {
    "numbers": lambda data: Numbers(8),
    "ready": lambda data: Ready(8),
    "shuffled": lambda data: Shuffled(8),
    "torch's": RandomSampler,
    "torch's with replacement": with_replacement,
}
FEEDBACK = {
    "global": lambda data: ByGlobal(8),
    "method": lambda data: ByHelper(8),
    "attribute": lambda data: ByAttribute(8),
    "dataset": lambda data: ByDataset(8, data),
    "generator": lambda data: Lazy(8),
    "map": lambda data: Mapped(8),
    "position": lambda data: Position(8),
    "position before": lambda data: Incremented(8),
    "drawing": lambda data: Drawing(8),
    "torch's with replacement": lambda data: with_replacement(data, torch.Generator()),
}


@pytest.mark.parametrize("name", FIXED)
def test_a_fixed_order_may_be_read_ahead(name):
    data = Graded()
    before = torch.get_rng_state()
    assert why_not_ahead(DataLoader(data, 2, sampler=FIXED[name](data))) == ""
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", FEEDBACK)
def test_an_order_that_may_depend_on_the_training_is_not(name):
    data = Graded()
    assert why_not_ahead(DataLoader(data, 2, sampler=FEEDBACK[name](data))) != ""
    assert why_not_ahead(Prefetcher(DataLoader(data, 2, sampler=FEEDBACK[name](data)), "cpu")) != ""


class Relabeling(Sampler[int]):
    """Sampler that changes labels in place when an epoch begins."""

    def __init__(self, labels: torch.Tensor) -> None:
        self.labels = labels

    def __len__(self) -> int:
        return len(self.labels)

    def __iter__(self) -> Iterator[int]:
        self.labels += 1
        return iter(range(len(self.labels)))


def test_the_search_leaves_what_a_sampler_reaches() -> None:
    labels = torch.zeros(4, dtype=torch.long)
    loader = DataLoader(TensorDataset(labels), 2, sampler=Relabeling(labels))
    assert why_not_ahead(loader) == ""
    assert labels.tolist() == [0, 0, 0, 0]
