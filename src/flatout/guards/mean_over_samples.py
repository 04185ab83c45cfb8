"""Assumption that the gradients of a batch are the weighted mean of the gradients of its parts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flatout.core import formatting
from flatout.core.batches import batch_size_of, resized
from flatout.guards.base import Guard
from flatout.training.equal_parts import STATEMENT, why_parts_differ

if TYPE_CHECKING:
    from flatout.training.job import Job


class MeanOverSamples(Guard):
    """Guard of batches that are computed in parts. The experiment compares parts of a batch with the whole batch."""

    name = "mean_over_samples"
    statement = STATEMENT

    def contradiction(self, job: Job) -> str:
        """Return how parts of the largest trial batch differ from the whole batch."""
        batch: Any = max(job.data.batches, key=batch_size_of, default=None)
        if job.spec.optimizer is None or batch is None or resized(batch, 1) is None:
            return ""  # no batch is computed in parts
        try:
            return why_parts_differ(job.stepper, batch, batch_size_of(batch))
        except Exception as error:  # the user's code may accept only one size
            return f"parts of a batch fail: {formatting.first_line(error)}"
