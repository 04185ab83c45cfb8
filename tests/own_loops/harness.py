"""Job and loop for tests of a user's own loop, and the comparison of a loop with and without flatout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import flatout
from tests.helpers import trained_state
from tests.jobs import QUICK, Net, make_data, train

Loop = Callable[[nn.Module, Any], list[float]]
EXACT = QUICK | {"in_memory": True}
BF16 = QUICK | {"in_memory": True, "precision": "bf16"}


def make(kind: type[nn.Module] = Net) -> tuple[nn.Module, DataLoader[Any]]:
    torch.manual_seed(0)
    return kind(), DataLoader(make_data(), batch_size=16, shuffle=True)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def plain(model: nn.Module, loader: Any) -> list[float]:
    assert len(loader) == 6
    losses = train(model, loader, sgd(model), epochs=2)
    assert len(losses) == 12
    return losses


def assert_alike(
    make: Callable[[], tuple[nn.Module, Any]], loop: Loop, techniques: dict[str, Any], *, rel: float, budget: float = 0
) -> None:
    """Compare the loop after ``optimize`` with the loop without it."""
    model, loader = make()
    torch.manual_seed(7)
    expected = loop(model, loader)
    expected_state = model.state_dict()

    model, loader = make()
    kind, before = type(model), trained_state(model)
    tuned, batches = flatout.optimize(model, loader, techniques=techniques, budget=budget)
    assert tuned is model
    assert trained_state(model) == before
    torch.manual_seed(7)
    losses = loop(tuned, batches)
    assert losses == pytest.approx(expected, rel=rel, abs=0.5 * rel)
    if techniques.get("precision") is False:
        for (name, ours), theirs in zip(model.state_dict().items(), expected_state.values(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6, msg=lambda told, n=name: f"{n}: {told}")
    assert list(model.state_dict()) == list(expected_state)
    flatout.undo(model)
    assert type(model) is kind
