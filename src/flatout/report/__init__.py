"""Report of a tuning: the techniques tried on a model and its data, their gains, and the reason for each decision."""

from __future__ import annotations

from collections.abc import Iterable
from os import PathLike
from pathlib import Path
from typing import Any

from flatout.core.machine import environment_of
from flatout.report import model, wording
from flatout.report.comparison import Comparison, compare
from flatout.report.document import Block
from flatout.report.model import SCHEMA_VERSION, Gain, Pace, Row, Status, Summary, Trial
from flatout.report.shown import Shown

__all__ = [
    "SCHEMA_VERSION",
    "Comparison",
    "Gain",
    "Pace",
    "Report",
    "Row",
    "Status",
    "Summary",
    "Trial",
    "compare",
    "environment_of",
]


class Report(Shown):
    """View of a ``Summary`` for terminals, notebooks and files.

    ``print(report)`` prints one screen, and ``rich.print(report)`` prints the screen in color. A Jupyter cell shows a
    table with charts. ``full()`` prints every row. ``to_json`` and ``to_html`` write files.

    Args:
        summary: the data shown.
        is_full: True if the text has every row with its reason.

    Attributes:
        summary: the data shown.
    """

    _TITLE = "flatout report"

    def __init__(self, summary: Summary, *, is_full: bool = False) -> None:
        self.summary = summary
        self._is_full = is_full

    @property
    def rows(self) -> tuple[Row, ...]:
        """Rows of the checklist in order, then rows of techniques outside the checklist."""
        return self.summary.rows

    def row(self, technique: str) -> Row:
        """Return the row of one technique.

        Args:
            technique: name of the technique in ``optimize(techniques={...})``.

        Raises:
            KeyError: the report has no such row.
        """
        for row in self.rows:
            if row.technique == technique:
                return row
        raise KeyError(f"no row {technique!r}; there are: {', '.join(row.technique for row in self.rows)}")

    def to_dict(self) -> dict[str, Any]:
        return model.to_dict(self.summary)

    @classmethod
    def from_json(cls, source: str | PathLike[str]) -> Report:
        """Read a report that ``to_json`` wrote.

        Args:
            source: JSON text, or path of a file with JSON text.

        Raises:
            ValueError: ``source`` is not a report, or flatout cannot read its schema version.
            OSError: the file cannot be read.
        """
        is_text = isinstance(source, str) and source.lstrip().startswith(("{", "["))
        text = str(source) if is_text else Path(source).read_text(encoding="utf-8")
        return cls(model.from_json(text))

    def full(self) -> Report:
        """Return the report with every row and its reason, for ``print(report.full())``."""
        return Report(self.summary, is_full=True)

    def _facts(self) -> dict[str, str]:
        return {"result": wording.headline(self.summary), "rows": wording.in_use(self.summary)}

    def _blocks(self) -> Iterable[Block]:
        return wording.full(self.summary) if self._is_full else wording.receipt(self.summary)

    def _page(self) -> Iterable[Block]:
        return wording.full(self.summary)
