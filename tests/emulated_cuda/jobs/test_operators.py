"""Operators of torch on the emulated devices: results that the host reads, and results with unusual shapes."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from tests.emulated_cuda.record import needs_emulated_devices

pytestmark = needs_emulated_devices


def test_equality_waits_for_values() -> None:
    tensor = torch.zeros(3, device="cuda")
    copy = tensor.clone()
    assert torch.equal(tensor, copy)
    copy[1] = 1
    assert not torch.equal(tensor, copy)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_of_embeddings_have_gradients(mode: str) -> None:
    ids = torch.randint(7, (4, 5), generator=torch.Generator().manual_seed(0))
    results = []
    for device in ("cpu", "cuda"):
        weight = torch.linspace(-1, 1, 21).view(7, 3).to(device).requires_grad_()
        bags = functional.embedding_bag(ids.to(device), weight, mode=mode)
        bags.square().sum().backward()
        assert weight.grad is not None
        results.append((bags.detach().cpu(), weight.grad.cpu()))
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)


def test_a_batch_norm_in_eval_mode_has_gradients() -> None:
    results = []
    for device in ("cpu", "cuda"):
        norm = torch.nn.BatchNorm1d(3).eval().to(device)
        x = torch.linspace(-1, 1, 12).view(4, 3).to(device).requires_grad_()
        norm(x).square().sum().backward()
        assert x.grad is not None
        results.append(x.grad.cpu())
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)
