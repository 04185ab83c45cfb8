"""Trials of numbers of workers: how many batches they load."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from flatout.data.rate_trials import PREFETCH, Trials
from tests.clock import Clock


class Counted:
    """Iterator of a modeled loader, which counts its batches. Each batch takes a time on the simulated clock."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        self.clock, self.seconds, self.loaded = clock, seconds, 0
        self._workers = [SimpleNamespace(pid=os.getpid())]

    def __iter__(self) -> Iterator[torch.Tensor]:
        return self

    def __next__(self) -> torch.Tensor:
        self.clock.sleep(self.seconds)
        self.loaded += 1
        return torch.zeros(1)


def modelled(clock: Clock, monkeypatch: pytest.MonkeyPatch, seconds: float) -> list[Counted]:
    """Replace the loaders of trials by models, and return the list that will hold them."""
    made: list[Counted] = []

    def counted(_: Trials, workers: int, **settings: Any) -> Counted:
        made.append(Counted(clock, seconds / max(1, workers)))
        return made[-1]

    monkeypatch.setattr(Trials, "_made", counted)
    clock.advance(100.0)
    return made


@pytest.mark.parametrize(("seconds", "is_warm", "loaded"), [(0.5, True, 1), (0.5, False, 2), (0.2, True, 3)])
def test_the_first_slow_batch_counts_if_code_and_caches_are_warm(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, seconds: float, is_warm: bool, loaded: int
) -> None:
    made = modelled(clock, monkeypatch, seconds)
    found = Trials(DataLoader(range(8)), is_warm=is_warm).alone()
    assert found.batches_per_second == pytest.approx(1 / seconds, rel=0.01)
    assert made[-1].loaded == loaded


@pytest.mark.parametrize(("seconds", "ready"), [(0.5, 3), (0.2, 3 * PREFETCH)])
def test_workers_of_slow_batches_have_one_batch_each_ready(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, seconds: float, ready: int
) -> None:
    made = modelled(clock, monkeypatch, seconds)
    trials = Trials(DataLoader(range(8)))
    trials.alone()
    found = trials.with_workers(3)
    assert found.batches_per_second == pytest.approx(3 / seconds, rel=0.01)
    timed = max(3, -(-0.25 * 3 // seconds))  # a round of all workers, and at least a quarter of a second
    assert made[-1].loaded == ready + timed
