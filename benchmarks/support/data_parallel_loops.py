"""Trainings of benchmarks/data_parallel.py, each as the library's documentation recommends.

Each function gets a model on the device, and the batches of all ranks together. flatout takes slices of these batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import flatout
from flatout.techniques import REGISTRY, Measured

Batch = tuple[Tensor, Tensor]
Step = Callable[[Batch], Tensor]
"""Function that trains on a batch of this rank, and returns the loss of this rank or of all ranks."""

LONG = 100_000
"""Expected number of steps of a long training."""


def flags_of(device: torch.device) -> dict[str, Any]:
    """Return the fastest flags of DDP for a model whose every parameter gets a gradient in every step."""
    flags: dict[str, Any] = {"gradient_as_bucket_view": True, "static_graph": True}
    if device.type == "cpu":
        flags["bucket_cap_mb"] = 25  # by default the first bucket has 1 MiB
    return flags


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)


def ddp(model: nn.Module, loader: Sequence[Batch]) -> Step:
    """Return a step of plain torch DDP."""
    device = loader[0][0].device
    wrapped = DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None, **flags_of(device))
    optimizer = optimizer_of(model)

    def step(batch: Batch) -> Tensor:
        loss = cross_entropy(wrapped(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def accelerated(model: nn.Module, loader: Sequence[Batch]) -> Step:
    """Return a step of Hugging Face accelerate."""
    from accelerate import Accelerator, DistributedDataParallelKwargs

    engine = Accelerator(
        cpu=loader[0][0].device.type == "cpu",
        mixed_precision="no",
        kwargs_handlers=[DistributedDataParallelKwargs(**flags_of(loader[0][0].device))],
    )
    return _by_engine(engine, *engine.prepare(model, optimizer_of(model)))


def fabric(model: nn.Module, loader: Sequence[Batch]) -> Step:
    """Return a step of Lightning Fabric."""
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import DDPStrategy

    engine = Fabric(
        accelerator=loader[0][0].device.type,
        devices=dist.get_world_size(),
        strategy=DDPStrategy(**flags_of(loader[0][0].device)),
        precision="32-true",
    )
    engine.launch()
    return _by_engine(engine, *engine.setup(model, optimizer_of(model)))


def _by_engine(engine: Any, model: Any, optimizer: Any) -> Step:
    """Return the step that both libraries recommend."""

    def step(batch: Batch) -> Tensor:
        loss = cross_entropy(model(batch[0]), batch[1])
        engine.backward(loss)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def untuned(model: nn.Module, loader: Sequence[Batch]) -> Step:
    """Return a step of flatout with every measured technique off, so that only its data-parallel path differs."""
    techniques = {t.name: False for t in REGISTRY if isinstance(t, Measured)}
    return _run(model, loader, plan=None, budget=0, techniques=techniques).step


def tuned(model: nn.Module, loader: Sequence[Batch], plan: Path, budget: float) -> Step:
    """Return a step of flatout with the techniques of a plan, which the first process group makes and saves."""
    if plan.exists():
        return _run(model, loader, plan=plan).step
    run = _run(model, loader, plan=None, budget=budget, expected_steps=LONG)  # all ranks have read the folder by now
    if dist.get_rank() == 0:
        run.plan.save(plan)
    return run.step


def _run(model: nn.Module, loader: Sequence[Batch], **options: Any) -> flatout.Run:
    return flatout.optimize(model, loader, optimizer_of(model), cross_entropy, parallel="ddp", **options)
