"""Additional technique: GPU memory that does not fragment when shapes vary."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from flatout.techniques.base import Advice, NotApplicable

if TYPE_CHECKING:
    from flatout.report.model import Pace
    from flatout.training.job import Job

SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Environment variables with the allocator's settings, newer name first. torch reads them when CUDA starts."""


class Allocator(Advice):
    """Says when a setting against fragmented GPU memory (expandable segments) is worth asking for. It asks for none.

    torch's allocator takes memory from the driver in segments of fixed size. The gaps that batches of one shape leave
    in a segment are often too small for the next shape. Expandable segments grow instead.

    When it helps: batches of varying shape close to the GPU's memory. NVIDIA NeMo #9061 found memory released and
    allocated again for every batch, about 30 % of the time. cp2k #5672 measured 28 % less memory at the same speed.
    When it hurts: custom allocators do not support the setting (pytorch #147851).

    Why advice: torch reads the setting once, when CUDA starts, which is before ``optimize``. A private function of
    torch can change it later, but not for memory that is allocated, and the change cannot be reverted. Fragmentation
    also builds up over thousands of steps, which a trial of seconds does not show.

    Source: PyTorch's notes on CUDA semantics, "Optimizing memory usage with PYTORCH_ALLOC_CONF"; pytorch #96995.
    """

    name = "allocator"
    title = "allocator settings"
    expected = "up to 30 %"

    def check(self, job: Job) -> None:
        """Require training on CUDA, with torch's own allocator and without the setting."""
        if job.spec.device.type != "cuda":
            raise NotApplicable("training runs on the CPU, whose memory the operating system keeps from fragmenting")
        if torch.cuda.get_allocator_backend() != "native":
            raise NotApplicable(f"GPU memory comes from {torch.cuda.get_allocator_backend()}, not torch's allocator")
        if any("expandable_segments" in os.environ.get(name, "") for name in SETTINGS):
            raise NotApplicable(f"{' or '.join(SETTINGS)} says already whether segments expand")

    def findings(self, job: Job, pace: Pace, seconds: float) -> Sequence[str]:
        """Return the findings on the shapes of the trial's batches and the allocator's retries so far."""
        seen = []
        if job.data.varies:
            seen.append("batches come in several shapes")
        retries = torch.cuda.memory_stats(job.spec.device).get("num_alloc_retries", 0)
        if retries:
            seen.append(f"the allocator ran out of fitting memory and started over {retries} times while measuring")
        if not seen:
            raise NotApplicable("batches come in one shape, and every step fits into the memory of the one before")
        return [
            f"{' and '.join(seen)}: GPU memory may fragment until what is free is in pieces too small to use",
            f"What to do: start Python with {SETTINGS[0]}=expandable_segments:True in its environment",
        ]
