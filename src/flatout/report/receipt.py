"""Receipt: a report on one screen, with the technique names of ``optimize(techniques=...)``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from rich.console import ConsoleOptions, OverflowMethod, RenderableType
from rich.table import Table
from rich.text import Text

from flatout.core import formatting
from flatout.report import wording
from flatout.report.model import Row, Summary
from flatout.report.terminal import facts, plain_text, say

WIDE = 100
"""Smallest width of a terminal, in columns, for longer names of candidates."""

BAR = 24
"""Width of the bar of the slower loop, in columns."""

SHADES = {"wait for data": "█", "step": "▓", "forward": "▓", "backward": "▒", "update": "░", "rest": "·"}
"""Character of each part of a batch's time, by ``PartLook.short``."""

ASCII_SHADES = {"█": "#", "▓": "=", "▒": "+", "░": "-", "·": "."}


def render(summary: Summary, options: ConsoleOptions) -> Iterator[RenderableType]:
    """Yield the parts of the receipt, top to bottom."""
    plain = options.ascii_only
    yield from _headline(summary, plain, options.max_width)
    yield _rows(summary, plain, 24 if options.max_width >= WIDE else 14)
    yield from _remarks("not tried", "bold blue", [row for row in _of(summary, "not tried") if not row.left_out], plain)
    yield from _remarks("advice", "bold cyan", _of(summary, "advice"), plain)
    rules = [row.technique for row in summary.in_use if not is_timed(row, summary)]
    if rules:
        yield _labelled("rules", say(f"in use without a trial: {', '.join(rules)}", plain))
    yield from _bars(summary, plain)
    pace = summary.after or summary.before
    if pace is not None and pace.ranks:
        yield _labelled("ranks", say(wording.ranks_in_words(pace), plain))
    if summary.verdict:
        yield _labelled("limit", say(formatting.clean(summary.verdict), plain))
    if summary.notes:
        yield _labelled("note", say("\n".join(map(formatting.clean, summary.notes)), plain))
    cost = wording.cost(summary)
    listed = f"report.full() lists all {len(summary.rows)} rows"
    yield say(f"{cost} · {listed}" if cost else listed, plain, "dim")
    if summary.environment:
        yield facts(summary.environment, plain)


def to_text(summary: Summary, width: int | None = None, ascii_only: bool | None = None) -> str:
    """Return the receipt as plain text. ``width`` and ``ascii_only`` are those of ``plain_text``."""
    return plain_text(lambda options: render(summary, options), width, ascii_only)


def _headline(summary: Summary, plain: bool, width: int) -> Iterator[Text]:
    """Yield speed, rates and MFU before and after, and the number of rows in use, on one line or two."""
    line = Text.assemble(("flatout", "bold magenta"), "  ", say(wording.headline(summary), plain, "bold"))
    told: list[str] = []
    before, after = summary.before, summary.after
    if before is not None and after is not None:
        rates = map(formatting.count, (before.samples_per_second, after.samples_per_second))
        told.append(f"{' → '.join(rates)} samples/s")
        if before.mfu is not None and after.mfu is not None and not _changes_peak(summary):
            told.append(f"MFU {formatting.share(before.mfu, 1)} → {formatting.share(after.mfu, 1)}")
    told.append(f"{len(summary.in_use)} of {len(summary.rows)} in use")
    rest = say("   ".join(told), plain)
    if line.cell_len + 3 + rest.cell_len <= width:
        yield line.append("   ").append_text(rest)
    else:
        yield line
        yield Text(" " * 11).append_text(rest)


def _changes_peak(summary: Summary) -> bool:
    """Return True if the two MFUs are relative to different peaks, because the precision changed."""
    return any(row.technique in ("precision", "tf32") for row in summary.in_use)


def is_timed(row: Row, summary: Summary) -> bool:
    """Return True if a trial or the user chose the technique. Rules are applied without a trial."""
    return row.gain is not None or bool(row.chosen) or row.technique in summary.won


def _rows(summary: Summary, plain: bool, widest: int) -> Table:
    """Return the timed techniques in use and the rejected techniques, the largest gains first.

    Args:
        summary: the report.
        plain: use ASCII alone.
        widest: columns of a candidate's name.
    """
    table = Table.grid(padding=(0, 2, 0, 0), expand=True)
    table.add_column(no_wrap=True, min_width=9)
    table.add_column(no_wrap=True, max_width=22)
    overflow: OverflowMethod = "crop" if plain else "ellipsis"
    table.add_column(no_wrap=True, overflow=overflow, max_width=widest)
    table.add_column(no_wrap=True, justify="right")
    table.add_column(ratio=1, no_wrap=True, overflow=overflow)
    timed = [row for row in summary.in_use if is_timed(row, summary)]
    _add(table, plain, "in use", "bold green", sorted(timed, key=_ratio, reverse=True))
    _add(table, plain, "tried", "yellow", sorted(_of(summary, "rejected"), key=_ratio, reverse=True))
    return table


def _remarks(label: str, style: str, rows: Iterable[Row], plain: bool) -> Iterator[Table]:
    """Yield the reasons of techniques that were not timed, each reason once."""
    names: dict[str, list[str]] = {}
    for row in rows:
        names.setdefault(_reason(row), []).append(row.technique)
    for i, (reason, techniques) in enumerate(names.items()):
        text = say(f"{', '.join(techniques)}: ", plain, "bold").append_text(say(reason, plain, "not bold dim"))
        yield _labelled(label if i == 0 else "", text, style)


def _of(summary: Summary, status: str) -> list[Row]:
    return [row for row in summary.rows if row.status == status]


def _ratio(row: Row) -> float:
    return 0.0 if row.gain is None else row.gain.ratio


def _add(table: Table, plain: bool, label: str, style: str, rows: Iterable[Row]) -> None:
    """Add rows, the first with a label."""
    for i, row in enumerate(rows):
        gain = "" if row.gain is None else formatting.percent(row.gain.ratio)
        table.add_row(
            Text(label if i == 0 else "", style=style),
            say(row.technique, plain, "bold"),
            say(formatting.clean(row.chosen or _best_trial(row)), plain),
            say(gain, plain, style),
            say(_reason(row), plain, "dim"),
        )


def _best_trial(row: Row) -> str:
    return next((trial.candidate for trial in row.trials if trial.gain is not None and trial.gain == row.gain), "")


def _reason(row: Row) -> str:
    """Return the interval and the memory of a kept technique, or the reason for another status."""
    if row.status != "kept":
        return formatting.clean(row.why.splitlines()[0] if row.why else "")
    parts = [] if row.gain is None else [wording.interval(row.gain, row.gain_pairs)]
    if wording.is_change(row.memory):
        parts.append(f"memory {formatting.percent(row.memory)}")
    return ", ".join(parts)


def _bars(summary: Summary, plain: bool) -> Iterator[RenderableType]:
    """Yield a bar for the time of a batch before and after, divided into its parts; nothing without times."""
    paces = wording.paces(summary)
    slowest = max((pace.total_ms for pace in paces.values()), default=0.0)
    if not 0 < slowest < math.inf:
        return
    parts = wording.times(*paces.values())
    grid = Table.grid(padding=(0, 2, 0, 0))
    for _ in range(4):
        grid.add_column(no_wrap=True)
    legend = "  ".join(f"{_shade(part.short, plain)} {part.short}" for part, _ in parts)
    for i, (label, pace) in enumerate(paces.items()):
        bar = _bar([(part.short, ms[i] / slowest) for part, ms in parts], plain)
        epoch = summary.epoch_seconds(pace)
        told = "" if epoch is None else f"an epoch {formatting.seconds(epoch)}"
        cells = (Text(bar), say(formatting.milliseconds(pace.total_ms), plain), say(told, plain))
        grid.add_row(say(f"{'batch' if i == 0 else '':11}{label}", plain), *cells)
    yield grid
    yield _labelled("", Text(legend, style="dim"))


def _bar(parts: Sequence[tuple[str, float]], plain: bool) -> str:
    """Return a bar of parts. Each end is rounded, so that the lengths add up."""
    bar, end = "", 0.0
    for name, part in parts:
        end += BAR * part
        bar += _shade(name, plain) * (round(end) - len(bar))
    return bar


def _shade(name: str, plain: bool) -> str:
    return ASCII_SHADES[SHADES[name]] if plain else SHADES[name]


def _labelled(label: str, text: Text, style: str = "bold") -> Table:
    grid = Table.grid(padding=(0, 2, 0, 0), expand=True)
    grid.add_column(no_wrap=True, min_width=9)
    grid.add_column(ratio=1)
    grid.add_row(Text(label, style=style), text)
    return grid
