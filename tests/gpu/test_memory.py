"""GPU with less memory than a step needs: steps are split into parts, and batch sizes are limited."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import flatout
from tests.emulated_cuda.record import EMULATED

SHRINK = 16 if EMULATED else 1
"""Divisor of sizes for emulated devices."""

WIDTH = 4096 // SHRINK
PLAIN = {name: False for name in ("compile", "precision", "tf32", "sdpa_backend", "cuda_graph", "workers", "in_memory")}


@contextmanager
def memory_for(extra: int) -> Iterator[None]:
    """Limit this process to ``extra`` more bytes of GPU memory inside the block."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    _, total = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + extra // SHRINK) / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()


def net() -> nn.Module:
    torch.manual_seed(0)
    layers = [layer for _ in range(8) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 10)).cuda()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)


def batch_of(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(samples, WIDTH, generator=generator), torch.arange(samples) % 10


def trained(extra: int | None, batch: Any, **settings: Any) -> tuple[flatout.Run, torch.Tensor]:
    model = net()
    settings = {"techniques": PLAIN, "budget": 0} | settings
    run = flatout.optimize(model, [batch], optimizer_of(model), functional.cross_entropy, **settings)
    run.step(batch)  # creates gradients and moments
    if extra is None:
        loss = run.step(batch)
    else:
        with memory_for(extra):
            loss = run.step(batch)
    return run, loss


def ooms() -> int:
    return torch.cuda.memory_stats()["num_ooms"]


@pytest.mark.parametrize("settings", [{}, {"techniques": PLAIN | {"precision": "bf16"}}], ids=["fp32", "bf16"])
def test_a_step_that_runs_out_of_memory_trains_alike(settings):
    batch = batch_of(16384)  # 256 MiB of float32 activations in each of 16 layers
    whole, expected = trained(None, batch, **settings)
    parameters = [p.detach().cpu() for p in whole.model.parameters()]
    assert whole.micro_batch is None
    whole.undo()
    del whole
    with pytest.warns(RuntimeWarning, match="ran out of memory"):
        run, loss = trained(3 << 29, batch, **settings)
    assert run.micro_batch is not None
    rounding = 2e-2 if settings else 1e-4
    torch.testing.assert_close(loss, expected, rtol=rounding, atol=rounding)
    for ours, theirs in zip(run.model.parameters(), parameters, strict=True):
        torch.testing.assert_close(ours.detach().cpu(), theirs, rtol=rounding, atol=rounding)
    run.undo()


def test_the_last_word_has_the_figures():
    model = net()
    run = flatout.optimize(
        model, [batch_of(64)], optimizer_of(model), functional.cross_entropy, techniques=PLAIN, budget=0
    )
    batch = [part.cuda() for part in batch_of(64)]
    run.step(batch)
    with memory_for(1 << 20), pytest.raises(torch.OutOfMemoryError, match="What would help"):
        run.step(batch)
    run.step(batch)
    run.undo()


def test_whole_batches_that_do_not_fit_are_in_parts_from_the_beginning():
    model, batch = net(), batch_of(16384)
    optimizer = optimizer_of(model)
    with memory_for(5 << 30):
        run = flatout.optimize(model, [batch], optimizer, functional.cross_entropy, techniques=PLAIN, budget=20)
        assert run.micro_batch is not None
        failed = ooms()
        run.step(batch)
        run.step(batch)
        assert ooms() == failed
    run.undo()


def test_the_fastest_batch_size_is_found_with_one_failure_at_the_most():
    dataset = TensorDataset(*batch_of(65536))
    model = net()
    optimizer = optimizer_of(model)
    with memory_for(3 << 30):
        failed = ooms()
        run = flatout.optimize(
            model,
            DataLoader(dataset, batch_size=16),
            optimizer,
            functional.cross_entropy,
            device="cuda",
            batch_size="auto",
            techniques=PLAIN,
            budget=40,
            expected_steps=10**6,
        )
        assert ooms() - failed <= 1
        samples = run.loader.batch_size
        assert samples > 64  # 16 samples leave an H200 underused
        failed = ooms()
        for _, batch in zip(range(3), run.loader, strict=False):
            run.step(batch)
        assert ooms() == failed
    run.undo()
