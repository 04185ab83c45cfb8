"""Assumption that the dataset gives the same sample for the same index in every epoch."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from flatout.core.effects import Unrepeatable
from flatout.data.in_memory_loader import why_not_in_memory
from flatout.guards.base import Guard

if TYPE_CHECKING:
    from flatout.training.job import Job


class SamplesFixed(Guard):
    """Samples do not change, and making one changes nothing.

    The experiment makes some samples twice. Later changes are seen by the loader in memory (``data/watch.py``). Tensors
    that are gathered in place need no experiment.
    """

    name: ClassVar[str] = "samples_fixed"
    statement: ClassVar[str] = "samples do not change"

    def contradiction(self, job: Job) -> str:
        """Return the evidence that samples made twice differ although no generator has moved."""
        if why_not_in_memory(job.data.loader) is None:
            return ""
        try:
            random = job.data.randomness
        except Unrepeatable as reason:
            return str(reason)
        except Exception:  # of a dataset that only worker processes can read
            return ""
        if random is not None and not random.is_drawn:
            return random.reason
        return job.data.changed_by_reading
