"""The report's three charts, and what all charts share: inline SVG with the colours of the page's style sheet."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from flatout.core import formatting
from flatout.core.formatting import as_html
from flatout.report import wording
from flatout.report.model import Gain, Pace, Row
from flatout.report.waterfall import Waterfall

WIDTH = 760
_LABEL = 235  # room for names, left of the bars
_VALUE = 185  # room for numbers, right of them
_LINE = 26
_ROOM = 62  # that a number within a bar needs


def gains(rows: tuple[Row, ...]) -> str:
    """One horizontal bar per trial that was timed, with the whisker of its 95 % interval.

    Args:
        rows: of the report.

    Returns:
        An ``<svg>`` element; empty when nothing was timed.
    """
    bars: list[tuple[str, Gain, str]] = []
    for row in rows:
        for trial in row.trials:
            if trial.gain is None or not all(map(math.isfinite, (trial.gain.ratio, trial.gain.low, trial.gain.high))):
                continue
            kept = row.status == "kept" and trial.candidate == row.chosen
            bars.append((wording.name(row, trial.candidate), trial.gain, "kept" if kept else "rejected"))
    if not bars:
        return ""

    low = min(0.0, *(gain.low - 1 for _, gain, _ in bars))
    high = max(0.05, *(gain.high - 1 for _, gain, _ in bars))
    x = _scale(low, high)
    lines = []
    for name, gain, css in bars:
        middle = _LINE / 2
        whisker = (
            f'<path class="whisker" d="M{x(gain.low - 1):.1f} {middle}H{x(gain.high - 1):.1f}'
            f'M{x(gain.low - 1):.1f} {middle - 4}v8M{x(gain.high - 1):.1f} {middle - 4}v8"/>'
        )
        told = f"{formatting.percent(gain.ratio)} ({wording.interval(gain)})"
        lines.append(Line(name, told, _bar(x(0), x(gain.ratio - 1), css) + whisker))
    ticks = {tick: "as before" if tick == 0 else formatting.percent(1 + tick, 0) for tick in _ticks(low, high)}
    return _plot("speed gained by every candidate that was timed, with 95 % intervals", lines, x, ticks)


def falls(fall: Waterfall) -> str:
    """The time of a batch from the loop as it came to the loop as tuned, each bar from where the last one ended."""
    steps = [(wording.name(change.row, change.row.chosen), change.ms, _saved(change.ms)) for change in fall.changes]
    steps.append((wording.UNEXPLAINED, fall.unexplained, "rest"))
    levels = list(accumulate((ms for _, ms, _ in steps), initial=fall.before))
    low, high = min(0.0, *levels), max(levels)
    x = _scale(low, high)

    def line(name: str, told: str, start: float, end: float, css: str) -> Line:
        return Line(name, told, _bar(x(start), x(end), css), leads_on=x(end))

    lines = [line("as it came", formatting.milliseconds(fall.before), 0, fall.before, "whole")]
    for (name, ms, css), (start, end) in zip(steps, pairwise(levels), strict=True):
        lines.append(line(name, wording.change(ms), start, end, css))
    last = line("as tuned", formatting.milliseconds(fall.after), 0, fall.after, "whole")
    ticks = {tick: f"{tick:,g} ms" for tick in _ticks(low, high)}
    label = "milliseconds of a batch, from the loop as it came to the loop as tuned, by technique"
    return _plot(label, [*lines, replace(last, leads_on=None)], x, ticks)


def paces(paces: Mapping[str, Pace]) -> str:
    """Milliseconds per batch of each of these paces, by what they go to; empty where they are not known."""
    whole = [pace.total_ms for pace in paces.values()]
    if not (math.isfinite(sum(whole)) and any(whole)):
        return ""
    times = wording.times(*paces.values())
    bars = {
        name: [Segment(part.name, ms[index], part.colour) for part, ms in times] for index, name in enumerate(paces)
    }
    return stacked(f"milliseconds per batch {' and '.join(paces)}, by what they go to", bars, totals=True)


def _saved(ms: float) -> str:
    return "kept" if ms <= 0 else "rejected"


@dataclass(frozen=True)
class Line:
    """A line of a plot.

    Attributes:
        name: left of it.
        told: the number right of it.
        marks: what is drawn, from the top of the line.
        leads_on: where a thread leads down to the next line; None for none.
    """

    name: str
    told: str
    marks: str
    leads_on: float | None = None


def _scale(low: float, high: float) -> Callable[[float], float]:
    """Positions of values in a plot whose axis goes from ``low`` to ``high``."""
    return lambda value: _LABEL + (value - low) / (high - low) * (WIDTH - _LABEL - _VALUE)


def _bar(start: float, end: float, css: str) -> str:
    """A bar from one position to another, thin but there where they are the same."""
    width = max(1.5, abs(end - start))
    place = f'x="{min(start, end):.1f}" y="5" width="{width:.1f}" height="{_LINE - 10}"'
    return f'<rect class="{css}" {place} rx="2"/>'


def _plot(label: str, lines: Sequence[Line], x: Callable[[float], float], ticks: Mapping[float, str]) -> str:
    """Named lines over a common axis, which is told below them."""
    height = len(lines) * _LINE + 30
    parts = []
    for tick, told in ticks.items():
        css = "zero" if tick == 0 else "tick"
        parts.append(f'<line class="{css}" x1="{x(tick):.1f}" y1="0" x2="{x(tick):.1f}" y2="{height - 22}"/>')
        parts.append(f'<text class="axis" x="{x(tick):.1f}" y="{height - 6}" text-anchor="middle">{told}</text>')
    for index, line in enumerate(lines):
        base = _LINE / 2 + 4
        thread = "" if line.leads_on is None else f'<path class="thread" d="M{line.leads_on:.1f} {_LINE - 5}v10"/>'
        parts.append(
            f'<g transform="translate(0,{index * _LINE})"><title>{as_html(f"{line.name}: {line.told}")}</title>'
            f'<text class="name" x="{_LABEL - 10}" y="{base}" text-anchor="end">{as_html(_short(line.name))}</text>'
            f"{line.marks}{thread}"
            f'<text class="value" x="{WIDTH}" y="{base}" text-anchor="end">{as_html(line.told)}</text></g>'
        )
    return svg(height, label, parts)


def _short(name: str, limit: int = 38) -> str:
    return name if len(name) <= limit else name[: limit - 1] + "…"


def _ticks(low: float, high: float) -> list[float]:
    """Round positions, zero among them, four to eight of them."""
    span = high - low
    step = 10 ** math.floor(math.log10(span / 4))
    step *= next(factor for factor in (1, 2, 5, 10) if span / (step * factor) <= 7)
    return [n * step for n in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


@dataclass(frozen=True)
class Segment:
    """A part of a stacked bar.

    Attributes:
        name: what it is.
        ms: how long, milliseconds.
        colour: of the style sheet.
    """

    name: str
    ms: float
    colour: str


def stacked(label: str, bars: Mapping[str, Sequence[Segment]], *, totals: bool = False) -> str:
    """Horizontal bars of milliseconds, all to one scale.

    Args:
        label: what the chart shows.
        bars: name to parts, from left to right; one of them at least is longer than nothing.
        totals: write each bar's length behind it.
    """
    begin, line = 60, 42
    plot = WIDTH - begin - (110 if totals else 0)
    longest = max(sum(part.ms for part in bar) for bar in bars.values())
    parts = []
    for top, (name, bar) in zip(range(0, len(bars) * line, line), bars.items(), strict=True):
        x = float(begin)
        parts.append(f'<text class="name" x="{begin - 8}" y="{top + 23}" text-anchor="end">{as_html(name)}</text>')
        for part in bar:
            width, told = plot * part.ms / longest, formatting.milliseconds(part.ms)
            parts.append(
                f'<rect style="fill:{part.colour}" x="{x:.1f}" y="{top + 2}" width="{width:.1f}" height="32" rx="2">'
                f"<title>{as_html(f'{part.name}: {told}')}</title></rect>"
            )
            if width > _ROOM:
                middle = f'x="{x + width / 2:.1f}" y="{top + 23}" text-anchor="middle"'
                parts.append(f'<text class="inside" {middle}>{told}</text>')
            x += width
        if totals:
            total = formatting.milliseconds(sum(part.ms for part in bar))
            parts.append(f'<text class="value" x="{x + 8:.1f}" y="{top + 23}">{total}</text>')
    return svg(len(bars) * line, label, parts)


def level(y: float, begin: int, told: str) -> str:
    """A line across a chart, with what it stands for at its left, before ``begin``."""
    return (
        f'<line class="tick" x1="{begin}" y1="{y:.1f}" x2="{WIDTH}" y2="{y:.1f}"/>'
        f'<text class="axis" x="{begin - 8}" y="{y + 4:.1f}" text-anchor="end">{told}</text>'
    )


def svg(height: int, label: str, parts: list[str]) -> str:
    """An ``<svg>`` element of the page's width around its parts."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="{as_html(label)}">{"".join(parts)}</svg>'
    )
