"""Text of blocks in a terminal, by rich.

``import flatout`` does not import this module, because rich takes a quarter of that time. Modules of a training import
rich after this module, and in functions.
"""

from __future__ import annotations

import io
import random
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

_state = random.getstate()
from rich.console import Console, ConsoleOptions, Group, RenderableType  # noqa: E402

random.setstate(_state)  # rich's default styles draw from the script's generator

from rich.padding import Padding  # noqa: E402
from rich.table import Table as Grid  # noqa: E402
from rich.text import Text  # noqa: E402

from flatout.core import formatting  # noqa: E402
from flatout.report.document import Block, Cell, Chart, Note, Part, Table  # noqa: E402

STYLES = {
    "": "", "strong": "bold", "quiet": "dim", "code": "dim", "place": "cyan", "title": "bold cyan", "lead": "",
    "headline": "bold", "factor": "bold", "trial": "dim italic", "purpose": "dim italic", "why": "", "pre": "",
    "kept": "bold green", "rejected": "yellow", "advice": "bold cyan", "untried": "blue", "na": "dim",
    "slower": "bold red", "warn": "bold yellow", "chosen": "green", "noise": "dim", "rest": "bright_black",
    "whole": "blue", "load": "dark_orange", "copy": "yellow", "forward": "blue", "backward": "magenta",
    "update": "green",
}  # fmt: skip
"""Styles in a terminal by name. ``html`` has a style of the same name for pages."""

SHADES = {"load": "█", "forward": "▓", "backward": "▒", "update": "░", "rest": "·", "noise": "░", "rejected": "▓"}
"""Characters of a bar by style. Bars of other styles are solid."""

_ASCII = str.maketrans(dict(zip("█▓▒░×–−·✓✗○“”\u00a0", '#=+-x--|+xo"" ', strict=True)) | {"…": "..", "→": "->"})

LEAST_EXPLANATION = 44
"""Columns below which an explanation stands below its row instead of beside it."""

LEAST_TEXT = 8
"""Columns to which a column of texts may shrink."""

WIDEST_CHART = 60
"""Largest width of a bar, in columns."""


def show(blocks: Iterable[Block], console: Console) -> None:
    """Print blocks on a console."""
    console.print(Group(*render(blocks, console.options)))


def plain_text(blocks: Iterable[Block], width: int | None = None, ascii_only: bool | None = None) -> str:
    """Return what a console shows, as plain text.

    Args:
        blocks: the blocks, top to bottom.
        width: columns; None takes the terminal's width, or 100 without a terminal.
        ascii_only: use ASCII alone; None uses ASCII if the encoding of standard output is not a UTF.
    """
    if width is None:
        width = shutil.get_terminal_size((100, 24)).columns
    if ascii_only is None:
        ascii_only = not (getattr(sys.stdout, "encoding", None) or "utf-8").lower().startswith("utf")
    sink = io.TextIOWrapper(io.BytesIO(), encoding="ascii" if ascii_only else "utf-8", errors="replace")
    show(blocks, Console(file=sink, width=max(40, width), color_system=None, legacy_windows=False))
    sink.seek(0)
    return "\n".join(line.rstrip() for line in sink.read().splitlines())


def say(text: str, plain: bool, style: str = "") -> Text:
    """Return text for a terminal, in ASCII alone if ``plain``."""
    text = formatting.visible(text)
    return Text(text.translate(_ASCII) if plain else text, style=style)


def render(blocks: Iterable[Block], options: ConsoleOptions) -> Iterator[RenderableType]:
    """Yield the text of blocks, top to bottom. Neighbors with labels share the column of the labels."""
    plain = options.ascii_only
    for is_labelled, group in groupby(blocks, lambda block: bool(_label(block))):
        neighbors = list(group)
        left = 2 + max(9, *(len(_label(block)) for block in neighbors), 0) if is_labelled else 0
        for block in neighbors:
            lines = Group(*_lines(block, plain, max(20, options.max_width - left)))
            if not left:
                yield lines
                continue
            style = block.style if isinstance(block, Note) else ""
            grid = Grid.grid(padding=0)
            grid.add_column(width=left)
            grid.add_row(say(_label(block).strip(), plain, STYLES[style or "strong"]), lines)
            yield grid


def _label(block: Block) -> str:
    return "" if isinstance(block, Table) else block.label


def _lines(block: Block, plain: bool, width: int) -> Iterator[RenderableType]:
    if isinstance(block, Note):
        return _note(block, plain, width)
    return _table(block, plain, width) if isinstance(block, Table) else _chart(block, plain, width)


def _say(part: Part, plain: bool, style: str = "") -> Text:
    text, own = (part, style) if isinstance(part, str) else part
    return say(text, plain, STYLES.get(own, ""))


def _note(note: Note, plain: bool, width: int) -> Iterator[Text]:
    parts = [_say(part, plain, "" if note.label else note.style) for part in note.parts]
    if note.style == "title":
        yield Text("")
    if note.style == "headline":
        parts = [Text.assemble(("flatout", "bold magenta"), "  ", *parts)]
    yield from _flow(parts, say(note.gap, plain).plain, width) or [Text()]


def _flow(parts: Sequence[Text], gap: str, width: int) -> list[Text]:
    """Return lines of parts. A line ends between two parts, because rich would end it at any space."""
    lines: list[Text] = []
    for part in parts:
        if lines and lines[-1].cell_len + len(gap) + part.cell_len <= width:
            lines[-1].append(gap, part.style).append_text(part)
        else:
            lines.append(part)
    return lines


def _cell(cell: Cell, plain: bool) -> Text:
    return Text("\n").join(_say(part, plain) for part in (cell if isinstance(cell, list) else [cell]) if part)


def _table(table: Table, plain: bool, width: int) -> Iterator[RenderableType]:
    """Yield a table. Columns are as wide as their longest lines, unless the widest columns must shrink."""
    rows = [[_cell(cell, plain) for cell in row] for row in table.rows]
    head = [[say(heading, plain, "dim") for heading in table.headings]] if table.headings else []
    count = max(map(len, [*rows, *head]), default=0)
    widths = [max((_width(row[i]) for row in head + rows if i < len(row)), default=0) for i in range(count)]
    rest = width - sum(widths[:-1]) - 2 * (count - 1)
    is_below = table.is_explained and rest < min(widths[-1], LEAST_EXPLANATION)
    if is_below:
        widths = widths[:-1]
    texts = [i for i in range(len(widths)) if i not in table.right]
    for i in sorted(texts, key=lambda i: -widths[i]):
        excess = sum(widths) + 2 * (len(widths) - 1) - width
        widths[i] = min(widths[i], max(LEAST_TEXT, widths[i] - max(0, excess)))
    if table.folded:
        yield Text("")
        yield say(table.folded, plain, "dim")
    for index, row in enumerate(head + rows):
        grid = Grid.grid(padding=(0, 2, 0, 0), pad_edge=False)
        for i, columns in enumerate(widths):
            grid.add_column(width=columns, justify="right" if i in table.right else "left", overflow="fold")
        grid.add_row(*row[: len(widths)])
        yield grid
        if is_below and index >= len(head) and len(row) > len(widths) and row[-1]:
            yield Padding(row[-1], (0, 0, 0, min(widths[0] + 2, 12)))


def _width(text: Text) -> int:
    return max((line.cell_len for line in text.split("\n", allow_blank=True)), default=0)


def _chart(chart: Chart, plain: bool, width: int) -> Iterator[RenderableType]:
    """Yield a line for each bar. Each end is rounded, so that the lengths of segments add up."""
    low, high = chart.axis
    names = [say(formatting.clean(name), plain) for name, _, _ in chart.bars]
    values = [say(formatting.clean(value), plain) for _, value, _ in chart.bars]
    left = min(max(name.cell_len for name in names), max(10, width // 3))
    room = width - left - max(value.cell_len for value in values) - 4
    columns = max(8, min(WIDEST_CHART, room))

    def column(value: float) -> int:
        return round(columns * (value - low) / (high - low))

    grid = Grid.grid(padding=(0, 2, 0, 0))
    grid.add_column(width=left, no_wrap=True, overflow="crop" if plain else "ellipsis")
    grid.add_column(width=columns, no_wrap=True)
    grid.add_column()
    for name, value, (_, _, parts) in zip(names, values, chart.bars, strict=True):
        bar = Text()
        for start, end, style, _ in parts:
            first, last = sorted((column(start), column(end)))
            bar.append(" " * (first - len(bar)))
            length = max(last - first, start != end and not chart.is_stacked)
            shade = SHADES.get(style, "█")
            bar.append(shade.translate(_ASCII) * length if plain else shade * length, STYLES.get(style, ""))
        grid.add_row(name, bar, value)
    yield grid
    entries = [
        say(SHADES.get(style, "█"), plain, STYLES[style]) + say(f" {name}", plain, "not bold dim")
        for style, name in chart.legend.items()
    ]
    for line in _flow(entries, "  ", width - left - 2):
        yield Padding(line, (0, 0, 0, left + 2))
