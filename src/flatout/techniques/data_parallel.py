"""Data-parallel training on several ranks, in place."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from flatout.core.instance_class import class_change, instance_class
from flatout.distributed.gradient_sync import GradientSync
from flatout.distributed.step_clock import StepClock
from flatout.techniques.base import NotApplicable, Rule
from flatout.techniques.candidate import Candidate

if TYPE_CHECKING:
    from flatout.training.job import Job


class Replicas(Candidate):
    """Candidate that lets the calls of one model instance, and the stepper, average gradients over all ranks."""

    def __init__(self, job: Job) -> None:
        self.label = self.value = f"{job.spec.ranks.size} ranks"
        self._model = weakref.ref(job.spec.model)
        self._job = weakref.ref(job)
        self._revert: Callable[[], None] | None = None
        self._sync: weakref.ref[GradientSync] | None = None

    def _turn_on(self) -> None:
        job, model = self._job(), self._model()
        if job is None or model is None:
            return
        # This call detects a failed rank. DDP's collectives would wait for such a rank.
        job.stepper.times.begin(job.spec.ranks, job.spec.device)
        job.stepper.sync = sync = GradientSync(job.spec.modules, job.spec.ranks, StepClock(job.spec.device))
        job.objective.plain = sync.alone
        self._sync = weakref.ref(sync)
        if not isinstance(model, torch.jit.ScriptModule):
            self._revert = class_change([(model, partial(_synchronized_class, sync=sync))])()

    def _turn_off(self) -> None:
        job = self._job()
        sync = None if self._sync is None else self._sync()
        if sync is not None:
            sync.remove()
        if self._revert is not None:
            self._revert()
        if job is not None:
            job.stepper.sync, job.objective.plain = None, nullcontext
            job.stepper.times.clear()


def _synchronized_class(base: type[nn.Module], sync: GradientSync) -> type[nn.Module]:
    """Return a subclass of ``base`` whose training calls average their gradients. Copies and pickles are plain."""

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        call = super(synchronized, self).__call__
        return sync.run(call, *args, **kwargs) if torch.is_grad_enabled() else call(*args, **kwargs)

    def no_sync(self: Any) -> AbstractContextManager[None]:
        return sync.no_sync()

    synchronized = instance_class(base, __call__=__call__, no_sync=no_sync)
    return synchronized


class DataParallel(Rule):
    """Trains the model on several devices: each rank computes a slice of every batch, and gradients are averaged.

    Started by ``torchrun``, ``optimize`` makes the process group, and puts the model into a hidden
    ``DistributedDataParallel``. The model stays the same object, with the same ``state_dict`` keys.

    When it helps: a step takes long compared with the transfer of all gradients. When it hurts: small models, whose
    steps wait for the network. BatchNorm normalizes each rank's slice by itself, and dropout draws other numbers on
    each rank.

    Sources: https://docs.pytorch.org/docs/stable/notes/ddp.html; Li et al., 2020 (arXiv:2006.15704) for "near-linear".
    """

    name = "data_parallel"
    title = "data parallel"
    expected = "near-linear to 256 GPUs"
    rationale = "each rank computes its slice of every batch, and gradients are averaged during the backward"
    effect = "rounding"

    def check(self, job: Job) -> None:
        """Require several ranks that train a plain model together."""
        if job.spec.ranks.size == 1:
            raise NotApplicable("this is one process; torchrun --nproc-per-node=gpu train.py starts one for each GPU")
        if job.spec.is_recorded:
            raise NotApplicable("the script averages its gradients itself")

    def candidate(self, job: Job) -> Candidate:
        """Return the candidate, which broadcasts the weights of rank 0 when it is turned on."""
        return Replicas(job)
