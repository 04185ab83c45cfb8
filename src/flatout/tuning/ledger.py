"""Ledger: the record of all decisions about techniques."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from flatout.report.model import Row
from flatout.techniques import Candidate

Ground = Literal["rule", "choice", "trial"]
"""Ground of a decision: a rule, a choice of the user or of a plan, or a trial of this start or an earlier one."""


@dataclass(frozen=True)
class Decision:
    """Decision about a technique.

    Attributes:
        row: the technique's line in the report.
        ground: ground on which a technique is kept; None if it is not kept.
        value: the value for which ``techniques={name: value}`` repeats the decision. A plan stores this value.
        candidate: the candidate to turn on; None for a loader, and for a rule that is built into ``Run``.
        is_open: True if the budget or the noise left the technique without a decision.
    """

    row: Row
    ground: Ground | None = None
    value: Any = None
    candidate: Candidate | None = None
    is_open: bool = False

    @property
    def technique(self) -> str:
        """Name of the technique."""
        return self.row.technique


@dataclass
class Ledger:
    """Decisions in chronological order.

    A technique may be decided again after others. The latest decision that keeps a technique counts, or else the latest
    decision about it.
    """

    _decisions: list[Decision] = field(default_factory=list)

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """All decisions, for a later ``reset``."""
        return tuple(self._decisions)

    def add(self, decision: Decision) -> Row:
        """Record a decision and return the technique's row."""
        self._decisions.append(decision)
        return self.row(decision.technique)

    def amend(self, row: Row) -> None:
        """Replace the row of a technique, in the decision that counts."""
        counting = self._counting[row.technique]
        self._decisions = [replace(d, row=row) if d is counting else d for d in self._decisions]

    def is_kept(self, technique: str) -> bool:
        """Return True if the technique is kept."""
        decision = self._counting.get(technique)
        return decision is not None and decision.ground is not None

    def row(self, technique: str) -> Row:
        """Return the technique's row."""
        return self._counting[technique].row

    @property
    def rows(self) -> list[Row]:
        """One row for each technique."""
        return [decision.row for decision in self._counting.values()]

    @property
    def values(self) -> dict[str, Any]:
        """Value of each technique that a choice or a trial keeps: the decisions of a plan."""
        return {d.technique: d.value for d in self._decisions if d.ground in ("choice", "trial")}

    @property
    def rules(self) -> dict[str, Candidate]:
        """Candidates of rules, by technique, in the order in which they were turned on."""
        return {d.technique: d.candidate for d in self._decisions if d.ground == "rule" and d.candidate is not None}

    @property
    def candidates(self) -> list[Candidate]:
        """Candidates that choices and trials keep, in the order in which they were turned on."""
        return [d.candidate for d in self._decisions if d.ground in ("choice", "trial") and d.candidate is not None]

    @property
    def undecided(self) -> list[str]:
        """Names of techniques without a decision. The next start spends its budget on them."""
        return [name for name, decision in self._counting.items() if decision.is_open]

    @property
    def won(self) -> list[Decision]:
        """Decisions of trials that keep a technique."""
        return [d for d in self._decisions if d.ground == "trial"]

    def revert(self, decisions: Sequence[Decision], rejected: Callable[[Row], Row]) -> None:
        """Replace decisions of trials that keep a technique with rejections.

        Args:
            decisions: decisions of this ledger.
            rejected: returns the row of a technique that is no longer kept.
        """
        self._decisions = [d for d in self._decisions if all(d is not reverted for reverted in decisions)]
        for row in {d.technique: d.row for d in decisions}.values():
            if not self.is_kept(row.technique):
                self.add(Decision(rejected(row)))

    def reset(self, decisions: Sequence[Decision]) -> None:
        """Return to earlier ``decisions``."""
        self._decisions = list(decisions)

    @property
    def _counting(self) -> dict[str, Decision]:
        """The decision that counts, by technique."""
        counting: dict[str, Decision] = {}
        for decision in self._decisions:
            name = decision.row.technique
            earlier = counting.get(name)
            if earlier is None or earlier.ground is None or decision.ground is not None:
                counting[name] = decision
        return counting
