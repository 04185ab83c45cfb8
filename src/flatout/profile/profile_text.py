"""Text form of a profile."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator

from rich.console import ConsoleOptions, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from flatout.core import formatting
from flatout.profile import sections
from flatout.profile.profile_data import PHASES, ProfileData
from flatout.profile.sections import ms
from flatout.report import terminal

_STYLES = {"number": "", "strong": "bold", "plain": "", "quiet": "dim"}
_ROWS = 8  # rows of a table; the page shows all

Say = Callable[..., Text]
"""Function from a text and its style to text for this terminal."""


def render(profile: ProfileData, options: ConsoleOptions) -> Iterator[RenderableType]:
    """Yield the parts of the profile, top to bottom, for a console of ``options.max_width`` columns."""
    plain = options.ascii_only

    def say(text: str, style: str = "") -> Text:
        return terminal.say(formatting.clean(text), plain, style)

    def titled(title: str, *parts: RenderableType) -> Iterator[RenderableType]:
        yield Text("")
        yield say(title, "bold cyan")
        yield from (Padding(part, (0, 0, 0, 2)) for part in parts)

    rate = f", {formatting.count(profile.samples / profile.seconds)} samples/s" if profile.samples else ""
    yield Text.assemble(("flatout", "bold magenta"), "  ", say(f"{ms(profile.seconds)} a step{rate}", "bold"))
    yield say(sections.biggest(profile), "bold")
    yield say(sections.basis(profile), "dim")
    if profile.verdict:
        yield say(profile.verdict)
    yield Text("")
    yield _phases(profile, max(10, min(40, options.max_width - 62)), say)
    yield from titled("what to do", _numbered(profile.advice, say))
    for section in sections.sections(profile):
        note = [say(section.note, "dim")] if section.note else []
        yield from titled(section.title[0].lower() + section.title[1:], *note, _rows(section, say))
    if profile.memory is not None:
        yield from titled("memory", say(sections.peak(profile)))
    if profile.commands:
        lines = [say(continued(line, options.max_width - 2)) for line in profile.commands]
        yield from titled("deeper, with NVIDIA's tools (nvprof is gone)", *lines)
    yield Text("")
    yield terminal.facts(profile.environment, plain)


def continued(command: str, width: int) -> str:
    """Return a shell command split over several lines. A word longer than ``width`` has its own line."""
    lines = [""]
    for word in map(shlex.quote, shlex.split(command)):
        if lines[-1] and len(lines[-1]) + 1 + len(word) > width - 2:
            lines.append("  " + word)
        else:
            lines[-1] += f" {word}" if lines[-1] else word
    return " \\\n".join(lines)


def to_text(profile: ProfileData, width: int | None = None, ascii_only: bool | None = None) -> str:
    """Return the profile as plain text. The arguments are those of ``report.terminal.plain_text``."""
    return terminal.plain_text(lambda options: render(profile, options), width, ascii_only)


def _phases(profile: ProfileData, width: int, say: Say) -> Table:
    on_gpu = bool(profile.device_phases)
    headings = [("", True), ("part of the step", False), ("time", True), ("", False)]
    table = _table([*headings, ("GPU", True)] if on_gpu else headings)
    longest = max(profile.phases.values())
    for phase in PHASES:
        look, seconds = sections.LOOKS[phase], profile.phases[phase]
        table.add_row(
            say(formatting.share(seconds / profile.seconds)),
            say(look.name, look.style),
            say(ms(seconds)),
            say("█" * round(width * seconds / longest), look.style),
            *([say(ms(profile.device_phases[phase]))] if on_gpu else []),
        )
    return table


def _numbered(lines: Iterable[str], say: Say) -> Table:
    grid = Table.grid(padding=(0, 1))
    grid.add_column(justify="right")
    grid.add_column(overflow="fold")
    for number, line in enumerate(lines, 1):
        grid.add_row(say(f"{number}", "bold"), say(line))
    return grid


def _rows(section: sections.Section, say: Say) -> Table:
    table = _table((heading, look == "number") for heading, look, _ in section.columns)
    styles = [_STYLES[look] for _, look, _ in section.columns]
    for row in section.rows[:_ROWS]:
        table.add_row(*map(say, row, styles))
    return table


def _table(headings: Iterable[tuple[str, bool]]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), show_edge=False, pad_edge=False, header_style="dim")
    for heading, right in headings:
        table.add_column(heading, justify="right" if right else "left", no_wrap=right, overflow="fold")
    return table
