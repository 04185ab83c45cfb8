"""1: batches cross to the GPU from pinned memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flatout.techniques.base import NotApplicable, Rule

if TYPE_CHECKING:
    from flatout.training.job import Job


class PinnedMemory(Rule):
    """Copies batches to the GPU from memory that never moves (pinned), as copies beside a running step need it.

    When it helps: only a copy from pinned memory overlaps with compute. When it hurts: pinning afresh for every
    batch (``pin_memory()`` per tensor) can cost more than it saves, hence the ring.
    """

    name = "pinned_memory"
    number = 1
    title = "pinned memory"
    expected = "10–20 %"
    rationale = "batches are copied to the GPU beside the running step, from a few pinned buffers in turn"
    exact = True

    def check(self, job: Job) -> None:
        """Only a GPU is reached through pinned memory."""
        if job.spec.device.type != "cuda":
            raise NotApplicable("training runs on the CPU: batches are where they are needed already")
