"""Advice on a script: boxes, causes, measured techniques and a diff, as data and as text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.table import Table
from rich.text import Text

from flatout.advise.causes import Box, Cause, boxes_of, causes_of, rows_of, shown_gain, training_site
from flatout.advise.edits import diff_of
from flatout.advise.session import Observations
from flatout.advise.text import BOXES, MARKS, explanation
from flatout.core import formatting
from flatout.report.model import Row

SCHEMA_VERSION = 1
"""Version of the JSON form, which increases when a field changes its meaning or is removed."""


@dataclass(frozen=True)
class Advice:
    """Advice on a script.

    Attributes:
        boxes: the four boxes of the checklist.
        causes: causes that slow the script down, the largest gain first.
        techniques: module and row of each technique that was timed, the largest gain first.
        diff: unified diff in the script's folder; empty if no change is surely correct.
        updates: number of updates that were observed.
    """

    boxes: tuple[Box, ...]
    causes: tuple[Cause, ...]
    techniques: tuple[tuple[str, Row], ...]
    diff: str
    updates: int

    @classmethod
    def of(cls, seen: Observations, folder: Path) -> Advice:
        """Return the advice on a script.

        Args:
            seen: observations of the script.
            folder: folder of the script.
        """
        causes = causes_of(seen)
        boxes = boxes_of(seen, causes)
        site = training_site(seen)
        diff = diff_of(causes, folder, "cpu" if site is None else site.device, seen.observer.trained)
        return cls(boxes, causes, tuple(rows_of(seen)), diff, seen.report.updates)

    def to_json(self, path: Path) -> None:
        """Write all data to a JSON file."""
        techniques = [
            {"module": module, "technique": row.technique, "status": row.status, "gain": shown_gain(row)}
            for module, row in self.techniques
        ]
        data: dict[str, Any] = {
            "schema": "flatout.advice",
            "schema_version": SCHEMA_VERSION,
            "updates": self.updates,
            "boxes": [asdict(box) for box in self.boxes],
            "causes": [asdict(cause) for cause in self.causes],
            "techniques": techniques,
            "diff": self.diff,
        }
        path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

    def to_diff(self, path: Path) -> None:
        """Write the diff to a file, without a change of its line ends."""
        path.write_bytes(self.diff.encode())

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        if not self.updates:
            yield Text("No optimizer has stepped: there is nothing to advise on.")
            return
        yield self._boxes()
        yield Text("")
        yield self._gains()

    def _boxes(self) -> Table:
        table = Table.grid(padding=(0, 2, 0, 0))
        for box in self.boxes:
            mark, style = MARKS[box.is_ticked]
            where = formatting.clean(box.where)
            table.add_row(Text(mark, style=style), BOXES[box.name], Text(where, style="cyan"))
        return table

    def _gains(self) -> RenderableType:
        """Return the causes and the techniques that trials have shown to be faster, in one table."""
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_row(*(Text(name, style="bold") for name in ("gain", "what", "where")))
        table.columns[0].justify = "right"
        found = [(cause.gain or 0.0, self._cause_row(cause)) for cause in self.causes]
        shown = [(module, row, shown_gain(row)) for module, row in self.techniques]
        found += [(gain, _technique_row(module, row, gain)) for module, row, gain in shown if gain is not None]
        if not found:
            return Text("Nothing sticks out, and no technique that was tried is faster.")
        for _, cells in sorted(found, key=lambda each: -each[0]):
            table.add_row(*cells)
        return table

    def _cause_row(self, cause: Cause) -> tuple[Text, Text, Text]:
        gain = "" if cause.gain is None else f"{'~' if cause.is_estimate else ''}{cause.gain:.2f}×"
        return Text(gain), Text(explanation(cause)), Text(formatting.clean(cause.where), style="cyan")


def _technique_row(module: str, row: Row, gain: float) -> tuple[Text, Text, Text]:
    return Text(f"{gain:.2f}×"), Text(f"{row.technique} {formatting.clean(row.chosen)}".strip()), Text(module)
