"""Goals of figures, with the values that were measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Goal:
    """Goal for a figure, with the measured value.

    Attributes:
        what: name of the figure.
        value: measured value; None if not measured.
        least: the goal.
        percent: True if value and goal are shares, to be printed in percent.
    """

    what: str
    value: float | None
    least: float
    percent: bool = False

    @property
    def met(self) -> bool | None:
        """True if the value reaches the goal; None if nothing was measured."""
        return None if self.value is None else self.value >= self.least

    def __str__(self) -> str:
        verdict = {True: "met", False: "missed", None: "not measured"}[self.met]
        return f"{self.what}: {self._number(self.value)} (goal {self._number(self.least)}: {verdict})"

    def _number(self, value: float | None) -> str:
        return "-" if value is None else f"{100 * value:.1f} %" if self.percent else f"{value:,.2f}"


def as_figures(goals: Sequence[Goal]) -> list[dict[str, Any]]:
    """Return goals as data for JSON."""
    return [asdict(goal) | {"met": goal.met} for goal in goals]


def say(title: str, lines: Sequence[str]) -> None:
    """Print a title and lines."""
    print(f"\n{title}", *filter(None, lines), sep="\n  ", flush=True)
