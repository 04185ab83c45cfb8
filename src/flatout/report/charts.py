"""The report's two charts, and what all charts share: inline SVG with the colours of the page's style sheet."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from flatout import words
from flatout.report import wording
from flatout.report.model import Gain, Pace, Row

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
            title = words.clean(row.title)
            name = title if trial.candidate in ("", row.title) else f"{title}: {words.clean(trial.candidate)}"
            bars.append((name, trial.gain, "kept" if kept else "rejected"))
    if not bars:
        return ""

    low = min(0.0, *(gain.low - 1 for _, gain, _ in bars))
    high = max(0.05, *(gain.high - 1 for _, gain, _ in bars))
    plot = WIDTH - _LABEL - _VALUE
    height = len(bars) * _LINE + 30

    def x(change: float) -> float:
        return _LABEL + (change - low) / (high - low) * plot

    parts = []
    for tick in _ticks(low, high):
        css = "zero" if tick == 0 else "tick"
        label = "as before" if tick == 0 else words.percent(1 + tick, 0)
        parts.append(f'<line class="{css}" x1="{x(tick):.1f}" y1="0" x2="{x(tick):.1f}" y2="{height - 22}"/>')
        parts.append(f'<text class="axis" x="{x(tick):.1f}" y="{height - 6}" text-anchor="middle">{label}</text>')
    for index, (name, gain, css) in enumerate(bars):
        top, middle = index * _LINE + 5, index * _LINE + _LINE / 2
        start, end = sorted((x(0), x(gain.ratio - 1)))
        value = f"{words.percent(gain.ratio)} ({wording.interval(gain)})"
        parts.append(
            f"<g><title>{escape(f'{name}: {value}')}</title>"
            f'<text class="name" x="{_LABEL - 10}" y="{middle + 4}" text-anchor="end">{escape(_short(name))}</text>'
            f'<rect class="{css}" x="{start:.1f}" y="{top}" width="{max(1.5, end - start):.1f}" '
            f'height="{_LINE - 10}" rx="2"/>'
            f'<path class="whisker" d="M{x(gain.low - 1):.1f} {middle}H{x(gain.high - 1):.1f}'
            f'M{x(gain.low - 1):.1f} {middle - 4}v8M{x(gain.high - 1):.1f} {middle - 4}v8"/>'
            f'<text class="value" x="{WIDTH}" y="{middle + 4}" text-anchor="end">{escape(value)}</text></g>'
        )
    return svg(height, "speed gained by every candidate that was timed, with 95 % intervals", parts)


def paces(before: Pace, after: Pace) -> str:
    """Milliseconds per batch before and after, each split into loading and computing.

    Args:
        before: the loop as it came.
        after: the loop with everything kept.
    """
    longest = max(before.load_ms + before.step_ms, after.load_ms + after.step_ms)
    if not (math.isfinite(longest) and longest > 0):
        return ""
    bars = {
        name: [Part("loading", pace.load_ms, "var(--load)"), Part("computing", pace.step_ms, "var(--step)")]
        for name, pace in (("before", before), ("after", after))
    }
    return stacked("milliseconds per batch, loading and computing, before and after", bars, totals=True)


def _short(name: str, limit: int = 38) -> str:
    return name if len(name) <= limit else name[: limit - 1] + "…"


def _ticks(low: float, high: float) -> list[float]:
    """Round positions, zero among them, four to eight of them."""
    span = high - low
    step = 10 ** math.floor(math.log10(span / 4))
    step *= next(factor for factor in (1, 2, 5, 10) if span / (step * factor) <= 7)
    return [n * step for n in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


@dataclass(frozen=True)
class Part:
    """A part of a stacked bar.

    Attributes:
        name: what it is.
        ms: how long, milliseconds.
        colour: of the style sheet.
    """

    name: str
    ms: float
    colour: str


def stacked(label: str, bars: Mapping[str, Sequence[Part]], *, totals: bool = False) -> str:
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
        parts.append(f'<text class="name" x="{begin - 8}" y="{top + 23}" text-anchor="end">{escape(name)}</text>')
        for part in bar:
            width, told = plot * part.ms / longest, words.milliseconds(part.ms)
            parts.append(
                f'<rect style="fill:{part.colour}" x="{x:.1f}" y="{top + 2}" width="{width:.1f}" height="32" rx="2">'
                f"<title>{escape(f'{part.name}: {told}')}</title></rect>"
            )
            if width > _ROOM:
                middle = f'x="{x + width / 2:.1f}" y="{top + 23}" text-anchor="middle"'
                parts.append(f'<text class="inside" {middle}>{told}</text>')
            x += width
        if totals:
            total = words.milliseconds(sum(part.ms for part in bar))
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
        f'aria-label="{escape(label)}">{"".join(parts)}</svg>'
    )
