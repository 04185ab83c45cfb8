"""Report of a tuning: the techniques tried on a model and its data, their gains, and the reason for each decision."""

from __future__ import annotations

from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import Any

from markupsafe import Markup
from rich.console import Console, ConsoleOptions, RenderableType

from flatout.report import receipt, report_page, report_text, serialize, wording
from flatout.report.comparison import Comparison, compare
from flatout.report.model import SCHEMA_VERSION, Gain, Pace, Row, Status, Summary, Trial
from flatout.report.shown import Shown

__all__ = [
    "SCHEMA_VERSION",
    "Comparison",
    "FullReport",
    "Gain",
    "Pace",
    "Report",
    "Row",
    "Status",
    "Summary",
    "Trial",
    "compare",
]


class FullReport:
    """View of a ``Summary`` for terminals, with every row and its reason.

    Args:
        summary: the data shown.
    """

    def __init__(self, summary: Summary) -> None:
        self._summary = summary

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        yield from report_text.render(self._summary, options)

    def __str__(self) -> str:
        return report_text.to_text(self._summary)

    __repr__ = __str__


class Report(Shown):
    """View of a ``Summary`` for terminals, notebooks and files.

    ``print(report)`` prints one screen, and ``rich.print(report)`` prints the screen in color. A Jupyter cell shows a
    table with charts. ``full()`` returns every row. ``to_json`` and ``to_html`` write files.

    Attributes:
        summary: the data shown.
    """

    _TITLE = "flatout report"

    def __init__(self, summary: Summary) -> None:
        self.summary = summary

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
        return serialize.to_dict(self.summary)

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
        return cls(serialize.from_json(text))

    def full(self) -> FullReport:
        """Return every row with its reason, for ``print(report.full())``."""
        return FullReport(self.summary)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        yield from receipt.render(self.summary, options)

    def __str__(self) -> str:
        return receipt.to_text(self.summary)

    def _facts(self) -> dict[str, str]:
        return {
            "result": wording.headline(self.summary),
            "rows": f"{len(self.summary.in_use)} of {len(self.rows)} techniques in use",
        }

    def _fragment(self) -> Markup:
        return report_page.fragment(self.summary)
