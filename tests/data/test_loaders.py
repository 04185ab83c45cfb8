"""clone_loader and is_rewindable."""

from __future__ import annotations

import functools
import random
import weakref

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from flatout.core.random_state import generators_in
from flatout.data import InMemoryLoader, Prefetcher, clone_loader, is_rewindable, seed_samples
from flatout.data.loaders import first_batches, original_of, randomness_of, why_not_resized, with_batch_size
from tests.clock import TimedSamples

DATA = TensorDataset(torch.arange(10))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(10))


class MyLoader(DataLoader):
    pass


class MySampler(SequentialSampler):
    pass


def collate(samples):
    return torch.stack([sample[0] for sample in samples])


def test_clone_shares_everything():
    loader = DataLoader(DATA, 3, shuffle=True, generator=torch.Generator(), collate_fn=collate, drop_last=True)
    loader.note = "the user's"
    clone = clone_loader(loader)
    assert clone is not loader
    for name in (
        "dataset",
        "batch_size",
        "sampler",
        "batch_sampler",
        "generator",
        "collate_fn",
        "drop_last",
        "note",
    ):
        assert getattr(clone, name) is getattr(loader, name), name


def test_clone_gives_the_same_batches():
    loader = DataLoader(DATA, 3, shuffle=True, generator=torch.Generator().manual_seed(1), collate_fn=collate)
    theirs = [batch.tolist() for batch in loader]
    loader.generator.manual_seed(1)
    assert [batch.tolist() for batch in clone_loader(loader, num_workers=1)] == theirs


def test_workers_come_and_go():
    loader = DataLoader(DATA, 2, num_workers=2, prefetch_factor=3, persistent_workers=True, timeout=9)
    more = clone_loader(loader, num_workers=4)
    assert (more.num_workers, more.prefetch_factor, more.persistent_workers, more.timeout) == (4, 3, True, 9)
    none = clone_loader(loader, num_workers=0)
    assert (none.num_workers, none.prefetch_factor, none.persistent_workers, none.timeout) == (
        0,
        None,
        False,
        0,
    )
    back = clone_loader(none, num_workers=2, prefetch_factor=4, persistent_workers=True, pin_memory=True)
    assert (back.num_workers, back.prefetch_factor, back.persistent_workers) == (2, 4, True)
    assert back.pin_memory


@pytest.mark.parametrize("kind", ["unbatched", "batch_sampler", "list", "iterable", "unbatched iterable"])
def test_ways_of_batching(kind):
    loader = {
        "unbatched": lambda: DataLoader(DATA, batch_size=None),
        "batch_sampler": lambda: DataLoader(DATA, batch_sampler=BatchSampler(MySampler(DATA), 4, True)),
        "list": lambda: DataLoader(DATA, batch_sampler=[[1], [0, 2]]),
        "iterable": lambda: DataLoader(Stream(), 4, drop_last=True),
        "unbatched iterable": lambda: DataLoader(Stream(), batch_size=None),
    }[kind]()
    clone = clone_loader(loader, pin_memory=False)
    assert (clone.batch_size, clone.drop_last) == (loader.batch_size, loader.drop_last)
    assert clone.batch_sampler is loader.batch_sampler
    assert str(list(clone)) == str(list(loader))


def test_batch_size_can_be_changed():
    loader = DataLoader(DATA, 2, shuffle=True, drop_last=True)
    clone = clone_loader(loader, batch_size=4)
    assert clone.sampler is loader.sampler
    assert (clone.batch_size, clone.batch_sampler.batch_size, clone.drop_last) == (4, 4, True)
    assert type(clone_loader(loader, shuffle=False).sampler) is SequentialSampler


def test_refusals():
    with pytest.raises(ValueError, match="batch_size"):
        clone_loader(DataLoader(DATA, batch_sampler=[[1]]), batch_size=2)


REWINDABLE = {
    "sequential": (lambda: DataLoader(DATA), True),
    "random": (lambda: DataLoader(DATA, 2, shuffle=True), True),
    "subset random": (lambda: DataLoader(DATA, sampler=SubsetRandomSampler([1, 2])), True),
    "weighted": (lambda: DataLoader(DATA, sampler=WeightedRandomSampler([1.0] * 10, 5)), True),
    "batch sampler": (
        lambda: DataLoader(DATA, batch_sampler=BatchSampler(RandomSampler(DATA), 2, True)),
        True,
    ),
    "index lists": (lambda: DataLoader(DATA, batch_sampler=[[1], [2]]), True),
    "unbatched": (lambda: DataLoader(DATA, batch_size=None), True),
    "list": (lambda: [1, 2], True),
    "in memory": (lambda: InMemoryLoader(DataLoader(DATA)), True),
    "own sampler": (lambda: DataLoader(DATA, sampler=MySampler(DATA)), False),
    "own sampler, batched": (
        lambda: DataLoader(DATA, batch_sampler=BatchSampler(MySampler(DATA), 2, True)),
        False,
    ),
    "iterator of batches": (lambda: DataLoader(DATA, batch_sampler=iter([[1], [2]])), False),
    "iterable": (lambda: DataLoader(Stream()), False),
    "own loader": (lambda: MyLoader(DATA), True),
    "generator": (lambda: (number for number in range(3)), False),
}


@pytest.mark.parametrize("name", REWINDABLE)
def test_is_rewindable(name):
    make, expected = REWINDABLE[name]
    assert is_rewindable(make()) is expected


HIDDEN = np.random.default_rng(0)


class Sometimes(Dataset):
    """Dataset whose randomness a single look at one sample does not reveal."""

    def __init__(self, how):
        self.how = how

    def __len__(self):
        return 40

    def __getitem__(self, index):
        if self.how == "odd" and index % 2:
            return torch.rand(3)
        if self.how == "global":
            return torch.full((3,), HIDDEN.random())
        if self.how == "partial":
            return torch.full((3,), self.draw())
        if self.how == "nan":
            return torch.full((3,), float("nan"))
        return torch.full((3,), float(index))


def mixed(samples):
    batch = torch.stack(samples)
    return batch[torch.randperm(len(batch))]


@pytest.mark.parametrize(
    ("how", "collate", "said"),
    [
        ("odd", None, "draws from torch's default generator"),
        ("global", None, "draws from a numpy.random"),
        ("partial", None, "draws from a random.Random"),
        ("not", mixed, "draws from torch's default generator"),
        ("not", None, None),
        ("nan", None, None),
    ],
)
def test_randomness_that_one_sample_does_not_show(how, collate, said):
    data = Sometimes(how)
    if how == "partial":
        data.draw = functools.partial(lambda low, rng: low + rng.random(), 0.0, rng=random.Random(3))
    loader = DataLoader(data, 4, collate_fn=collate)
    state = torch.get_rng_state(), HIDDEN.bit_generator.state["state"]["state"]
    seen = randomness_of(loader)
    assert (seen is None) if said is None else (said in seen.reason and seen.is_drawn)
    assert torch.equal(torch.get_rng_state(), state[0])
    assert HIDDEN.bit_generator.state["state"]["state"] == state[1]


def test_what_cannot_be_looked_into_holds_no_generator():
    class Closed(dict):
        def values(self):
            raise OSError("closed")

    generator = torch.Generator()
    assert generators_in([Closed(), weakref.proxy(Sometimes("not")), generator]) == [generator]


@pytest.mark.parametrize("road", ["in memory", "workers made persistent", "no workers"])
def test_orders_of_later_epochs(road):
    """Persistent workers receive their seed once.

    A loader that replaces them, or is replaced, draws the same numbers.
    """
    data = TensorDataset(torch.arange(20))

    def epochs(loader):
        return [[batch[0].tolist() for batch in loader] for _ in range(3)]

    def made(persistent):
        generator = torch.Generator().manual_seed(5)
        return DataLoader(data, 4, shuffle=True, generator=generator, num_workers=1, persistent_workers=persistent)

    if road == "in memory":
        assert epochs(InMemoryLoader(made(True))) == epochs(made(True))
        assert epochs(InMemoryLoader(made(False))) == epochs(made(False))
    elif road == "no workers":
        assert epochs(Prefetcher(clone_loader(made(True), num_workers=0), "cpu")) == epochs(made(True))
        back = clone_loader(clone_loader(made(True), num_workers=0), num_workers=1, persistent_workers=True)
        assert epochs(Prefetcher(back, "cpu")) == epochs(made(True))
    else:
        assert epochs(Prefetcher(clone_loader(made(False), persistent_workers=True), "cpu")) == epochs(made(False))
        assert epochs(Prefetcher(made(True), "cpu")) == epochs(made(True))


# -- another batch size ----------------------------------------------------------------------------------------


def test_a_loader_with_another_batch_size_has_the_same_samples_in_the_same_order():
    def loader():
        generator = torch.Generator().manual_seed(1)
        return DataLoader(range(50), batch_size=4, shuffle=True, drop_last=True, generator=generator)

    ordered = torch.cat(list(loader()))
    resized = with_batch_size(loader(), 16)
    batches = list(resized)
    assert [len(batch) for batch in batches] == [16] * 3
    assert torch.cat(batches).equal(ordered[:48])
    assert is_rewindable(resized)


def test_the_users_loader_is_found_behind_all_that_was_made_of_it():
    loader = DataLoader(range(50), batch_size=4)
    assert original_of(loader) is loader
    assert original_of(with_batch_size(loader, 8)) is loader
    assert original_of(with_batch_size(with_batch_size(loader, 8), 16)) is loader
    assert original_of(seed_samples(with_batch_size(loader, 8))) is loader
    assert original_of([1]) == [1]


@pytest.mark.parametrize(
    ("loader", "fact"),
    [
        ([torch.ones(4)], "list"),
        (DataLoader(range(8), batch_sampler=[[0, 1]]), "batch_sampler"),
        (DataLoader(range(8), batch_size=None), "batch"),
        (DataLoader(Stream(), batch_size=4), "rewound"),
    ],
)
def test_loaders_that_cannot_be_resized_are_refused_with_the_reason(loader, fact):
    assert fact in why_not_resized(loader)
    with pytest.raises(ValueError, match=fact):
        with_batch_size(loader, 8)


def test_first_batches_start_no_workers_of_the_users():
    loader = DataLoader(range(50), batch_size=4, num_workers=1, persistent_workers=True)
    assert [batch.tolist() for batch in first_batches(loader, 2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert loader._iterator is None
    assert first_batches([1, 2, 3], 2) == [1, 2]


def test_two_of_the_first_batches_are_enough_if_they_are_slow(clock):
    loader = DataLoader(TimedSamples(clock, 0.1), batch_size=8)
    assert len(first_batches(loader, 4, seconds=1.0)) == 2
    assert len(first_batches(loader, 4, seconds=2.0)) == 3
    assert len(first_batches(loader, 4)) == 4
