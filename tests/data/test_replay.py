"""Batches that trials took from a loader: training receives them unchanged."""

import pytest
import torch
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset

import flatout
from flatout.data.replay_buffer import ReplayBuffer
from tests.jobs import QUICK, Net

pytestmark = pytest.mark.usefixtures("short_trials")


class Pair:
    """User's own batch class."""

    def __init__(self, x, y):
        self.x, self.y = x, y

    def to(self, device):
        self.x, self.y = self.x.to(device), self.y.to(device)
        return self


class Refilled:
    """Loader that refills the same memory and container for every batch."""

    def __init__(self, kind):
        self.kind = kind

    def __iter__(self):
        x, y = torch.zeros(4, 8), torch.zeros(4, dtype=torch.int64)
        batch = {tuple: (x, y), list: [x, y], dict: {"x": x, "y": y}, Pair: Pair(x, y)}[self.kind]
        for i in range(8):
            x.fill_(i)
            y.fill_(i % 3)
            if self.kind is dict:
                batch["i"] = i
            yield batch


def parts(batch):
    if isinstance(batch, Pair):
        return batch.x, batch.y
    return (batch["x"], batch["y"]) if isinstance(batch, dict) else tuple(batch)


def loss_of(model, batch):
    x, y = parts(batch)
    return functional.cross_entropy(model(x), y)


@pytest.mark.parametrize(("kind", "budget"), [(tuple, 0), (list, 0), (dict, 0), (dict, 1)])
def test_training_sees_what_a_loader_yields_that_fills_its_memory_again(kind, budget):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    run = flatout.optimize(
        model, Refilled(kind), optimizer, compute_loss=loss_of, techniques=QUICK, budget=budget, device="cpu"
    )
    for _ in range(2):
        seen = []
        for batch in run.loader:
            seen.append((parts(batch)[0][0, 0].item(), parts(batch)[1][0].item(), type(batch)))
            if kind is dict:
                assert batch["i"] == seen[-1][0]
            run.step(batch)
        assert seen == [(i, i % 3, kind) for i in range(8)]


@pytest.mark.parametrize("kind", [tuple, list, dict, Pair])
@pytest.mark.parametrize("count", [3, 8, 9])
def test_replayed_batches_are_those_that_were_read(kind, count):
    replayed = ReplayBuffer(Refilled(kind), count)
    for _ in range(2):
        assert [parts(batch)[0][0, 0].item() for batch in replayed] == list(range(8))


class Shared(IterableDataset):
    """Loader that yields rows of one tensor and shifts the tensor."""

    def __iter__(self):
        memory = torch.zeros(8)
        for i in range(8):
            yield memory.fill_(i)


def test_a_dataset_without_batches_may_fill_its_memory_again():
    assert [x[0].item() for x in ReplayBuffer(DataLoader(Shared(), batch_size=None), 5)] == list(range(8))


def test_iterators_that_were_begun_before_the_first_batch_do_not_mix_their_epochs():
    replayed = ReplayBuffer(Refilled(tuple), 4)
    first, second = iter(replayed), iter(replayed)
    assert next(first)[0][0, 0] == 0
    assert [x[0, 0].item() for x, _ in second] == list(range(8))
    assert [x[0, 0].item() for x, _ in first] == list(range(1, 8))


class Noisy(Refilled):
    """Loader that draws from the global generator, and raises on request."""

    def __init__(self, fails_at=None):
        super().__init__(tuple)
        self.fails_at = fails_at

    def __iter__(self):
        for i, batch in enumerate(super().__iter__()):
            torch.rand(())
            if i == self.fails_at:
                raise OSError("gone")
            yield batch


def test_reading_leaves_the_generators_where_they_were():
    before = torch.get_rng_state()
    ReplayBuffer(Noisy(), 3)
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(OSError, match="gone"):
        ReplayBuffer(Noisy(fails_at=2), 3)
    assert torch.equal(torch.get_rng_state(), before)
