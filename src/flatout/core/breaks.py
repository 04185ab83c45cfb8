"""Assumptions of kept techniques that training has contradicted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from flatout.core.standard_error import say


@dataclass(frozen=True)
class Break:
    """Contradiction of an assumption during training, after which its technique is off.

    Attributes:
        technique: name in ``techniques={...}``.
        assumption: name of the assumption.
        reason: the assumption and what contradicted it, in one sentence.
    """

    technique: str
    assumption: str
    reason: str


class Breaks:
    """Contradictions that watches have seen, for the report and the plan.

    A watch reverts its technique first and calls ``add`` afterwards. Watches may keep this object, because it refers to
    no model.

    Attributes:
        found: the contradictions so far, one for each technique at most.
        forget: removes a technique's decision from the cached plan. None if no plan is cached.
    """

    def __init__(self) -> None:
        self.found: list[Break] = []
        self.forget: Callable[[str], object] | None = None

    def add(self, technique: str, assumption: str, statement: str, seen: str) -> None:
        """Record a contradiction, and write one line on stderr. A second one of the same technique is ignored.

        Args:
            technique: name in ``techniques={...}``.
            assumption: name of the assumption.
            statement: the assumption as a clause, such as "samples do not change".
            seen: what contradicted it, such as "attribute 'epoch' of a Graded has changed".
        """
        if any(known.technique == technique for known in self.found):
            return
        self.found.append(Break(technique, assumption, f"it assumes that {statement}, but {seen}"))
        say(f"{technique} is off from here on: {self.found[-1].reason}")
        if self.forget is not None:
            self.forget(technique)
