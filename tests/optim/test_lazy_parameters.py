"""Optimizers over lazy modules, whose parameters have no shape before the first batch."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import flatout.optim as fo
from tests.optim.rules import IN_TORCH, NAMES


def lazy_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.LazyLinear(4), nn.Tanh(), nn.LazyLinear(3))


@pytest.mark.parametrize("name", IN_TORCH)
def test_fuse_leaves_them_alone_until_they_are_initialized(name):
    model = lazy_model()
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.1)
    assert "lazy" in fo.why_not_fusable(optimizer)
    assert type(fo.fuse(optimizer)) is getattr(torch.optim, name)
    model(torch.ones(2, 5))
    assert fo.why_not_fusable(optimizer) is None
    assert type(fo.fuse(optimizer)) is getattr(fo, name)


@pytest.mark.parametrize("options", [{}, {"moment_dtype": torch.uint8}, {"ema_decay": 0.5}], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_they_train_once_they_are_initialized(name, options):
    lazy, eager = lazy_model(), lazy_model()
    batch = torch.ones(2, 5)
    optimizer = getattr(fo, name)(lazy.parameters(), lr=0.1, **options)
    optimizer.zero_grad()
    optimizer.step()
    assert not optimizer.state_dict()["state"]
    optimizer.load_state_dict(optimizer.state_dict())
    pickle.loads(pickle.dumps(optimizer))
    copy.deepcopy(optimizer).step()
    optimizer.add_param_group({"params": [nn.UninitializedParameter()], "lr": 0.2})
    eager(batch), lazy(batch)
    eager.load_state_dict(lazy.state_dict())
    expected = getattr(fo, name)(eager.parameters(), lr=0.1, **options)
    for model, stepped in ((lazy, optimizer), (eager, expected)):
        model(batch).square().sum().backward()
        stepped.step()
    for p, q in zip(lazy.parameters(), eager.parameters(), strict=True):
        assert torch.equal(p, q)
