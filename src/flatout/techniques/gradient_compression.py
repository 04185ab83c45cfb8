"""Additional technique: gradients in 16 bits between the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from flatout.techniques.base import NotApplicable, StepTechnique
from flatout.techniques.candidate import Candidate
from flatout.techniques.reducer_options import check_reducer, reducer_candidate

if TYPE_CHECKING:
    from flatout.training.job import Job


class GradientCompression(StepTechnique):
    """Averages gradients over the ranks in bfloat16.

    When it helps: all-reduces of half the bytes, where the network is slower than the backward. When it hurts: each
    rank adds a rounding error of 0.2 % to each gradient. So many ranks fail the comparison with the uncompressed
    gradients, which allows the errors of float32. Gradients that are averaged after the backward stay in float32, as
    in steps of several parts.

    Source: https://docs.pytorch.org/docs/stable/ddp_comm_hooks.html.
    """

    name = "gradient_compression"
    title = "gradient compression"
    expected = "half the bytes"
    rationale = "gradients cross the network in 16-bit numbers; gradients and losses match within tolerance"
    values = "True, 'bf16'"
    keeps_cpu_time = False
    saves_communication = True

    def check(self, job: Job) -> None:
        """Require gradients in float32 that are not scaled, because trials could not compare scaled ones."""
        check_reducer(job)
        if job.stepper.scaler is not None:
            raise NotApplicable("gradients of float16 products are scaled, so that a trial cannot compare them")
        if any(p.dtype is not torch.float32 for p in job.spec.trained):
            raise NotApplicable("some gradients are no float32 numbers")

    def candidates(self, job: Job) -> Sequence[Candidate]:
        """Return the only candidate."""
        return [reducer_candidate(job, "bf16", "bf16", is_compressed=True)]

    def accepts(self, value: Any) -> bool:
        """Accept True or ``"bf16"``."""
        return value is True or (isinstance(value, str) and value == "bf16")
