"""Subclasses and wrappers of DataLoader: clones, rewinding and refusals."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader

from flatout.data import InMemoryLoader, Prefetcher, clone_loader, is_rewindable, seed_samples, tune
from flatout.data.loader_class import base_of, is_plain, overridden, why_not_plain
from flatout.data.loaders import first_batches, loader_position, why_not_resized, with_batch_size
from tests.frameworks import imported
from tests.loaders import (
    WITH_BASE,
    WITHOUT_BASE,
    Collating,
    EpochSampler,
    FromElsewhere,
    MultiEpochs,
    OwnSampler,
    Shard,
)

SAMPLES = list(torch.arange(20.0))


def epochs(loader, count=2, seed=3):
    torch.manual_seed(seed)
    return [[batch.tolist() for batch in loader] for _ in range(count)]


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (DataLoader, []),
        (Collating, []),
        (type("Two", (MultiEpochs,), {"__len__": len, "pin_memory": True}), ["__iter__", "pin_memory"]),
        (FromElsewhere, ["__iter__"]),
        (OwnSampler, ["batch_sampler"]),
    ],
)
def test_overridden_members_that_determine_the_batches(kind, names):
    assert overridden(kind) == names
    assert all(name in why_not_plain(kind.__new__(kind)) for name in names)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", WITH_BASE)
def test_a_clone_yields_what_the_loader_yields(name, workers):
    loader = WITH_BASE[name](SAMPLES)
    before = dict(vars(loader))
    clone = clone_loader(loader, num_workers=workers)
    assert type(clone) is type(loader)
    assert base_of(clone).num_workers == workers
    assert len(clone) == len(loader) == 5
    found = epochs(clone)
    assert vars(loader) == before
    assert found == epochs(WITH_BASE[name](SAMPLES))


@pytest.mark.parametrize("name", WITH_BASE)
def test_batches_for_trials_do_not_change_the_loader(name):
    loader = WITH_BASE[name](SAMPLES)
    assert is_rewindable(loader)
    state, position, before = torch.get_rng_state(), loader_position(loader), dict(vars(loader))
    taken = [batch.tolist() for batch in first_batches(loader, 2)]
    list(clone_loader(loader))  # a whole epoch
    torch.set_rng_state(state)
    position.restore()
    assert vars(loader) == before
    assert [batch.tolist() for batch in loader][:2] == taken


def test_a_sampler_that_counts_epochs_is_rewound():
    sampler = EpochSampler(SAMPLES)
    loader = DataLoader(SAMPLES, 4, sampler=sampler)
    position = loader_position(loader)
    first = [batch.tolist() for batch in loader]
    assert (sampler.epoch, sampler.generator is None) == (1, False)
    position.restore()
    assert (sampler.epoch, sampler.generator) == (0, None)
    tune(loader, 0.0, budget=0.1)
    assert (sampler.epoch, sampler.generator) == (0, None)
    assert [batch.tolist() for batch in loader] == first


@pytest.mark.parametrize("name", WITHOUT_BASE)
def test_a_loader_without_a_base_is_not_cloned(name):
    make, named = WITHOUT_BASE[name]
    loader = make(SAMPLES)
    assert base_of(loader) is None
    assert is_rewindable(loader) == (name == "list")
    assert named in why_not_plain(loader)
    with pytest.raises(ValueError, match=named):
        clone_loader(loader)


def test_a_started_iterator_is_not_shared_with_a_clone():
    loader = MultiEpochs(SAMPLES, batch_size=4)
    next(iter(loader))
    assert base_of(loader) is None
    persistent = Collating(SAMPLES, 4, factor=1)
    persistent._iterator = iter(DataLoader(SAMPLES))  # set as by persistent workers
    assert clone_loader(persistent)._iterator is None


def test_a_list_that_is_shuffled_in_place_is_not_rewound():
    class InPlace(EpochSampler):
        def __init__(self, samples):
            super().__init__(samples)
            self.order = [*range(20)]

        def __iter__(self):
            self.order.reverse()
            yield from self.order

    assert not is_rewindable(DataLoader(SAMPLES, 4, sampler=InPlace(SAMPLES)))


def test_a_clone_does_not_fill_the_cache_of_its_loader():
    class Caching:
        def __init__(self, loader):
            self.loader, self.cache = loader, []

        def __iter__(self):
            if self.cache:
                yield from self.cache
                return
            for batch in self.loader:
                self.cache.append(batch)
                yield batch

    loader = Caching(DataLoader(SAMPLES, 4))
    next(iter(clone_loader(loader)))  # fills half of the cache
    assert len(list(loader)) == 5


def test_a_subclass_that_overrides_nothing_works_like_a_dataloader():
    def loader():
        return Collating(SAMPLES, 4, factor=3)

    assert is_plain(loader())
    expected = epochs(loader())
    assert epochs(Prefetcher(clone_loader(loader(), num_workers=2, persistent_workers=True), "cpu")) == expected
    assert clone_loader(loader()).factor == 3
    assert [len(batch) for batch in with_batch_size(loader(), 10)] == [10, 10]
    assert tune(loader(), 1.0).workers == 0
    assert len(epochs(seed_samples(loader()), 1)[0]) == 5
    resumed, torn = Prefetcher(loader(), "cpu"), Prefetcher(loader(), "cpu")
    torch.manual_seed(3)
    next(iter(torn))
    resumed.load_state_dict(torn.state_dict())
    assert [batch.tolist() for batch in resumed] == expected[0][1:]


class Plain(DataLoader):
    """Subclass that overrides nothing."""


def test_a_subclass_is_gathered_from_memory():
    data = torch.utils.data.TensorDataset(torch.arange(20.0))
    assert [b.tolist() for (b,) in InMemoryLoader(Plain(data, 4))] == [b.tolist() for (b,) in DataLoader(data, 4)]


@pytest.mark.parametrize("name", [name for name in WITH_BASE if name != "another constructor"])
def test_other_loaders_are_neither_resized_nor_gathered(name):
    loader = WITH_BASE[name](SAMPLES)
    assert type(loader).__name__ in why_not_resized(loader)
    with pytest.raises(ValueError, match=type(loader).__name__):
        InMemoryLoader(loader)


# -- classes of libraries --------------------------------------------------------------------------------------


def accelerated(samples, seedable):
    data_loader = imported("accelerate.data_loader")
    imported("accelerate").Accelerator(cpu=True)
    loader = DataLoader(samples, batch_size=4, shuffle=True)
    made = data_loader.prepare_data_loader(loader, put_on_device=True, use_seedable_sampler=seedable, data_seed=1)
    assert type(made) is data_loader.DataLoaderShard
    return made


def of_timm(samples, name):
    loader = imported("timm.data.loader")
    if name == "MultiEpochsDataLoader":
        return loader.MultiEpochsDataLoader(samples, batch_size=4, shuffle=True)
    pairs = [(sample.expand(3, 2, 2).byte(), int(sample)) for sample in samples]
    inner = DataLoader(pairs, batch_size=4, shuffle=True)
    return loader.PrefetchLoader(inner, device=torch.device("cpu"))


REAL = {
    "accelerate": lambda samples: accelerated(samples, False),
    "accelerate, seedable": lambda samples: accelerated(samples, True),
    "timm, epochs": lambda samples: of_timm(samples, "MultiEpochsDataLoader"),
    "timm, prefetch": lambda samples: of_timm(samples, "PrefetchLoader"),
}


@pytest.mark.parametrize("name", REAL)
def test_loaders_of_libraries_have_a_base(name):
    def values(loader):
        torch.manual_seed(3)
        return [[torch.as_tensor(part).tolist() for part in batch] for _ in range(2) for batch in loader]

    loader = REAL[name](SAMPLES)
    assert is_rewindable(loader)
    clone = clone_loader(loader, num_workers=2)
    assert (type(clone), len(clone)) == (type(loader), 5)
    assert values(clone) == values(REAL[name](SAMPLES))


def test_a_shard_is_an_instance_of_dataloader():
    assert isinstance(Shard(SAMPLES, batch_size=4), DataLoader)
