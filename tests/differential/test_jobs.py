"""Random jobs train equally with and without ``optimize``, and trials have no side effects."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
import torch
import torch._dynamo  # its first import, as in activation checkpointing, adds a filter of warnings
from torch import nn

from tests.differential.checks import check
from tests.differential.conftest import CHOSEN, COMPILING
from tests.differential.data import BATCHES, LOADERS
from tests.differential.grammar import FORMS, covering, draw, is_slow
from tests.differential.losses import LOSSES
from tests.differential.models import MODELS, QUIRKS
from tests.differential.optimizers import OPTIMIZERS, SCHEDULERS


@pytest.fixture(autouse=True, scope="module")
def shortest_trials() -> Iterator[None]:
    """Shorten trials, whose side effects depend neither on their length nor on their precision."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flatout.tuning.bench.TRIAL_SECONDS", 0.02)
        patch.setattr("flatout.tuning.bench.STRETCH_SECONDS", 0.005)
        patch.setattr("flatout.tuning.costs.PHASE_SECONDS", 0.02)
        yield


@functools.cache
def compile_once() -> None:
    """The first compilation of a process starts TorchInductor's own processes, and sets variables."""
    torch.compile(nn.Linear(2, 2))(torch.ones(1, 2)).sum().backward()


def test_job(seed: int) -> None:
    job = draw(seed)
    if is_slow(job):
        compile_once()
    print(f"{job}\nreproduce: pytest tests/differential --jobs 1 --seed {seed}")
    check(job)


def test_the_chosen_jobs_have_every_kind_of_part() -> None:
    """The chosen jobs are also the same on every machine, and in every version of Python."""
    chosen = [draw(seed) for seed in covering(range(2000), CHOSEN, COMPILING)]
    for name, kinds in {
        "model": MODELS,
        "loss": LOSSES,
        "batch": BATCHES,
        "loader": LOADERS,
        "optimizer": OPTIMIZERS,
        "scheduler": SCHEDULERS,
        "form": FORMS,
    }.items():
        assert {getattr(job, name) for job in chosen} >= set(kinds), name
    assert {quirk for job in chosen for quirk in job.quirks} == set(QUIRKS)
