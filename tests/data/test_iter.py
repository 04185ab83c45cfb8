"""Cost of ``iter()`` on an unused loader equals torch's, because Lightning calls ``iter()`` before training."""

import pytest
import torch
from torch import nn
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import flatout
from flatout.data import InMemoryLoader, Prefetcher
from flatout.data.replay_buffer import ReplayBuffer
from tests.data.harness import CopyingPrefetcher

DATA = TensorDataset(torch.arange(20.0), torch.arange(20))

SAMPLERS = {
    "shuffled": lambda: {"shuffle": True},
    "generator": lambda: {"shuffle": True, "generator": torch.Generator().manual_seed(0)},
    "replacement": lambda: {"sampler": RandomSampler(DATA, replacement=True)},
    "weighted": lambda: {"sampler": WeightedRandomSampler(torch.ones(20), 20)},
    "subset": lambda: {"sampler": SubsetRandomSampler(range(20))},
    "distributed": lambda: {"sampler": DistributedSampler(DATA, 2, 0)},
    "workers": lambda: {"shuffle": True, "num_workers": 1},
}


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.w * x


def tuned(loader, **techniques):
    model = Scale()
    optimizer = torch.optim.SGD(model.parameters(), 0.001)
    techniques |= {"compile": False, "precision": False}
    run = flatout.optimize(
        model, loader, optimizer, lambda a, b: (a - b).square().mean(), techniques=techniques, budget=0
    )
    return run.loader


WRAPPERS = {
    "in memory": InMemoryLoader,
    "prefetcher": lambda loader: Prefetcher(loader, "cpu"),
    "copying": lambda loader: CopyingPrefetcher(loader, "cpu"),
    "both": lambda loader: Prefetcher(InMemoryLoader(loader), "cpu"),
    "run": tuned,
    "run in memory": lambda loader: tuned(loader, in_memory=True),
}


def values(batches):
    return [batch[0].tolist() for batch in batches]


def begun(loader):
    iter(loader)
    iter(loader)


def peeked(loader):
    next(iter(loader))


def taken_late(loader):
    batches = iter(loader)
    torch.rand(3)
    next(batches)


@pytest.mark.parametrize("before", [begun, peeked, taken_late])
@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("name", WRAPPERS)
def test_what_was_begun_before_an_epoch_moves_generators_as_torch_does(name, sampler, before):
    def course(loader):
        torch.manual_seed(0)
        before(loader)
        for _ in range(2):
            yield values(loader)
            yield torch.rand(1).item()

    def make():
        return DataLoader(DATA, 4, **SAMPLERS[sampler]())

    assert list(course(WRAPPERS[name](make()))) == list(course(make()))


class Counting(IterableDataset):
    """Dataset that has a ``state_dict``."""

    def __init__(self):
        self.at = 0

    def __iter__(self):
        while self.at < 20:
            self.at += 1
            yield torch.tensor([self.at - 1.0])
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


STATEFUL = {
    "in memory": lambda: InMemoryLoader(DataLoader(DATA, 4, shuffle=True)),
    "in memory, prefetched": lambda: Prefetcher(InMemoryLoader(DataLoader(DATA, 4, shuffle=True)), "cpu"),
    "map-style": lambda: Prefetcher(DataLoader(DATA, 4, shuffle=True), "cpu"),
    "copying": lambda: CopyingPrefetcher(DataLoader(DATA, 4, shuffle=True), "cpu"),
    "persistent": lambda: Prefetcher(DataLoader(DATA, 4, shuffle=True, num_workers=1, persistent_workers=True), "cpu"),
    "iterable": lambda: Prefetcher(DataLoader(Counting(), 4), "cpu"),
    "list": lambda: Prefetcher([torch.full((1,), float(i)) for i in range(5)], "cpu"),
}


@pytest.mark.parametrize("read", [2, 5])
@pytest.mark.parametrize("name", STATEFUL)
def test_an_epoch_that_is_begun_and_left_does_not_lose_the_place_that_was_loaded(name, read):
    torch.manual_seed(0)
    loader = STATEFUL[name]()
    batches = iter(loader)
    for _ in range(read):
        next(batches)
    state = loader.state_dict()
    rest = values(batches)
    torch.manual_seed(1)
    resumed = STATEFUL[name]()
    resumed.load_state_dict(state)
    begun(resumed)
    assert values(resumed) == rest
    assert len(values(resumed)) == 5


@pytest.mark.parametrize("name", sorted(STATEFUL.keys() - {"persistent", "iterable"}))  # whose epochs may overlap
def test_an_epoch_that_is_begun_and_left_in_mid_epoch_does_not_move_the_place(name):
    torch.manual_seed(0)
    loader = STATEFUL[name]()
    batches = iter(loader)
    next(batches)
    begun(loader)
    next(batches)
    state = loader.state_dict()
    rest = values(batches)
    resumed = STATEFUL[name]()
    resumed.load_state_dict(state)
    assert values(resumed) == rest


def test_an_epoch_that_is_begun_and_left_does_not_lose_batches_that_were_read():
    class Once(IterableDataset):
        def __init__(self):
            self.left = iter(range(10))

        def __iter__(self):
            return (torch.tensor([float(i)]) for i in self.left)

    for wrap in (lambda loader: loader, lambda loader: Prefetcher(loader, "cpu")):
        loader = wrap(ReplayBuffer(DataLoader(Once(), 1), 4))
        begun(loader)
        assert values(loader) == [[float(i)] for i in range(10)]
