"""Guard of an assumption: its statement, and the experiment that may contradict it before a technique is kept.

A technique lists its guards in ``assumes``. The tuner asks each guard before a trial, and before a forced technique is
turned on. Training may still contradict an assumption later. The part of the technique that runs in training then
watches for this, reverts the technique before a wrong batch or step is used, and calls ``guard.broken``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

from flatout.core.breaks import Breaks

if TYPE_CHECKING:
    from flatout.training.job import Job


class Guard(ABC):
    """Guard of one assumption.

    Attributes:
        name: key in reports, plans and tests.
        statement: the assumption as a clause that follows "it assumes that".
        is_observed: True if ``contradiction`` only reads what the steps so far have shown. The tuner then asks again
            after more steps.
    """

    name: ClassVar[str]
    statement: ClassVar[str]
    is_observed: ClassVar[bool] = False

    @abstractmethod
    def contradiction(self, job: Job) -> str:
        """Return what contradicts the assumption for this job, as a clause; empty if nothing does.

        The caller restores all changes that the experiment makes.
        """

    @classmethod
    def reason(cls, seen: str) -> str:
        """Return the reason why a technique is refused, for its row and for errors."""
        return f"it assumes that {cls.statement}, but {seen}"

    @classmethod
    def broken(cls, breaks: Breaks, technique: str, seen: str) -> None:
        """Record that training has contradicted the assumption of a technique that was kept."""
        breaks.add(technique, cls.name, cls.statement, seen)
