"""Technique 10 of the checklist: mixed precision."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from flatout.core.instance_class import class_change
from flatout.techniques.base import Effect, NotApplicable, StepTechnique
from flatout.techniques.calls import comes_compiled
from flatout.techniques.candidate import Candidate, ChangeCandidate
from flatout.training.autocast import autocast_class

if TYPE_CHECKING:
    from flatout.training.job import Job

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast_candidate(model: nn.Module, device_type: str, label: str) -> Candidate:
    """Return the candidate that gives one model instance a class whose forward runs under autocast."""
    make = partial(autocast_class, device_type=device_type, dtype=DTYPES[label])
    return ChangeCandidate(label, label, class_change([(model, make)]))


class Precision(StepTechnique):
    """Multiplies matrices in 16-bit numbers: bfloat16 where the hardware has it, else float16 with a loss scaler.

    When it helps: matrix units run 16-bit products two to sixteen times faster, and activations take half the memory.
    When it hurts: processors without 16-bit units emulate them, often at half the speed. Losses with a large range need
    float32, which autocast keeps for them. Parameters stay float32 throughout.

    On a GPU, dropout in 16 bits draws other masks of the same distribution. The numerics are compared with equal masks.

    The technique is also tried together with other attention kernels. On a Zen 5 CPU a small GPT in bf16 is
    0.7 times as fast as in float32 with torch's fused kernel. With plain products it is 1.5 times as fast.
    """

    name = "precision"
    number = 10
    title = "mixed precision"
    expected = "up to 2×"
    rationale = "matrices are multiplied in 16-bit numbers; losses match fp32 within tolerance"
    reseeds = "dropout can draw other masks of the same distribution"
    is_combinable = True
    recompiles = True
    changes_activations = True
    values = f"True, {', '.join(map(repr, DTYPES))}"
    optimistic_gain = 4.0
    companions = ("sdpa_backend",)

    def check(self, job: Job) -> None:
        """Require a float32 model that runs the forward of its class."""
        dtypes = {p.dtype for p in job.spec.model.parameters() if p.is_floating_point()}
        if dtypes != {torch.float32}:
            names = ", ".join(sorted(str(d).removeprefix("torch.") for d in dtypes))
            raise NotApplicable(f"the model's parameters are {names}, not float32 alone")
        if "forward" in vars(job.spec.model):
            raise NotApplicable("the model's forward was replaced on the instance; its class's is not what runs")
        if isinstance(job.spec.model, torch.jit.ScriptModule):
            raise NotApplicable("the model is a ScriptModule: its forward is compiled already")
        if getattr(type(job.spec.model).forward, "__script_unsupported", "").startswith("@autocast"):
            raise NotApplicable("the model's forward is decorated with autocast: it chooses its precision itself")

    def effect_on(self, job: Job) -> Effect:
        """Return "reseeded" if a step draws random numbers, because torch draws them in another way in 16 bits."""
        return "reseeded" if job.objective.draws else self.effect

    def candidates(self, job: Job) -> Sequence[Candidate]:
        """Return bf16, or fp16 on a GPU without bf16 units. fp16 requires ``run.step``, which has a loss scaler."""
        _check_own_autocast(job)
        if job.spec.device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
            if job.why_no_step:
                raise NotApplicable("this GPU has no bfloat16 units, and float16 needs run.step's loss scaler")
            return [autocast_candidate(job.spec.model, "cuda", "fp16")]
        return [autocast_candidate(job.spec.model, job.spec.device.type, "bf16")]

    def accepts(self, value: Any) -> bool:
        """Accept True, ``"bf16"`` or ``"fp16"``."""
        return value is True or (isinstance(value, str) and value in DTYPES)

    def check_value(self, job: Job, value: Any) -> None:
        """Reject fp16 without ``run.step``, because the user's own loop has no loss scaler."""
        super().check_value(job, value)
        if value == "fp16" and job.why_no_step:
            raise ValueError(f"precision='fp16' needs run.step's loss scaler: {job.why_no_step}")

    def candidate_of(self, job: Job, value: Any) -> Candidate:
        """Return the candidate for a dtype. True means the first candidate."""
        if value is True:
            return self.candidates(job)[0]
        _check_own_autocast(job)
        return autocast_candidate(job.spec.model, job.spec.device.type, value)

    def is_so(self, job: Job, value: Any) -> bool:
        """Return True if the model's parameters already have that dtype, or the loss runs the model in it."""
        dtypes = {p.dtype for p in job.spec.model.parameters() if p.is_floating_point()}
        own = _own_autocast(job)
        return own is not None if value is True else DTYPES[value] is own or dtypes == {DTYPES[value]}


def _check_own_autocast(job: Job) -> None:
    dtype = _own_autocast(job)
    if dtype is not None:
        name = str(dtype).removeprefix("torch.")
        raise NotApplicable(f"the loss runs the model under its own autocast of {name}, which takes precedence")


def _own_autocast(job: Job) -> torch.dtype | None:
    """Return the dtype of an autocast in which ``compute_loss`` calls the model; None without one.

    The function computes one loss.
    """
    if job.spec.compute_loss is None or not job.data.batches or comes_compiled(job.spec.model):
        return None
    device, seen = job.spec.device.type, []

    def note(*_: object) -> None:
        if torch.is_autocast_enabled(device):
            seen.append(torch.get_autocast_dtype(device))

    hook = job.spec.model.register_forward_pre_hook(note)
    try:
        (job.objective.infer if job.spec.inference else job.objective.loss)(job.data.batches[0])
    finally:
        hook.remove()
    return seen[0] if seen else None
