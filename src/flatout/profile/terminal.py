"""A profile in a terminal."""

from __future__ import annotations

import io
import shlex
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from flatout.profile import wording
from flatout.profile.summary import PHASES, Phase, Profile
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
_OPERATORS, _GAPS, _SYNCS = 8, 6, 8  # rows; the page has more


def render(profile: Profile, options: ConsoleOptions) -> Iterator[RenderableType]:
    """The parts of the summary, top to bottom, for a console of ``options.max_width`` columns."""
    plain = options.ascii_only

    def say(text: str, style: str = "") -> Text:
        return Text(clean(text).translate(_ASCII) if plain else clean(text), style=style)

    yield Text.assemble(("flatout", "bold magenta"), "  ", say(wording.pace(profile), "bold"))
    yield say(wording.biggest(profile), "bold")
    yield say(wording.basis(profile), "dim")
    yield Text("")
    yield _phases(profile, max(10, min(40, options.max_width - 62)), say)
    yield from _section("what to do", say, [_numbered(profile.advice, say)])
    yield from _section("costliest operators", say, [_operators(profile, say)] if profile.operators else [])
    yield from _section("why the GPU idled", say, [_gaps(profile, say)] if profile.gaps else [])
    if profile.syncs:
        yield from _section("sync points", say, [say(wording.sync_note(profile), "dim"), _syncs(profile, say)])
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
    """The summary as plain text.

    Args:
        profile: what to show.
        width: columns; None takes the terminal's, 100 where there is none.
        ascii_only: avoid every other character; None asks what standard output can show.
    """
    if width is None:
        width = shutil.get_terminal_size((100, 24)).columns
    if ascii_only is None:
        ascii_only = not (getattr(sys.stdout, "encoding", None) or "utf-8").lower().startswith("utf")
    buffer = io.BytesIO()
    sink = io.TextIOWrapper(buffer, encoding="ascii" if ascii_only else "utf-8", errors="replace")
    console = Console(file=sink, width=max(40, width), color_system=None, legacy_windows=False)
    console.print(Group(*render(profile, console.options)))
    sink.flush()
    return "\n".join(line.rstrip() for line in buffer.getvalue().decode().splitlines())


def _section(title: str, say: Say, parts: Iterable[RenderableType]) -> Iterator[RenderableType]:
    parts = list(parts)
    if parts:
        yield Text("")
        yield say(title, "bold cyan")
        yield from (Padding(part, (0, 0, 0, 2)) for part in parts)


def _phases(profile: Profile, width: int, say: Say) -> Table:
    on_gpu = bool(profile.device_phases)
    table = _table("", "part of the step", *(("host", "", "GPU") if on_gpu else ("time", "")))
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


def _operators(profile: Profile, say: Say) -> Table:
    on_gpu = bool(profile.device_phases)
    table = _table("", "operator", "calls", "host", *(("GPU",) if on_gpu else ()), "mostly for")
    for operator in profile.operators[:_OPERATORS]:
        device = [say(wording.ms(operator.device_seconds))] if on_gpu else []
        table.add_row(
            say(wording.share(operator.share, 1)),
            say(operator.name, "bold"),
            say(wording.times(operator.calls)),
            say(wording.ms(operator.host_seconds)),
            *device,
            say(operator.where, "dim"),
        )
    return table


def _gaps(profile: Profile, say: Say) -> Table:
    table = _table("", "because", "per step", "times", "longest", "in", "at")
    for gap in profile.gaps[:_GAPS]:
        table.add_row(
            say(wording.share(gap.seconds, profile.seconds)),
            say(wording.CAUSES[gap.cause]),
            say(wording.ms(gap.seconds)),
            say(wording.times(gap.count)),
            say(wording.ms(gap.longest)),
            say(wording.PHASE_NAMES[gap.phase]),
            say(gap.where, "bold"),
        )
    return table


def _syncs(profile: Profile, say: Say) -> Table:
    table = _table("per step", "call", "at", "in", "code")
    for sync in profile.syncs[:_SYNCS]:
        table.add_row(
            say(wording.times(sync.per_step)),
            say(sync.what),
            say(sync.where or "not in your code", "bold"),
            say(wording.PHASE_NAMES[sync.phase]),
            say(sync.code, "dim"),
        )
    return table


_RIGHT = {"", "calls", "host", "GPU", "time", "per step", "times", "longest"}


def _table(*headings: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), show_edge=False, pad_edge=False, header_style="dim")
    for index, heading in enumerate(headings):
        right = heading in _RIGHT and (index == 0 or heading != "")
        table.add_column(heading, justify="right" if right else "left", no_wrap=right, overflow="fold")
    return table
