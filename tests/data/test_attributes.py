"""Attributes set on a loader of flatout: the base loader receives them."""

import copy

import pytest
import torch
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset, default_collate

import flatout
from flatout.data import CachedDataset, InMemoryLoader, Prefetcher, cache_in_memory
from flatout.data.replay_buffer import ReplayBuffer
from tests.jobs import FORCED, QUICK, Net, SlowSamples, make_job

FIXED = ["batch_size", "batch_sampler", "sampler", "drop_last", "dataset", "persistent_workers"]
"""Attributes that a DataLoader refuses to change."""


class Mixing:
    """Loader with a switch that training turns off, as in timm."""

    def __init__(self, batches):
        self.batches = batches
        self._enabled = True

    def __iter__(self):
        for x, y in self.batches:
            yield (x + 100 if self._enabled else x), y

    def __len__(self):
        return len(self.batches)

    @property
    def mixup_enabled(self):
        return self._enabled

    @mixup_enabled.setter
    def mixup_enabled(self, value):
        self._enabled = value

    @property
    def fixed(self):
        return 1


def first_of(loader):
    return next(iter(loader))[0].max().item()


def tuned(loader, **options):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return flatout.optimize(
        model, loader, optimizer, functional.cross_entropy, **({"techniques": QUICK, "budget": 0} | options)
    )


WRAPPERS = {
    "run": lambda loader: tuned(loader).loader,
    "two values": lambda loader: list(flatout.optimize(Net(), loader, loss_fn=functional.cross_entropy, budget=0))[1],
    "prefetcher": lambda loader: Prefetcher(loader, "cpu"),
    "replayed": lambda loader: ReplayBuffer(loader, 0),
    "undone": lambda loader: undone(loader),
}


def undone(loader):
    run = tuned(loader)
    run.undo()
    return run.loader


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_loaders_switch_takes_effect_through_every_wrapper(name):
    own = Mixing([(torch.zeros(4, 8), torch.zeros(4, dtype=torch.int64))] * 6)
    loader = WRAPPERS[name](own)
    assert loader.mixup_enabled is True
    for _ in loader:  # batches that the trials took
        pass
    assert first_of(loader) == 100
    loader.mixup_enabled = False
    assert own.mixup_enabled is False
    assert loader.mixup_enabled is False
    assert first_of(loader) == 0
    loader.attached = "a"
    assert own.attached == "a"
    del loader.attached
    assert not hasattr(own, "attached")
    with pytest.raises(AttributeError):
        loader.fixed = 2
    with pytest.raises(AttributeError):
        del loader.attached


def numbers():
    return DataLoader(TensorDataset(torch.arange(24.0).reshape(24, 1)), 4)


OVER_A_DATALOADER = {
    "prefetcher": (numbers, lambda own: Prefetcher(own, "cpu")),
    "in memory": (numbers, InMemoryLoader),
    "both": (numbers, lambda own: Prefetcher(InMemoryLoader(own), "cpu")),
    "replayed": (numbers, lambda own: ReplayBuffer(own, 1)),
    "cache": (lambda: DataLoader(SlowSamples(), 4), cache_in_memory),
    "run": (lambda: make_job()[1], lambda own: tuned(own).loader),
    "forced": (lambda: make_job()[1], lambda own: tuned(own, techniques=FORCED).loader),
    "seeded": (lambda: make_job()[1], lambda own: tuned(own, deterministic=True, seed=1).loader),
    "resized": (lambda: make_job()[1], lambda own: tuned(own, batch_size=8).loader),
}


@pytest.mark.parametrize("name", OVER_A_DATALOADER)
def test_what_a_dataloader_does_not_let_be_changed_is_torchs_error(name):
    make, wrap = OVER_A_DATALOADER[name]
    own = make()
    loader = wrap(own)
    for attribute in FIXED:
        before = getattr(own, attribute)
        with pytest.raises(ValueError, match=attribute):
            setattr(loader, attribute, 4)
        assert getattr(own, attribute) is before
    loader.timeout = 3
    assert own.timeout == loader.timeout == 3
    loader.timeout = 0
    loader.attached = "a"
    assert own.attached == loader.attached == "a"
    del loader.attached
    assert not hasattr(own, "attached")
    assert not hasattr(loader, "attached")


def negated(samples):
    x, *rest = default_collate(samples)
    return [-x, *rest]


def test_collate_of_a_dataloader_may_be_changed_where_batches_come_from_it():
    own = DataLoader(TensorDataset(torch.ones(8, 8), torch.ones(8, dtype=torch.int64)), 4)
    loader = tuned(own).loader
    loader.collate_fn = negated
    assert next(iter(loader))[0][0, 0] == -1
    prefetcher = Prefetcher(own, "cpu")
    prefetcher.collate_fn = default_collate
    assert next(iter(prefetcher))[0][0, 0] == 1
    workers = tuned(own, techniques=QUICK | {"workers": {"num_workers": 1}}).loader
    workers.collate_fn = negated
    assert next(iter(workers))[0][0, 0] == -1


def test_a_setting_that_training_would_not_follow_is_refused():
    _, own, _ = make_job()
    chosen = tuned(own, techniques=QUICK | {"workers": 1}).loader
    for loader, name in (
        (InMemoryLoader(own), "collate_fn"),
        (tuned(own, techniques=FORCED).loader, "collate_fn"),
        (chosen, "num_workers"),
    ):
        before = getattr(own, name)
        with pytest.raises(ValueError, match=name):
            setattr(loader, name, negated if name == "collate_fn" else 2)
        assert getattr(own, name) is before


def test_attributes_of_a_dataset_are_set_through_its_cache():
    dataset = SlowSamples()
    dataset.epoch = 0
    cached = CachedDataset(dataset)
    cached.epoch = 3
    assert dataset.epoch == cached.epoch == 3
    assert copy.deepcopy(cached).epoch == 3
    del cached.epoch
    assert not hasattr(dataset, "epoch")
