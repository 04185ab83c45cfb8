"""Blocks that show the results of flatout. ``terminal`` renders them as text, and ``html`` as a page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

Part = str | tuple[str, str]
"""Text, or a text with its style: a key of ``terminal.STYLES``."""

Cell = Part | list[Part]
"""Part of a table. A list has a line for each part."""


@dataclass(frozen=True)
class Note:
    """Paragraph.

    Attributes:
        text: the text, or parts that share lines. A line ends between two parts, never within a short one.
        style: a key of ``terminal.STYLES``. A page sets ``headline`` and ``title`` as headings, and ``pre`` unchanged.
        label: name of the paragraph, left of the text.
        gap: text between two parts.
    """

    text: Part | Sequence[Part]
    style: str = ""
    label: str = ""
    gap: str = ""

    @property
    def parts(self) -> Sequence[Part]:
        """The parts of the text."""
        return [self.text] if isinstance(self.text, str | tuple) else self.text


@dataclass(frozen=True)
class Table:
    """Table. A row may lack its last cells.

    Attributes:
        rows: cells of each row.
        headings: heading of each column; empty for a table without headings.
        right: columns with numbers, which are aligned right.
        is_explained: True if the last column explains the row. A narrow terminal shows it below the row.
        folded: summary of a table that a page shows on request; empty for a table that is always shown.
    """

    rows: Sequence[Sequence[Cell]]
    headings: Sequence[str] = ()
    right: frozenset[int] = frozenset()
    is_explained: bool = False
    folded: str = ""


@dataclass(frozen=True)
class Chart:
    """Bars over one axis.

    Attributes:
        title: title for screen readers.
        bars: name, value, and segments of each bar. A segment has its start and end on the axis, style and name.
        intervals: ends of the whisker across each bar; empty for a bar without one, or for all bars.
        tick: text of a position on the axis; None draws no axis.
        reach: smallest end of the axis.
        is_connected: True if each bar begins where the previous bar ends.
        label: name of the chart, left of it.
    """

    title: str
    bars: Sequence[tuple[str, str, Sequence[tuple[float, float, str, str]]]]
    intervals: Sequence[tuple[float, ...]] = ()
    tick: Callable[[float], str] | None = None
    reach: float = 0.0
    is_connected: bool = False
    label: str = ""

    @property
    def axis(self) -> tuple[float, float]:
        """Ends of the axis. Whiskers lengthen each side of the axis by half the length of the bars at most."""
        ends = [0.0, self.reach, *(end for _, _, parts in self.bars for part in parts for end in part[:2])]
        whiskers = [*ends, *(end for interval in self.intervals for end in interval)]
        low, high = min(ends), max(ends)
        room = (high - low) / 2
        return max(low - room, min(whiskers)), min(high + room, max(whiskers)) or 1.0

    @property
    def is_stacked(self) -> bool:
        """True if a bar has several segments."""
        return any(len(parts) > 1 for _, _, parts in self.bars)

    @property
    def legend(self) -> dict[str, str]:
        """Names of the named segments by style."""
        return {style: name for _, _, parts in self.bars for _, _, style, name in parts if name}


Block = Note | Table | Chart
