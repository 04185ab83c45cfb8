"""Assumption that the order of samples does not depend on the training."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from flatout.data.feedback import why_not_ahead
from flatout.guards.base import Guard

if TYPE_CHECKING:
    from flatout.training.job import Job


class OrderFixed(Guard):
    """The next indices do not depend on the training.

    Samplers of torch draw them from generators only. For a sampler of the user, its code is searched for values that
    training may change. Such a sampler is asked for the next batch when the step needs this batch, and not before.
    """

    name: ClassVar[str] = "order_fixed"
    statement: ClassVar[str] = "the next indices do not depend on the training"

    def contradiction(self, job: Job) -> str:
        """Return the value that the sampler may read when it draws the next indices."""
        return why_not_ahead(job.data.loader)
