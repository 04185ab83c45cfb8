"""reproducible() on a GPU: bit-equal runs, and an error if cuBLAS has already started."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

import flatout
from flatout.core.reproducible import CUBLAS
from tests.helpers import bits


def trained() -> list[bytes]:
    """Train convolutions, attention and an embedding. By default, their gradients are sums in random order."""
    with flatout.reproducible(3):
        conv = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Flatten(2)).cuda()
        embed, mix = nn.Embedding(50, 32).cuda(), nn.Linear(32, 32).cuda()
        parameters = [*conv.parameters(), *embed.parameters(), *mix.parameters()]
        optimizer = torch.optim.SGD(parameters, 0.1)
        seen = []
        for _ in range(5):
            pictures, words = torch.randn(8, 3, 16, 16, device="cuda"), torch.randint(50, (8, 256), device="cuda")
            keys = conv(pictures).transpose(1, 2)
            mixed = functional.scaled_dot_product_attention(mix(keys)[:, None], keys[:, None], embed(words)[:, None])
            loss = functional.dropout(mixed, 0.1).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen.append(bits(loss))
        return [*seen, *map(bits, parameters)]


def run_fresh(script: str) -> None:
    """Run a script in a process in which cuBLAS has not started."""
    environment = {name: value for name, value in os.environ.items() if name != CUBLAS}
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=root, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr


def test_training_on_a_gpu_repeats_bit_for_bit() -> None:
    run_fresh("from tests.gpu.test_reproducible import trained; assert trained() == trained()")


def test_cuda_generators_come_back() -> None:
    torch.rand(1, device="cuda")
    state = torch.cuda.get_rng_state()
    with flatout.reproducible(1, warn_only=True):
        first = torch.rand(4, device="cuda")
    assert torch.equal(torch.cuda.get_rng_state(), state)
    with flatout.reproducible(1, warn_only=True):
        assert torch.equal(torch.rand(4, device="cuda"), first)


def test_too_late_for_cublas_is_an_error_or_no_matter() -> None:
    """torch requires the variable before the first product, or no longer needs it. No version ignores it silently."""
    run_fresh(
        """
import torch, flatout
torch.ones(2, 2, device="cuda") @ torch.ones(2, 2, device="cuda")
try:
    flatout.reproducible(0)
except RuntimeError as error:
    assert "CUBLAS_WORKSPACE_CONFIG" in str(error), error
    assert not torch.are_deterministic_algorithms_enabled()
else:
    torch.ones(2, 2, device="cuda") @ torch.ones(2, 2, device="cuda")
"""
    )
