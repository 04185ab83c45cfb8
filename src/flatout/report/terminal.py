"""Text for a terminal: plain, or in ASCII alone."""

from __future__ import annotations

import io
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.text import Text

from flatout.core import formatting

_ASCII = str.maketrans({"█": "#", "×": "x", "–": "-", "−": "-", "…": "..", "→": "->", "·": "|", "\u00a0": " "})


def plain_text(
    render: Callable[[ConsoleOptions], Iterable[RenderableType]], width: int | None, ascii_only: bool | None
) -> str:
    """Return what a console shows, as plain text.

    Args:
        render: returns the parts, top to bottom.
        width: columns; None takes the terminal's width, or 100 without a terminal.
        ascii_only: use ASCII alone; None uses ASCII if the encoding of standard output is not a UTF.
    """
    if width is None:
        width = shutil.get_terminal_size((100, 24)).columns
    if ascii_only is None:
        ascii_only = not (getattr(sys.stdout, "encoding", None) or "utf-8").lower().startswith("utf")
    buffer = io.BytesIO()
    sink = io.TextIOWrapper(buffer, encoding="ascii" if ascii_only else "utf-8", errors="replace")
    console = Console(file=sink, width=max(40, width), color_system=None, legacy_windows=False)
    console.print(Group(*render(console.options)))
    sink.flush()
    return "\n".join(line.rstrip() for line in buffer.getvalue().decode().splitlines())


def say(text: str, plain: bool, style: str = "") -> Text:
    """Return text for a terminal, in ASCII alone if ``plain``."""
    text = formatting.visible(text)
    return Text(text.translate(_ASCII) if plain else text, style=style)


@dataclass(frozen=True)
class Joined:
    """Parts one after the other, in as many lines as they need. Lines end between parts, never within a short one.

    rich ends a line at every space, no-break spaces included.
    """

    parts: Iterable[Text]
    gap: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        line = Text()
        for part in self.parts:
            if line and line.cell_len + len(self.gap) + part.cell_len > options.max_width:
                yield line
                line = Text()
            if line:
                line.append(self.gap, part.style)
            line.append_text(part)
        yield line


def facts(environment: Mapping[str, str], plain: bool) -> Joined:
    """Return the environment of the figures: each name and its value, on one line if they fit."""
    told = (f"{formatting.clean(key)} {formatting.clean(value)}" for key, value in environment.items())
    return Joined([say(fact, plain, "dim") for fact in told], " | " if plain else " · ")
