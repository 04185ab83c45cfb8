"""Trials that read a loader of flatout, and restore its position."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

from flatout.data import InMemoryLoader, Prefetcher
from tests.jobs import Net, make_data, tried


@pytest.mark.parametrize("kind", ["in memory", "prefetcher", "both"])
def test_a_loader_of_flatouts_is_left_where_it_was(kind: str) -> None:
    torch.manual_seed(0)
    model: nn.Module = Net()
    loader = DataLoader(make_data(), 16, shuffle=True)
    own = {
        "in memory": lambda: InMemoryLoader(loader),
        "prefetcher": lambda: Prefetcher(loader, "cpu"),
        "both": lambda: Prefetcher(InMemoryLoader(loader), "cpu"),
    }[kind]()
    before = Prefetcher(own, "cpu").state_dict()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    run = tried(model, own, optimizer, functional.cross_entropy)
    run.undo()
    after = Prefetcher(own, "cpu").state_dict()
    assert after["position"] is before["position"] is None
    assert after["has_run"] is before["has_run"] is False
    assert len(list(own)) == len(loader)
