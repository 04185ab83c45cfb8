"""``run.loader`` on one of several ranks: share of each batch, and numbers of a sampler's epochs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from flatout.data import InMemoryLoader, seed_samples
from flatout.data.loaders import with_batch_size
from flatout.data.order import BatchShare
from flatout.data.slices import sliced
from flatout.distributed.agreement import ALONE, Agreement
from flatout.mfu import MfuCounter
from flatout.training.loader import TrainingLoader
from tests.data.harness import RecordedRanks
from tests.jobs import Net, job_of

DATA = TensorDataset(torch.arange(13))


def rank_1() -> Agreement:
    ranks = RecordedRanks(1, 2, [])
    ranks.first = lambda value: value  # type: ignore[method-assign]
    return ranks


def training_loader(loader: Any, ranks: Agreement, observers: Any = ()) -> TrainingLoader:
    job = job_of(Net(), loader=loader, ranks=ranks)
    return TrainingLoader(job, MfuCounter(device="cpu"), lambda: None, observers)


@pytest.mark.parametrize("in_memory", [False, True])
def test_the_share_is_that_of_the_batch_in_hand(in_memory):
    made = sliced(DataLoader(DATA, 4), rank_1())
    loader = training_loader(InMemoryLoader(made) if in_memory else made, rank_1())
    assert loader.share is None
    shares = [(loader.share, len(batch)) for (batch,) in loader]
    assert shares == [*3 * [(BatchShare(2, 4), 2)], (BatchShare(0, 1), 1)]


def test_a_loader_of_one_process_has_no_shares():
    loader = training_loader(DataLoader(DATA, 4), ALONE)
    assert {loader.share for _ in loader} == {None}


def test_attributes_are_those_of_the_users_loader():
    own = DataLoader(DATA, 4)
    made = sliced(own, rank_1())
    loader = training_loader(made, rank_1())
    assert (loader.batch_size, loader.sampler) == (4, own.sampler)
    assert loader.original is own
    generator = torch.Generator()
    loader.generator = generator
    assert made.generator is own.generator is generator


def test_attributes_reach_all_loaders_that_slices_were_made_of():
    own = DataLoader(DATA, 4)
    resized = with_batch_size(own, 8)
    seeded = seed_samples(resized)
    made = sliced(seeded, rank_1())
    generator = torch.Generator()
    training_loader(made, rank_1()).generator = generator
    assert all(loader.generator is generator for loader in (own, resized, seeded, made))


def numbers_of(sampler: DistributedSampler, loader: Any, epochs: int, *, stop: int | None = None) -> list[int]:
    """Return the sampler's epoch in each epoch. The last epoch ends after ``stop`` batches."""
    seen = []
    for epoch in range(epochs):
        for number, _ in enumerate(loader, 1):
            if epoch == epochs - 1 and number == stop:
                break
        seen.append(sampler.epoch)
    return seen


def sharded(ranks: Agreement) -> tuple[DistributedSampler, TrainingLoader]:
    sampler: DistributedSampler = DistributedSampler(DATA, 2, 1)
    return sampler, training_loader(DataLoader(DATA, 2, sampler=sampler), ranks)


def test_epochs_of_a_sharded_loader_are_numbered():
    sampler, loader = sharded(rank_1())
    orders = []
    for _ in range(3):
        orders.append([batch.tolist() for (batch,) in loader])
    assert sampler.epoch == 2
    assert orders[0] != orders[1] != orders[2]
    assert loader.share is None


def test_a_user_numbers_epochs():
    sampler, loader = sharded(rank_1())
    seen = []
    for epoch in (4, 5, 9):
        sampler.set_epoch(epoch)
        seen += numbers_of(sampler, loader, 1)
    assert seen == [4, 5, 9]
    assert numbers_of(sampler, loader, 2) == [10, 11]


def test_one_process_numbers_nothing():
    sampler, loader = sharded(ALONE)
    assert numbers_of(sampler, loader, 2) == [0, 0]
    assert "sampler_epoch" not in loader.state_dict()


@pytest.mark.parametrize(
    ("epochs", "stop", "expected"),
    [(1, 1, [0, 1]), (2, 2, [1, 2]), (2, 4, [1, 2]), (2, None, [2, 3]), (0, None, [0, 1])],
)
def test_the_number_of_the_epoch_is_resumed(epochs, stop, expected):
    sampler, loader = sharded(rank_1())
    numbers_of(sampler, loader, epochs, stop=stop)
    state = loader.state_dict()
    for _ in range(2):  # the second loader saves the loaded state
        sampler, resumed = sharded(rank_1())
        resumed.load_state_dict(state)
        state = resumed.state_dict()
    assert numbers_of(sampler, resumed, 2) == expected


def test_a_number_must_be_one():
    _, loader = sharded(rank_1())
    with pytest.raises(ValueError, match="sampler_epoch must be an int >= 0, got -1"):
        loader.load_state_dict(loader.state_dict() | {"sampler_epoch": -1})
