"""Sliced loaders on two processes: the order of rank 0 reaches the others."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, Sampler, TensorDataset

from flatout.data import InMemoryLoader, Prefetcher, cache_in_memory
from flatout.data.slices import sliced
from flatout.distributed.agreement import GroupAgreement
from flatout.distributed.process_group import control_group
from tests.ranks import on_ranks

SAMPLES = 23


class Lazy(Sampler):
    """Sampler that draws each index on request."""

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Any:
        left = list(range(SAMPLES))
        while left:
            yield left.pop(random.randrange(len(left)))


def order(kind: str) -> DataLoader:
    data = TensorDataset(torch.arange(SAMPLES))
    if kind == "shuffled":
        return DataLoader(data, 5, shuffle=True)
    sampler = Lazy() if kind == "lazy" else RandomSampler(data, replacement=True, num_samples=80)
    return DataLoader(data, 5, sampler=sampler)


def wrapped(kind: str, loader: Any) -> Any:
    if kind == "in memory":
        return InMemoryLoader(loader)
    return cache_in_memory(loader) if kind == "cached" else Prefetcher(loader, "cpu")


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


@pytest.mark.parametrize("kind", ["shuffled", "lazy", "replacement"])
@pytest.mark.parametrize("wrapper", ["prefetcher", "in memory", "cached"])
@on_ranks("pair")
def test_ranks_train_on_the_batches_of_one_process(kind: str, wrapper: str) -> None:
    ranks = GroupAgreement(control_group())
    seed_all(0)
    own = wrapped(wrapper, order(kind))
    whole = [[batch.tolist() for (batch,) in own] for _ in range(3)]
    seed_all(ranks.rank)  # rank 0 draws as above, and other ranks have other seeds
    loader = wrapped(wrapper, sliced(order(kind), ranks))
    seen: list[list[list[int]]] = []
    for _ in range(3):
        seen.append([])
        for (batch,) in loader:
            torch.rand(ranks.rank)
            if ranks.rank:
                random.random()
            seen[-1].append(batch.tolist())
    parts = ranks.every(seen)
    joined = [
        [list(itertools.chain(*batch)) for batch in zip(*of_rank, strict=True)] for of_rank in zip(*parts, strict=True)
    ]
    assert joined == whole
    assert whole[0] != whole[1] != whole[2]
    assert len(set(map(str, ranks.every(loader.state_dict())))) == 1
    assert len(set(ranks.every(torch.rand(()).item()))) == ranks.size
