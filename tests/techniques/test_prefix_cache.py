"""Decoded samples in memory: the user's batches, and their memory, in a tuned training."""

from __future__ import annotations

import time

import pytest
import torch
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

import flatout
from flatout.data.prefix import PrefixCache
from tests.helpers import bits
from tests.jobs import NO_TECHNIQUES, Net, job_of
from tests.techniques.harness import refusal

SAMPLES = 48


def noisy(x):
    return x + torch.rand(())


class Decoded(Dataset):
    """Dataset whose samples take time before their random transform."""

    def __init__(self, seconds=0.0, transform=noisy):
        self.seconds = seconds
        self.transform = transform

    def __len__(self):
        return SAMPLES

    def __getitem__(self, i):
        end = time.perf_counter() + self.seconds
        while time.perf_counter() < end:
            pass
        return self.transform(torch.full((8,), float(i))), i % 3


def optimized(dataset, budget=0, **options):
    model = Net()
    loader = DataLoader(dataset, 8, shuffle=True, **options)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    techniques = NO_TECHNIQUES | {"prefix_cache": None if budget else True}
    run = flatout.optimize(
        model, loader, optimizer, functional.cross_entropy, techniques=techniques, budget=budget, expected_steps=10**5
    )
    return run, loader, run.report.row("prefix_cache")


def seen(loader):
    torch.manual_seed(3)
    return [(bits(x), bits(y)) for _ in range(3) for x, y in loader], bits(torch.get_rng_state())


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_the_users(workers):
    run, loader, row = optimized(Decoded(), num_workers=workers)
    assert row.status == "kept"
    assert isinstance(run._job.data.source.dataset, PrefixCache)
    assert seen(run.loader) == seen(loader)
    run.undo()
    assert not isinstance(loader.dataset, PrefixCache)


def test_a_slow_front_is_found_by_trials():
    run, _, row = optimized(Decoded(0.004), budget=20)
    assert row.status == "kept"
    assert run.plan.decisions == {"prefix_cache": True}
    assert row.trials[0].gain.ratio > 2


def test_a_front_without_work_is_not_kept():
    _, _, row = optimized(Decoded(), budget=20)
    assert row.status != "kept"


def test_a_change_ends_the_cache_and_is_reported():
    dataset = Decoded()
    run, loader, _ = optimized(dataset)
    seen(run.loader)
    dataset.transform = torch.neg
    assert seen(run.loader) == seen(loader)
    assert [each.technique for each in run._job.breaks.found] == ["prefix_cache"]


@pytest.mark.parametrize(
    ("loader", "steps", "reason"),
    [
        (DataLoader(Decoded(), 8), SAMPLES // 8, "one-epoch"),
        ([(torch.ones(8, 8), torch.ones(8))], 1000, "not-a-dataloader"),
    ],
)
def test_other_trainings_are_refused(loader, steps, reason):
    job = job_of(Net(), loader=loader)
    job.data.expected_steps = steps
    assert reason in refusal("prefix_cache", job)


def test_a_dataset_without_transform_is_refused():
    with pytest.raises(ValueError, match="prefix_cache"):
        optimized([(torch.ones(8), 0)] * SAMPLES)
