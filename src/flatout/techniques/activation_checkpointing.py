"""Additional technique: activation checkpointing."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from flatout.core.instance_class import class_change, instance_class
from flatout.techniques.base import NotApplicable, StepTechnique
from flatout.techniques.candidate import Candidate, ChangeCandidate

if TYPE_CHECKING:
    from flatout.training.job import Job


def checkpoint_candidate(blocks: Sequence[nn.Module]) -> Candidate:
    """Return the candidate that lets a model's blocks keep only their inputs and repeat the forward in the backward."""
    return ChangeCandidate("blocks", True, class_change((block, _checkpointed_class) for block in blocks))


def _checkpointed_class(base: type[nn.Module]) -> type[nn.Module]:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return base.forward(self, *args, **kwargs)
        try:
            return checkpoint(base.forward, self, *args, use_reentrant=False, **kwargs)
        except BaseException as error:
            _pop_hooks(error)
            raise

    return instance_class(base, forward=forward)


def _pop_hooks(error: BaseException) -> None:
    """Remove the hooks on saved tensors that ``checkpoint`` has pushed in a forward that failed.

    In torch 2.11, the hooks stay as long as the error keeps the frame of ``checkpoint`` alive, for example in a
    notebook. They would break the backward of any other model.
    """
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_filename == torch.utils.checkpoint.__file__:
            frame.clear()


class ActivationCheckpointing(StepTechnique):
    """Keeps the inputs of the model's repeated blocks alone, and computes the blocks again in the backward.

    When it helps: activations fill the memory, so that batches do not fit, or are computed in small parts. The
    technique is kept on request, if batches do not fit otherwise, or if it makes room for larger, faster parts. When it
    hurts: the forward of each block runs twice, a third more compute. Random numbers are the same in both runs. A
    BatchNorm would count each batch twice, so blocks with a BatchNorm are left alone.

    Sources: Chen et al., 2016 (arXiv:1604.06174); https://docs.pytorch.org/docs/stable/checkpoint.html.
    """

    name = "activation_checkpointing"
    title = "activation checkpointing"
    expected = "a third more compute, less memory"
    rationale = "blocks keep their inputs alone, and the memory that this frees holds more samples"
    goal = "memory"

    def check(self, job: Job) -> None:
        """Require training steps of a model with repeated blocks."""
        if job.why_no_step:
            raise NotApplicable(f"{job.why_no_step}: memory is only measured for run.step")
        if not _repeated_blocks(job.spec.model):
            raise NotApplicable("the model has no repeated blocks without a BatchNorm")

    def candidates(self, job: Job) -> Sequence[Candidate]:
        """Return the candidate for all repeated blocks."""
        return [checkpoint_candidate(_repeated_blocks(job.spec.model))]


def _repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the siblings of one class that hold the most parameters; empty if no siblings are blocks of modules."""
    largest: list[nn.Module] = []
    for parent in model.modules():
        by_class: dict[type[nn.Module], list[nn.Module]] = {}
        for child in parent.children():
            if _is_block(child):
                by_class.setdefault(type(child), []).append(child)
        siblings = [blocks for blocks in by_class.values() if len(blocks) > 1]
        largest = max([largest, *siblings], key=_parameters)
    return largest


def _is_block(module: nn.Module) -> bool:
    """Return True for a module of several modules whose forward may run twice."""
    parts = list(module.modules())
    return (
        len(parts) > 2
        and "forward" not in vars(module)
        and not any(isinstance(part, (nn.modules.batchnorm._BatchNorm, torch.jit.ScriptModule)) for part in parts)
    )


def _parameters(blocks: Sequence[nn.Module]) -> int:
    return sum(p.numel() for block in blocks for p in block.parameters())
