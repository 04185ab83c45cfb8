"""Assumption that samples do not change between two batches of an epoch."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from flatout.guards.base import Guard

if TYPE_CHECKING:
    from flatout.training.job import Job


class SamplesSteady(Guard):
    """Samples do not change during an epoch.

    Only training can contradict this. The watch over worker processes (``data/workers_watch.py``) sees the change.
    """

    name: ClassVar[str] = "samples_steady"
    statement: ClassVar[str] = "samples do not change during an epoch"

    def contradiction(self, job: Job) -> str:
        """Return no contradiction before the training."""
        return ""
