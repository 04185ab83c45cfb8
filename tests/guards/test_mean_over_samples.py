"""Comparison of parts of a batch with the whole batch, for losses of all kinds."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import flatout
from flatout.guards import MEAN_OVER_SAMPLES
from tests.helpers import snapshot
from tests.jobs import NO_TECHNIQUES, job_of, only
from tests.reasons import reasons


class Noisy(nn.Module):
    """Model with BatchNorm, and random numbers that depend on no module's mode."""

    def __init__(self):
        super().__init__()
        self.one, self.norm, self.two = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)

    def forward(self, x):
        x = functional.dropout(self.norm(self.one(x)), 0.5)
        return self.two(x + 0.1 * torch.randn_like(x))


def contradiction(compute_loss, model=None, batch=None, **settings):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)) if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    batches = [(torch.randn(16, 8), torch.arange(16) % 4)] if batch is None else [batch]
    job = job_of(model, batches, optimizer, compute_loss=compute_loss, **settings)
    before, random = snapshot(model, optimizer), torch.get_rng_state()
    gradients = [p.grad for p in model.parameters()]
    seen = MEAN_OVER_SAMPLES.contradiction(job)
    assert snapshot(model, optimizer) == before
    assert torch.equal(torch.get_rng_state(), random)
    assert all(p.grad is gradient for p, gradient in zip(model.parameters(), gradients, strict=True))
    return seen


def mean(model, batch):
    return functional.cross_entropy(model(batch[0]), batch[1])


def contrastive(model, batch):
    first = functional.normalize(model(batch[0]))
    return functional.cross_entropy(first @ first.roll(1, 1).T, torch.arange(len(first)))


def padded():
    y = torch.arange(16) % 4
    y[5:11] = -100
    return torch.randn(16, 8), y


def kept(batch):
    return (batch[1] != -100).sum()


@pytest.mark.parametrize("model", [None, Noisy])
def test_means_over_samples_pass(model):
    assert not contradiction(mean, model and model())


def test_random_numbers_of_samples_are_the_same_in_parts():
    def weighted_by_noise(model, batch):
        noise = torch.rand(len(batch[0]), 1)
        step = torch.randint(1, 9, (len(batch[0]), 1))
        return (model(batch[0] * noise) * step).square().mean()

    assert not contradiction(weighted_by_noise)


@pytest.mark.parametrize(
    "compute_loss",
    [
        contrastive,
        lambda model, batch: model(batch[0]).std(0).sum(),
        lambda model, batch: mean(model, batch) * len(batch[0]),
        lambda model, batch: mean(model, batch).sqrt(),
        lambda model, batch: (model(batch[0]) - model(batch[0]).mean(0)).square().mean(),
        lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1], weight=torch.arange(1.0, 5.0)),
    ],
    ids=["contrastive", "spread", "sum", "root", "centered", "class weights"],
)
def test_other_losses_fail(compute_loss):
    assert contradiction(compute_loss, batch=(torch.randn(16, 8), torch.arange(16) // 5))


def test_token_means_require_their_weight():
    assert contradiction(mean, batch=padded())
    assert not contradiction(mean, batch=padded(), loss_weight=kept)


def test_own_autocast_rounds_coarser():
    def under_autocast(model, batch):
        with torch.autocast("cpu", torch.bfloat16):
            return mean(model, batch)

    def contrastive_under_autocast(model, batch):
        with torch.autocast("cpu", torch.bfloat16):
            return contrastive(model, batch)

    assert not contradiction(under_autocast)
    assert contradiction(contrastive_under_autocast)


def test_a_model_that_accepts_one_size_fails():
    class Rigid(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(8, 4)

        def forward(self, x):
            return self.head(x.view(16, 8))

    assert contradiction(mean, Rigid())


def test_parts_that_are_asked_for_are_refused():
    model = nn.Sequential(nn.Linear(8, 4))
    batches = [(torch.randn(16, 8), torch.zeros(16))]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    techniques = NO_TECHNIQUES | {"batch_size": {"micro_batch": 4}}
    with pytest.raises(ValueError, match="batch_size") as caught:
        flatout.optimize(model, batches, optimizer, compute_loss=contrastive, techniques=techniques, budget=0)
    assert "not-mean-over-samples" in reasons(str(caught.value))


def test_a_memory_limit_that_requires_parts_is_refused():
    model = nn.Sequential(nn.Linear(8, 2048), nn.Linear(2048, 4))
    batches = [(torch.randn(64, 8), torch.zeros(64))]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = snapshot(model, optimizer)
    limited = {"memory_limit": 900_000, "techniques": only("batch_size"), "budget": 0}
    with pytest.raises(torch.OutOfMemoryError) as caught:
        flatout.optimize(model, batches, optimizer, compute_loss=contrastive, **limited)
    assert "not-mean-over-samples" in reasons(str(caught.value))
    assert snapshot(model, optimizer) == before
