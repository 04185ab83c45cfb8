"""Assumption that a step changes nothing in Python."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flatout.guards.base import Guard

if TYPE_CHECKING:
    from flatout.training.job import Job


class PythonState(Guard):
    """Guard of steps whose Python code runs once, or only partly, because later steps repeat recorded operators."""

    name = "python_state"
    statement = "the step keeps nothing in Python"
    is_observed = True

    def contradiction(self, job: Job) -> str:
        """Return the attribute, container or variable that steps so far have changed."""
        changed = job.objective.python_state
        return f"forward or loss change {changed}" if changed else ""
