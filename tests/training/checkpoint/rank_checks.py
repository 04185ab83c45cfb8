"""Checks that :mod:`tests.training.checkpoint.test_ranks` runs on each of two ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import flatout
from flatout.core.reproducible import seed_all
from tests.training.checkpoint.test_file import equal

WORLD = 2


def make() -> flatout.Run:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 3))
    model = nn.parallel.DistributedDataParallel(layers)
    samples = TensorDataset(torch.randn(44, 6), torch.arange(44) % 3)
    loader = DataLoader(samples, 4, sampler=DistributedSampler(samples, WORLD, dist.get_rank(), seed=3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return flatout.optimize(model, loader, optimizer, functional.cross_entropy, budget=0, accumulate=2, device="cpu")


def each_rank_goes_on_from_its_own_file(folder: str) -> None:
    path = f"{folder}/{dist.get_rank()}.pt"
    run = make()
    seed_all(dist.get_rank())
    batches = iter(run.loader)
    for _ in range(3):
        run.step(next(batches))
    run.save(path, asynchronous=True)
    losses = [run.step(batch) for batch in batches]
    run.flush_saves()
    other = make()
    seed_all(99)
    other.load(path)
    assert len(losses) == 3
    assert equal([other.step(batch) for batch in other.loader], losses)
    assert equal(other.state_dict()["job"], run.state_dict()["job"])


def no_folder_is_written_to_by_several(folder: str) -> None:
    with pytest.raises(RuntimeError, match="checkpoint_dir"):
        make().fit(1, progress=False, checkpoint_dir=folder)
