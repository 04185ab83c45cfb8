"""A profile in a terminal."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator

from rich.console import ConsoleOptions, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from flatout.profile import wording
from flatout.profile.summary import PHASES, Phase, Profile
from flatout.report.terminal import plain_text
from flatout.report.words import clean

_STYLES: dict[Phase, str] = {
    "loader_wait": "dark_orange",
    "h2d": "yellow",
    "forward": "blue",
    "backward": "magenta",
    "update": "green",
    "host_idle": "bright_black",
}
_ASCII = str.maketrans({"█": "#", "→": ">", "…": ".", "×": "x", "–": "-", "−": "-", "·": "|"})
Say = Callable[..., Text]
"""Text for this terminal: (text, style)."""
_ROWS = 8  # of a table; the page has more


def render(profile: Profile, options: ConsoleOptions) -> Iterator[RenderableType]:
    """The parts of the summary, top to bottom, for a console of ``options.max_width`` columns."""
    plain = options.ascii_only

    def say(text: str, style: str = "") -> Text:
        return Text(clean(text).translate(_ASCII) if plain else clean(text), style=style)

    yield Text.assemble(("flatout", "bold magenta"), "  ", say(wording.pace(profile), "bold"))
    yield say(wording.biggest(profile), "bold")
    yield say(wording.basis(profile), "dim")
    if profile.verdict:
        yield say(profile.verdict)
    yield Text("")
    yield _phases(profile, max(10, min(40, options.max_width - 62)), say)
    yield from _section("what to do", say, [_numbered(profile.advice, say)])
    for section in wording.sections(profile):
        note = [say(section.note, "dim")] if section.note else []
        yield from _section(section.title[0].lower() + section.title[1:], say, [*note, _rows(section.columns, say)])
    if profile.memory is not None:
        yield from _section("memory", say, [say(wording.memory_note(profile))])
    if profile.commands:
        lines = [say(continued(line, options.max_width - 2)) for line in profile.commands]
        yield from _section("deeper, with NVIDIA's tools (nvprof is gone)", say, lines)
    yield Text("")
    yield say(" · ".join(f"{key} {value}" for key, value in profile.environment.items()), "dim")


def continued(command: str, width: int) -> str:
    """A shell command over several lines that can be copied as they are; a longer word has a line of its own."""
    lines = [""]
    for word in map(shlex.quote, shlex.split(command)):
        if lines[-1] and len(lines[-1]) + 1 + len(word) > width - 2:
            lines.append("  " + word)
        else:
            lines[-1] += f" {word}" if lines[-1] else word
    return " \\\n".join(lines)


def to_text(profile: Profile, width: int | None = None, ascii_only: bool | None = None) -> str:
    """The summary as plain text; see ``report.terminal.plain_text``."""
    return plain_text(lambda options: render(profile, options), width, ascii_only)


def _section(title: str, say: Say, parts: Iterable[RenderableType]) -> Iterator[RenderableType]:
    yield Text("")
    yield say(title, "bold cyan")
    yield from (Padding(part, (0, 0, 0, 2)) for part in parts)


def _phases(profile: Profile, width: int, say: Say) -> Table:
    on_gpu = bool(profile.device_phases)
    headings = [("", True), ("part of the step", False), ("host" if on_gpu else "time", True), ("", False)]
    table = _table([*headings, ("GPU", True)] if on_gpu else headings)
    longest = max(profile.phases.values())
    for phase in PHASES:
        seconds = profile.phases[phase]
        bar = "█" * round(width * seconds / longest) if longest > 0 else ""
        cells = [say(wording.share(seconds, profile.seconds)), say(wording.PHASE_NAMES[phase], _STYLES[phase])]
        cells += [say(wording.ms(seconds)), say(bar, _STYLES[phase])]
        if on_gpu:
            cells.append(say(wording.ms(profile.device_phases[phase])))
        table.add_row(*cells)
    return table


def _numbered(lines: Iterable[str], say: Say) -> Table:
    grid = Table.grid(padding=(0, 1))
    grid.add_column(justify="right")
    grid.add_column(overflow="fold")
    for number, line in enumerate(lines, 1):
        grid.add_row(say(f"{number}", "bold"), say(line))
    return grid


_STYLE_OF: dict[wording.Look, str] = {"number": "", "strong": "bold", "plain": "", "quiet": "dim"}


def _rows(columns: Iterable[wording.Column], say: Say) -> Table:
    columns = list(columns)
    table = _table((column.heading, column.look == "number") for column in columns)
    for row in zip(*(column.cells[:_ROWS] for column in columns), strict=True):
        table.add_row(*(say(cell, _STYLE_OF[column.look]) for cell, column in zip(row, columns, strict=True)))
    return table


def _table(headings: Iterable[tuple[str, bool]]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), show_edge=False, pad_edge=False, header_style="dim")
    for heading, right in headings:
        table.add_column(heading, justify="right" if right else "left", no_wrap=right, overflow="fold")
    return table
