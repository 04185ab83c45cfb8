"""Models with their own synchronization of ranks, trained with and without ``optimize``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import flatout
from tests.ranks import on_ranks
from tests.reasons import reasons


def model_of(kind: str) -> nn.Module:
    """Return a model that is synchronized by DDP, by ``fully_shard``, or by hooks."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(7, 5), nn.LayerNorm(5), nn.ReLU(), nn.Linear(5, 3))
    if kind == "ddp":
        return DistributedDataParallel(model)
    if kind == "hooks":
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(_average)
        return model
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (model[0], model[1], model[3]):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _average(parameter: Tensor) -> None:
    assert parameter.grad is not None
    dist.all_reduce(parameter.grad)
    parameter.grad /= dist.get_world_size()


def loader() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(4)
    dataset = TensorDataset(torch.randn(48, 7, generator=generator), torch.arange(48) % 3)
    return DataLoader(dataset, batch_size=4, sampler=DistributedSampler(dataset, shuffle=False))


@pytest.mark.parametrize("kind", ["ddp", "fully_shard", "hooks"])
@on_ranks("pair")
def test_a_synchronized_model_trains_as_without_flatout(kind: str) -> None:
    """A budget must not lead to different numbers of steps on the ranks, which would then deadlock."""
    plain = model_of(kind)
    optimizer, expected = torch.optim.AdamW(plain.parameters(), lr=0.01), []
    for x, y in loader():
        optimizer.zero_grad()
        loss = cross_entropy(plain(x), y)
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    model = model_of(kind)
    run = flatout.optimize(
        model,
        loader(),
        torch.optim.AdamW(model.parameters(), lr=0.01),
        cross_entropy,
        device="cpu",
        plan=None,
        budget=3.0,
        expected_steps=100_000,
    )
    losses = [run.step(batch).item() for batch in run.loader]
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected))
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.detach(), theirs.detach())
    assert any("comes-synchronized" in reasons(note) for note in run.report.summary.notes)
    run.undo()
