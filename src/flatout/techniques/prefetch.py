"""8: the next batches are on their way while the current step runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flatout.techniques.base import NotApplicable, Rule

if TYPE_CHECKING:
    from flatout.training.job import Job


class Prefetch(Rule):
    """Copies the next two batches to the device while the step works on this one.

    When it helps: the copy hides behind the step. When it hurts: every batch ahead holds device memory.
    """

    name = "prefetch"
    number = 8
    title = "prefetch to the device"
    expected = "10–20 %"
    rationale = "the next two batches are copied to the device while the step works on this one"
    exact = True

    def check(self, job: Job) -> None:
        """Only a copy to a GPU can be hidden; batches ahead in worker processes go with their number, in row 2."""
        if job.spec.device.type != "cuda":
            raise NotApplicable("training runs on the CPU: no copy to hide; how far workers load ahead is for row 2")
