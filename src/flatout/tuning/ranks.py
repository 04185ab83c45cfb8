"""Ranks of a distributed training, the synchronization of their models, and decisions that are equal on all ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from flatout.core.dtensor import is_distributed
from flatout.data.loaders import TORCHS_SAMPLERS
from flatout.distributed import process_group
from flatout.distributed.agreement import ALONE, Agreement, GroupAgreement, RankFailure
from flatout.distributed.process_group import group_size
from flatout.techniques import Candidate, LoaderCandidate, NotApplicable

_WRAPPERS = ("torch.distributed.", "torch.nn.parallel.distributed")
"""Module prefixes of wrapper classes: DDP, FSDP, ``fully_shard`` and ``replicate``."""


def world_size() -> int:
    """Return the number of ranks: the process group's size, else torchrun's ``WORLD_SIZE``, else 1."""
    if dist.is_available() and dist.is_initialized():
        return group_size()
    size = os.environ.get("WORLD_SIZE", "1")
    return int(size) if size.isdecimal() else 1


def is_first_rank() -> bool:
    """Return True in rank 0 of the process group, or else of torchrun's ``RANK``. A single process is rank 0."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank() == 0
    return os.environ.get("RANK", "0") == "0"


CandidateT = TypeVar("CandidateT", Candidate, LoaderCandidate)

PARALLEL = ("auto", "ddp", "none")
"""Values of the argument ``parallel``."""


def parallel_of(
    parallel: str, modules: Sequence[nn.Module], *, trains: bool = True
) -> tuple[Agreement, torch.device | None]:
    """Return the agreement with the ranks that train the same model, and the device of this rank.

    With several ranks, the model becomes data-parallel. The device is None if user or launcher choose it. Under
    ``torchrun``, a process group is made if there is none.

    Args:
        parallel: argument of ``optimize``.
        modules: the modules that are trained.
        trains: False for inference. The ranks do not work together then.

    Raises:
        ValueError: ``parallel`` is ``"ddp"``, but there is only one process, nothing is trained, or the model is
            distributed already.
    """
    has_group = dist.is_available() and dist.is_initialized()
    is_wrapped = any(map(comes_wrapped, modules))
    if parallel == "ddp" and is_wrapped:
        raise ValueError(
            "parallel='ddp' requires a plain model, got one that is distributed already. Leave parallel out"
        )
    if parallel == "ddp" and not trains:
        raise ValueError("parallel='ddp' requires a training, got a model in eval mode without an optimizer")
    if parallel == "none" or not trains:
        return ALONE, None
    if not has_group and not process_group.is_launched():
        if parallel == "ddp":
            raise ValueError(
                "parallel='ddp' requires one process per device, got a single process. "
                "Start the script with: torchrun --nproc-per-node=gpu train.py"
            )
        return ALONE, None
    device = None
    if not has_group or process_group.is_joined():
        device = process_group.local_device()
        process_group.join(device)
    elif parallel != "ddp":
        return ALONE, None
    if group_size() < 2 or is_wrapped:
        return ALONE, device
    return GroupAgreement(process_group.control_group()), device


def why_apart(modules: Sequence[nn.Module], optimizer: torch.optim.Optimizer | None, loader: Iterable[Any]) -> str:
    """Return a warning if nothing synchronizes the ranks' models; empty otherwise.

    Gradient hooks and hooks before the optimizer's step count as synchronization, because they may average gradients.
    A user's own loop also counts as synchronization, because the loop may synchronize anywhere.

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
        "Pass parallel='ddp' to optimize(), or wrap it: model = torch.nn.parallel.DistributedDataParallel(model)"
    )
    sampler = getattr(loader, "sampler", None)
    if isinstance(loader, DataLoader) and type(sampler) in TORCHS_SAMPLERS and type(sampler) is not DistributedSampler:
        told += ", and give each rank its own samples: DataLoader(..., sampler=DistributedSampler(dataset))"
    return told


def why_not_measured(modules: Sequence[nn.Module], optimizer: torch.optim.Optimizer | None) -> str:
    """Return the reason against trials on a rank that trains alone; empty if the rank may run trials.

    Each step of a model with its own synchronization waits for the same step of all ranks. Trials would run different
    steps on each rank.

    Args:
        modules: the modules that are trained.
        optimizer: updates ``modules``; None for a user's own loop and for inference.
    """
    waits = any(map(comes_wrapped, modules)) or (optimizer is not None and _is_synchronized(modules, optimizer))
    if group_size() < 2 or not waits:
        return ""
    return (
        "nothing is measured: the model comes with its own synchronization of ranks, for which all must take the same "
        "steps. Give optimize() the plain model with parallel='ddp', and all ranks are tuned together"
    )


def _is_synchronized(modules: Sequence[nn.Module], optimizer: torch.optim.Optimizer) -> bool:
    if optimizer._optimizer_step_pre_hooks:
        return True
    if any(map(comes_wrapped, modules)):
        return True
    parameters = (p for root in modules for p in root.parameters())
    return any(p._backward_hooks or p._post_accumulate_grad_hooks for p in parameters)


def comes_wrapped(root: nn.Module) -> bool:
    """Return True for DDP, FSDP and ``fully_shard``, of the module or of a part, and for distributed parameters."""
    kinds = (kind for module in root.modules() for kind in type(module).__mro__)
    return any(kind.__module__.startswith(_WRAPPERS) for kind in kinds) or any(map(is_distributed, root.parameters()))


@contextmanager
def applies_on_all(ranks: Agreement) -> Iterator[None]:
    """Run a block that fails if a technique does not apply, and let it fail on all ranks together.

    Raises:
        NotApplicable: the block failed on some of the ranks.
    """
    try:
        with ranks.attempt():
            yield
    except RankFailure as failure:
        raise NotApplicable(str(failure)) from failure


def same_candidates(ranks: Agreement, find: Callable[[], Sequence[CandidateT]]) -> Sequence[CandidateT]:
    """Return the candidates that ``find`` returns on every rank.

    Raises:
        NotApplicable: the candidates differ, or ``find`` failed on some of the ranks.
    """
    with applies_on_all(ranks):
        found = find()
    labels = ranks.every([candidate.label for candidate in found])
    if any(other != labels[0] for other in labels):
        shown = "; ".join(f"rank {rank}: {', '.join(each) or 'none'}" for rank, each in enumerate(labels))
        raise NotApplicable(f"ranks have different candidates ({shown})")
    return found


def failure_of(ranks: Agreement, candidate: Candidate) -> str:
    """Return the reason why a candidate stopped working on a rank; empty while it works on all ranks."""
    return next(filter(None, ranks.every(candidate.failure)), "")
