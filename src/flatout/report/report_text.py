"""Text form of the full report: a table in a wide terminal, two lines per technique in a narrow one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rich import box
from rich.console import ConsoleOptions, Group, RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from flatout.core import formatting
from flatout.report import wording
from flatout.report.model import Pace, Row, Summary
from flatout.report.terminal import Joined, facts, plain_text, say

WIDE = 120
"""Smallest width at which the reason has its own column."""


def render(summary: Summary, options: ConsoleOptions) -> Iterator[RenderableType]:
    """Yield the parts of the report, top to bottom, for a console of ``options.max_width`` columns."""
    plain = options.ascii_only
    wide = options.max_width >= WIDE
    yield from _header(summary, plain)
    yield Text("")
    yield _table(summary.rows, plain) if wide else _stack(summary.rows, plain)
    yield Text("")
    yield from _footer(summary, plain)


def to_text(summary: Summary, width: int | None = None, ascii_only: bool | None = None) -> str:
    """Return the report as plain text. ``width`` and ``ascii_only`` are those of ``plain_text``."""
    return plain_text(lambda options: render(summary, options), width, ascii_only)


def _status(row: Row, plain: bool) -> Text:
    look = wording.LOOKS[row.status]
    return Text(f"{look.ascii_mark if plain else look.mark} {row.status}", style=look.style)


def _gain(row: Row, plain: bool, joint: str) -> Text:
    """Return the speed with its interval, and the memory if it changed."""
    parts = []
    if row.gain is not None:
        speed = say(formatting.percent(row.gain.ratio), plain, "bold green" if row.status == "kept" else "")
        parts.append(speed.append_text(say(f"  ({wording.interval(row.gain, row.gain_pairs)})", plain, "dim not bold")))
    if wording.is_change(row.memory):
        parts.append(say(f"memory {formatting.percent(row.memory)}", plain))
    return Text(joint).join(parts)


def _expected(row: Row, plain: bool) -> Text:
    return say(f"usually {formatting.clean(row.expected)}" if row.expected else "", plain, "dim")


def _name(row: Row, plain: bool, joint: str = " · ") -> Text:
    faded = "dim" if wording.LOOKS[row.status].style == "dim" else "bold"
    text = say(formatting.clean(row.title), plain, faded)
    if row.chosen and row.chosen != row.title:
        text.append_text(say(f"{joint}{formatting.clean(row.chosen)}", plain, "green not bold"))
    return text


def _why(row: Row, plain: bool) -> Text:
    text = say(formatting.clean(row.why), plain, "dim" if wording.LOOKS[row.status].style == "dim" else "")
    if wording.purpose(row):
        text = say(wording.purpose(row) + "\n", plain, "dim italic").append_text(text)
    several = len(row.trials) > 1
    if several or any(wording.trial_notes(trial) for trial in row.trials):
        tried = []
        for trial in row.trials:
            told = [formatting.percent(trial.gain.ratio)] if trial.gain and several else []
            told += wording.trial_notes(trial)
            tried.append(f"{formatting.clean(trial.candidate)}: {', '.join(told) or 'not timed'}")
        text.append_text(say("\ntried " + "; ".join(tried), plain, "dim italic"))
    return text


def _number(row: Row) -> Text:
    return Text("+" if row.number is None else str(row.number), style="dim")


def _split(rows: tuple[Row, ...]) -> tuple[list[Row], list[Row]]:
    return [r for r in rows if r.number is not None], [r for r in rows if r.number is None]


def _table(rows: tuple[Row, ...], plain: bool) -> Table:
    table = Table(
        box=box.ASCII if plain else box.SIMPLE_HEAD,
        expand=True,
        padding=(0, 2, 0, 0),
        pad_edge=False,
        show_edge=False,
        header_style="bold",
    )
    table.add_column("#", justify="right", no_wrap=True)
    table.add_column("technique", max_width=28)
    table.add_column("result", no_wrap=True)
    table.add_column("speed (95 % interval)", min_width=24, max_width=24)
    table.add_column("why", ratio=1, overflow="fold")
    listed, additional = _split(rows)
    for row in listed + additional:
        result = Text("\n").join(filter(None, (_gain(row, plain, "\n"), _expected(row, plain))))
        cells = (_number(row), _name(row, plain, "\n"), _status(row, plain), result, _why(row, plain))
        table.add_row(*cells, end_section=bool(listed) and row is listed[-1])
    return table


def _stack(rows: tuple[Row, ...], plain: bool) -> Group:
    lines: list[RenderableType] = []
    told: tuple[str, ...] | None = None
    listed, additional = _split(rows)
    for row in listed + additional:
        if listed and additional and row is additional[0]:
            lines.append(Rule(style="dim", characters="-" if plain else "─"))
        head = Table.grid(padding=(0, 1), expand=True)
        head.add_column(width=2, justify="right")
        head.add_column(ratio=1)
        head.add_column(justify="right")
        result = _status(row, plain)
        if row.gain is not None:
            result.append("  ").append_text(_gain(row, plain, "  "))
        head.add_row(_number(row), _name(row, plain), result)
        lines.append(head)
        reason = (row.status, row.why, wording.purpose(row))
        if reason != told:  # consecutive rows with one reason show it once
            lines.append(Padding(_why(row, plain), (0, 0, 0, 3)))
        if row.expected:
            lines.append(Padding(_expected(row, plain), (0, 0, 0, 3)))
        told = reason
    return Group(*lines)


def _header(summary: Summary, plain: bool) -> Iterator[RenderableType]:
    yield Text.assemble(("flatout", "bold magenta"), "  ", say(wording.headline(summary), plain, "bold"))
    counts = ((f"{number} {status}", wording.LOOKS[status].style) for status, number in wording.tally(summary.rows))
    yield Joined([Text(count, style=style) for count, style in counts], "   ")


def _footer(summary: Summary, plain: bool) -> Iterator[RenderableType]:
    paces = wording.paces(summary)
    if paces:
        yield _times(paces, plain)
        yield Text("")
        yield _figures(paces, plain)
        yield Text("")
        yield from _ranks(list(paces.values())[-1], plain)
    if summary.verdict:
        yield say(formatting.clean(summary.verdict), plain)
    if wording.cost(summary):
        yield Text(wording.cost(summary), style="dim")
    for note in summary.notes:
        yield say(f"note: {formatting.clean(note)}", plain)
    if summary.environment:
        yield facts(summary.environment, plain)


_STYLES = {"before": "", "after": "bold green"}


def _times(paces: Mapping[str, Pace], plain: bool) -> Table:
    """Return the parts of a batch's time, one line for each pace."""
    times = wording.times(*paces.values())
    grid = Table.grid(padding=(0, 2))
    for _ in range(len(times) + 2):
        grid.add_column(justify="right", no_wrap=True)
    grid.add_row("", *(Text(part.short, style="dim") for part, _ in times), Text("= a batch", style="dim"))
    for index, (label, pace) in enumerate(paces.items()):
        cells = [formatting.milliseconds(ms) for ms in (*(ms[index] for _, ms in times), pace.total_ms)]
        grid.add_row(Text(label, style="dim"), *(say(cell, plain, _STYLES[label]) for cell in cells))
    return grid


def _ranks(pace: Pace, plain: bool) -> Iterator[RenderableType]:
    """Yield the times of each rank, and the slowest rank."""
    heading, *rows = wording.rank_table(pace.ranks) or [()]
    if rows:
        grid = Table.grid(padding=(0, 2))
        for _ in heading:
            grid.add_column(justify="right", no_wrap=True)
        grid.add_row(*(Text(cell, style="dim") for cell in heading))
        for row in rows:
            grid.add_row(*(say(cell, plain) for cell in row))
        yield grid
        yield Text("")
    if wording.straggler(pace.ranks):
        yield say(wording.straggler(pace.ranks), plain)


def _figures(paces: Mapping[str, Pace], plain: bool) -> Table:
    """Return rates and costs of each pace, with their meanings."""
    grid = Table.grid(padding=(0, 2))
    for _ in range(len(paces) + 1):
        grid.add_column(justify="right", no_wrap=True)
    grid.add_column()
    grid.add_row("", *(Text(label, style="dim") for label in paces), "")
    for figure in wording.figures(*paces.values()):
        values = (say(value, plain, _STYLES[label]) for label, value in zip(paces, figure.values, strict=True))
        grid.add_row(Text(figure.name, style="dim"), *values, say(figure.meaning, plain, "dim"))
    return grid
