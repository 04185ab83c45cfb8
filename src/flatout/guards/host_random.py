"""Assumption that a step draws no random numbers from Python or NumPy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flatout.guards.base import Guard

if TYPE_CHECKING:
    from flatout.training.job import Job


class HostRandom(Guard):
    """Guard of steps that are recorded once. A recorded step repeats the numbers that Python and NumPy drew then."""

    name = "host_random"
    statement = "the step draws random numbers from torch's generators only"
    is_observed = True

    def contradiction(self, job: Job) -> str:
        """Return the generator that the first step moved."""
        drawn = job.objective.draws_on_host
        return f"forward or loss draw from {drawn}" if drawn else ""
