"""Assumption that no gradient is differentiated again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flatout.guards.base import Guard

if TYPE_CHECKING:
    from flatout.training.job import Job


class FirstOrder(Guard):
    """Guard of compiled code, which torch can differentiate once. Training watches each backward."""

    name = "first_order"
    statement = "no gradient is differentiated again"

    def contradiction(self, job: Job) -> str:
        """Return nothing, because modules that are differentiated twice in the recorded updates are not tuned."""
        return ""
