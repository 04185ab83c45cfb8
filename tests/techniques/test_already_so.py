"""Forced techniques that the job already uses."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

import flatout
from flatout.data import InMemoryLoader
from tests.jobs import make_data


def plain() -> nn.Module:
    return nn.Linear(8, 3)


def scripted() -> nn.Module:
    return torch.jit.script(plain())


def channels_last() -> nn.Module:
    images = nn.Sequential(nn.Unflatten(1, (2, 2, 2)), nn.Conv2d(2, 3, 2), nn.Flatten())
    return images.to(memory_format=torch.channels_last)


def loader() -> DataLoader[Any]:
    return DataLoader(make_data(), batch_size=16)


@pytest.mark.parametrize(
    ("technique", "value", "model", "batches"),
    [
        pytest.param("torchscript", True, scripted, loader, marks=pytest.mark.filterwarnings("ignore:.*torch.jit")),
        ("channels_last", True, channels_last, loader),
        ("in_memory", True, plain, lambda: InMemoryLoader(loader())),
        (
            "precision",
            "bf16",
            lambda: plain().bfloat16(),
            lambda: [(torch.ones(4, 8).bfloat16(), torch.zeros(4).long())],
        ),
    ],
)
def test_forced_techniques_that_the_job_already_uses_stay(
    technique: str, value: Any, model: Callable[[], nn.Module], batches: Callable[[], Iterable[Any]]
) -> None:
    module = model()
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    run = flatout.optimize(
        module, batches(), optimizer, functional.cross_entropy, techniques={technique: value}, budget=0
    )
    assert technique not in run.plan.decisions
    run.step(next(iter(run.loader)))
