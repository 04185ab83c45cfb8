"""Check that the ranks of a distributed training are synchronized."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from flatout.core.dtensor import is_distributed
from flatout.core.process_group import group_size
from flatout.data.loaders import TORCHS_SAMPLERS

_WRAPPERS = ("torch.distributed.", "torch.nn.parallel.distributed")
"""Module prefixes of wrapper classes: DDP, FSDP, ``fully_shard`` and ``replicate``."""


def world_size() -> int:
    """Return the number of ranks: the process group's size, else torchrun's ``WORLD_SIZE``, else 1."""
    if dist.is_available() and dist.is_initialized():
        return group_size()
    size = os.environ.get("WORLD_SIZE", "1")
    return int(size) if size.isdecimal() else 1


def is_first_rank() -> bool:
    """Return True in rank 0 of the process group, else of torchrun's ``RANK``, and in a training of one process."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank() == 0
    return os.environ.get("RANK", "0") == "0"


def why_apart(modules: Sequence[nn.Module], optimizer: torch.optim.Optimizer | None, loader: Iterable[Any]) -> str:
    """Return a warning if nothing synchronizes the ranks' models; empty otherwise.

    Gradient hooks and hooks before the optimizer's step count as synchronization, because they may average gradients.
    A user's own loop counts, too, because it may synchronize anywhere.

    Args:
        modules: the modules that are trained.
        optimizer: updates ``modules``; None for a user's own loop and for inference.
        loader: yields this rank's batches.
    """
    ranks = world_size()
    if ranks < 2 or optimizer is None or _is_synchronized(modules, optimizer):
        return ""
    told = (
        f"model must be synchronized between {ranks} ranks, got one that each rank trains on its own. "
        "Wrap it: model = torch.nn.parallel.DistributedDataParallel(model)"
    )
    sampler = getattr(loader, "sampler", None)
    if isinstance(loader, DataLoader) and type(sampler) in TORCHS_SAMPLERS and type(sampler) is not DistributedSampler:
        told += ", and give each rank its own samples: DataLoader(..., sampler=DistributedSampler(dataset))"
    return told


def _is_synchronized(modules: Sequence[nn.Module], optimizer: torch.optim.Optimizer) -> bool:
    if optimizer._optimizer_step_pre_hooks:
        return True
    for module in (part for root in modules for part in root.modules()):
        if any(kind.__module__.startswith(_WRAPPERS) for kind in type(module).__mro__):
            return True
    parameters = (p for root in modules for p in root.parameters())
    return any(is_distributed(p) or p._backward_hooks or p._post_accumulate_grad_hooks for p in parameters)
