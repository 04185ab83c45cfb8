"""cache_in_memory: batches of a decoded dataset, and data that must not be cached."""

from __future__ import annotations

import os
import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Subset, TensorDataset

from flatout.data import CachedDataset, NotCacheable, cache_in_memory
from flatout.data.cache import available_memory
from flatout.data.watch import MOST_READ
from tests.data.harness import begin_row
from tests.reasons import reasons
from tests.samples import RANDOM, REFUSED, SAMPLES, Attribute, Batched, Made, same, states


@pytest.mark.parametrize("dataset", [Made, Batched, lambda make: Subset(Made(make), [5, 1, 17, 1])])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("name", SAMPLES)
def test_equals_the_loader(name, shuffle, dataset):
    def run(wrap):
        loader = wrap(DataLoader(dataset(SAMPLES[name]), 5, shuffle=shuffle))
        torch.manual_seed(2)
        return [batch for _ in range(2) for batch in loader], torch.get_rng_state()

    ours, our_state = run(cache_in_memory)
    theirs, their_state = run(lambda loader: loader)
    assert len(ours) == len(theirs)
    assert all(map(same, ours, theirs))
    assert torch.equal(our_state, their_state)


def test_each_sample_once_in_order_then_few_again():
    dataset = Made(lambda i: i, 100)
    loader = cache_in_memory(DataLoader(dataset, 10, shuffle=True))
    looked_at, rest = dataset.calls[:32], dataset.calls[32:]
    assert looked_at[16:] == sorted(set(looked_at)) == looked_at[:16]
    assert rest == sorted(set(range(100)) - set(looked_at))
    dataset.calls.clear()
    assert sum(int(batch.sum()) for batch in loader) == 4950
    assert len(dataset.calls) <= MOST_READ


@pytest.mark.parametrize("name", ["dict", "tensor", "namedtuple"])
def test_samples_are_decoded_in_the_workers_of_the_loader(name):
    makers = torch.zeros(100, dtype=torch.int64).share_memory_()

    def make(i):
        makers[i] = os.getpid()
        return SAMPLES[name](i)

    before = states()
    loader = cache_in_memory(DataLoader(Made(make, 100), 7, shuffle=True, num_workers=2))
    assert states() == before
    assert int((makers == os.getpid()).sum()) == 16  # loaded by the inspection of the dataset
    assert len(makers.unique()) == 3
    torch.manual_seed(1)
    ours = list(loader)
    torch.manual_seed(1)
    theirs = list(DataLoader(Made(SAMPLES[name], 100), 7, shuffle=True))
    assert all(map(same, ours, theirs))


def test_a_row_lost_with_its_process_is_no_zero():
    cached = CachedDataset(Made(lambda i: i, 100))
    begin_row(cached, 8)
    with pytest.raises(NotCacheable, match=r"dataset\[8\]"):
        cache_in_memory(DataLoader(cached))
    assert cached[8] == 8


def test_forced():
    loader = DataLoader(Made(lambda i: torch.rand(2)), 5)
    with pytest.raises(NotCacheable) as caught:
        cache_in_memory(loader)
    assert "random-samples" in reasons(str(caught.value))
    frozen = cache_in_memory(loader, force=True)
    assert all(map(same, frozen, frozen))


def test_batches_do_not_share_containers():
    first, second = cache_in_memory(DataLoader(Made(SAMPLES["dict"]), 12))
    first["x"].zero_()
    first["new"] = first.pop("n")
    assert list(second) == ["x", "n", "inner"]


@pytest.mark.parametrize("dataset", [Made, Batched])
@pytest.mark.parametrize("name", RANDOM)
def test_random_datasets_are_refused_and_generators_restored(name, dataset):
    make, code, fact = RANDOM[name]
    before = states()
    with pytest.raises(NotCacheable, match=fact) as caught:
        cache_in_memory(DataLoader(dataset(make()), 4))
    assert code in reasons(str(caught.value))
    assert states() == before


def test_generators_of_the_dataset_are_restored():
    for own in (random.Random(0), np.random.default_rng(0), np.random.RandomState(0), torch.Generator()):
        draw = (lambda own: torch.rand(2, generator=own)) if isinstance(own, torch.Generator) else None
        dataset = Made(Attribute(own, draw or (lambda own: own.random())))
        first = dataset[0]
        own_again = type(own)() if isinstance(own, torch.Generator) else None
        with pytest.raises(NotCacheable):
            cache_in_memory(DataLoader(dataset))
        second = dataset[0]
        if own_again is not None:
            assert torch.equal(torch.rand(2, generator=own_again), first)
            assert torch.equal(torch.rand(2, generator=own_again), second)
        else:
            fresh = {random.Random: random.Random, np.random.RandomState: np.random.RandomState}.get(
                type(own), np.random.default_rng
            )(0)
            assert [fresh.random(), fresh.random()] == [first, second]


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_its_reason(name):
    make, code, fact = REFUSED[name]
    before = states()
    with pytest.raises(NotCacheable, match=fact) as caught:
        cache_in_memory(DataLoader(make(), 2))
    assert code in reasons(str(caught.value))
    assert states() == before


def test_loaders_are_refused_before_anything_is_decoded():
    dataset = Made(lambda i: i)
    for options in ({"collate_fn": list}, {"batch_size": None}):
        with pytest.raises(NotCacheable):
            cache_in_memory(DataLoader(dataset, **options))
    assert dataset.calls == []


def test_budget():
    dataset = Made(lambda i: (torch.zeros(256), i), 100)
    with pytest.raises(NotCacheable, match=r"103,200.*103,199"):
        cache_in_memory(DataLoader(dataset), byte_budget=103_199)
    assert len(dataset.calls) == 1
    assert len(cache_in_memory(DataLoader(dataset), byte_budget=103_200)) == 100
    assert 0 < available_memory() < 2**50


def test_one_sample_and_tensor_datasets():
    (batch,) = cache_in_memory(DataLoader(Made(lambda i: i, 1)))
    assert batch.tolist() == [0]
    permuted = TensorDataset(torch.randn(6, 4, 4, 3).permute(0, 3, 1, 2))
    loader = DataLoader(permuted, 2)
    assert all(map(same, cache_in_memory(loader), loader))
