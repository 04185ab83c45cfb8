"""1: batches cross to the GPU from pinned memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flatout.techniques.base import NotApplicable, Rule

if TYPE_CHECKING:
    from flatout.job import Job


class PinnedMemory(Rule):
    """A ring of pinned buffers, reused for every batch; the DataLoader's own pin thread stays off.

    When it helps: only a copy from pinned memory overlaps with compute. When it hurts: pinning afresh for every
    batch (``pin_memory()`` per tensor) can cost more than it saves, hence the ring.
    """

    name = "pinned_memory"
    number = 1
    title = "pinned memory"
    expected = "10–20 %"
    kept_because = "batches are copied to the GPU from a reused ring of pinned buffers, beside the running step"
    exact = True

    def check(self, job: Job) -> None:
        """Only a GPU is reached through pinned memory."""
        if job.device.type != "cuda":
            raise NotApplicable("training runs on the CPU: batches are where they are needed already")
