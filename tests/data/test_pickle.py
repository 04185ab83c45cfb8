"""Pickles and copies of loaders, which contain the base loader."""

import copy
import pickle

import pytest
import torch
from torch.nn import functional
from torch.utils.data import ConcatDataset, DataLoader, Subset

import flatout
from flatout.data import CachedDataset, InMemoryLoader, Prefetcher, cache_in_memory, seed_samples
from flatout.data.replay_buffer import ReplayBuffer
from tests.jobs import FORCED, Net, SlowSamples, make_data

pytestmark = pytest.mark.usefixtures("short_trials")


def doubled(batch):
    return [2 * batch[0], *batch[1:]]


def plain(**options):
    return DataLoader(make_data(), 16, shuffle=True, generator=torch.Generator().manual_seed(0), **options)


def tuned(loader, **options):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return flatout.optimize(
        model, loader, optimizer, functional.cross_entropy, **({"techniques": FORCED, "budget": 0} | options)
    ).loader


def nested():
    halves = [Subset(make_data(), range(40)), Subset(make_data(), range(40, 96))]
    return DataLoader(ConcatDataset(halves), 16, shuffle=True, generator=torch.Generator().manual_seed(0))


LOADERS = {
    "in memory": lambda: InMemoryLoader(plain(), depth=3),
    "subsets": lambda: InMemoryLoader(nested()),
    "on a device": lambda: InMemoryLoader(plain(), device="cpu"),
    "prefetcher": lambda: Prefetcher(plain(), "cpu", 3),
    "transformed": lambda: Prefetcher(plain(), "cpu", transform=doubled),
    "both": lambda: Prefetcher(InMemoryLoader(plain()), "cpu"),
    "cached samples": lambda: DataLoader(CachedDataset(SlowSamples()), 16),
    "cache": lambda: cache_in_memory(DataLoader(SlowSamples(), 16)),
    "seeded": lambda: seed_samples(plain()),
    "list": lambda: Prefetcher([torch.ones(2), torch.zeros(2)], "cpu"),
    "run": lambda: tuned(plain()),
    "run of a cache": lambda: tuned(DataLoader(SlowSamples(), 16)),
    "two values": lambda: tuple(flatout.optimize(Net(), plain(), loss_fn=functional.cross_entropy, budget=0))[1],
    "replayed": lambda: ReplayBuffer(plain(), 2),
}

COPIES = {"pickle": lambda loader: pickle.loads(pickle.dumps(loader)), "copy": copy.copy, "deepcopy": copy.deepcopy}


def batches_of(loader):
    return [batch if isinstance(batch, torch.Tensor) else list(batch) for batch in loader]


def same(ours, theirs):
    return len(ours) == len(theirs) and all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else all(map(torch.equal, a, b))
        for a, b in zip(ours, theirs, strict=True)
    )


@pytest.mark.parametrize("under_way", [False, True])
@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("name", LOADERS)
def test_a_copy_is_a_loader_that_no_epoch_was_taken_of(name, way, under_way):
    torch.manual_seed(0)
    want = batches_of(LOADERS[name]())
    torch.manual_seed(0)
    loader = LOADERS[name]()
    if under_way:
        batches = iter(loader)
        next(batches)
    twin = COPIES[way](loader)
    assert type(twin) in (type(loader), DataLoader)
    if under_way:
        assert len(batches_of(twin)) == len(want)
    else:
        assert same(batches_of(twin), want)
    assert len(batches_of(twin)) == len(want)
    for public in ("depth", "transform"):
        if public in vars(loader):
            assert vars(twin)[public] == vars(loader)[public]


def test_a_process_that_is_spawned_gets_the_loader():
    context = torch.multiprocessing.get_context("forkserver")

    def numbers():  # no generator: torch's loaders lose the state of a generator in another process
        return DataLoader(make_data(), 16)

    loaders = [InMemoryLoader(numbers()), Prefetcher(numbers(), "cpu"), cache_in_memory(DataLoader(SlowSamples(), 16))]
    loaders.append(tuned(numbers()))
    with context.Pool(1) as pool:  # an exception in the process is raised here
        found = pool.map_async(total, loaders).get(timeout=300)
    assert found == list(map(total, loaders))


def total(loader):
    return sum(batch[0].double().sum().item() for batch in loader)
