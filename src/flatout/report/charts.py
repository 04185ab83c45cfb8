"""Charts as inline SVG. The page's style sheet sets their colors."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from markupsafe import Markup

from flatout.core import formatting

WIDTH = 760
_NAMES = 235  # width of the names, left of the bars
_VALUES = 185  # width of the values, right of the bars
_LINE = 26  # height of a bar with its margins
_AXIS = 64  # width of the numbers, left of columns and areas
_SVG = {"xmlns": "http://www.w3.org/2000/svg", "role": "img"}
_TOP = 8  # margin above columns and areas


@dataclass(frozen=True)
class Bar:
    """Line of a bar chart.

    Attributes:
        name: text left of the bar.
        value: text right of the bar.
        start: where the bar starts, on the axis of the chart.
        end: where the bar ends.
        css: class of the style sheet.
        interval: ends of the whisker; empty draws none.
    """

    name: str
    value: str
    start: float
    end: float
    css: str
    interval: tuple[float, ...] = ()


@dataclass(frozen=True)
class Segment:
    """Part of a stacked bar or column.

    Attributes:
        name: text of the tooltip.
        ms: length, milliseconds.
        color: color of the style sheet.
    """

    name: str
    ms: float
    color: str


def bars(
    label: str, bars: Sequence[Bar], tick: Callable[[float], str], *, reach: float = 0.0, connected: bool = False
) -> Markup:
    """Draw a bar for each line, over one axis.

    Args:
        label: title for screen readers.
        bars: lines from top to bottom.
        tick: text of a position on the axis.
        reach: smallest end of the axis.
        connected: draw a thread from the end of each bar to the next bar.
    """
    ends = [0.0, reach, *(end for bar in bars for end in (bar.start, bar.end, *bar.interval))]
    low, high = min(ends), max(ends)

    def x(value: float) -> float:
        return _NAMES + (value - low) / (high - low) * (WIDTH - _NAMES - _VALUES)

    height = len(bars) * _LINE + 30
    svg = _svg(label, height)
    for value in _ticks(low, high):
        _draw(svg, "line", css="tick" if value else "zero", x1=x(value), y1=0, x2=x(value), y2=height - 22)
        _draw(svg, "text", tick(value), css="axis", x=x(value), y=height - 6, text_anchor="middle")
    for index, bar in enumerate(bars):
        line = _draw(svg, "g", transform=f"translate(0,{index * _LINE})")
        _draw(line, "title", f"{bar.name}: {bar.value}")
        name = bar.name if len(bar.name) <= 38 else f"{bar.name[:37]}…"
        _draw(line, "text", name, css="name", x=_NAMES - 10, y=_LINE / 2 + 4, text_anchor="end")
        left, right = sorted((x(bar.start), x(bar.end)))
        _draw(line, "rect", css=bar.css, x=left, y=5, width=max(1.5, right - left), height=_LINE - 10, rx=2)
        if bar.interval:
            start, end = map(x, bar.interval)
            d = f"M{start:.1f} {_LINE / 2}H{end:.1f}M{start:.1f} {_LINE / 2 - 4}v8M{end:.1f} {_LINE / 2 - 4}v8"
            _draw(line, "path", css="whisker", d=d)
        if connected and index < len(bars) - 1:
            _draw(line, "path", css="thread", d=f"M{x(bar.end):.1f} {_LINE - 5}v10")
        _draw(line, "text", bar.value, css="value", x=WIDTH, y=_LINE / 2 + 4, text_anchor="end")
    return _markup(svg)


def stacked(label: str, bars: Mapping[str, Sequence[Segment]], *, totals: bool = False) -> Markup:
    """Draw horizontal bars of segments, all on one scale.

    Args:
        label: title for screen readers.
        bars: segments of each bar, from left to right; one bar at least has a length.
        totals: write the length of each bar at its end.
    """
    left, line = 60, 42
    width = WIDTH - left - (110 if totals else 0)
    longest = max(sum(part.ms for part in bar) for bar in bars.values())
    svg = _svg(label, len(bars) * line)
    for top, (name, bar) in zip(range(0, len(bars) * line, line), bars.items(), strict=True):
        x = float(left)
        _draw(svg, "text", name, css="name", x=left - 8, y=top + 23, text_anchor="end")
        for part in bar:
            length, value = width * part.ms / longest, formatting.milliseconds(part.ms)
            rect = _draw(svg, "rect", style=f"fill:{part.color}", x=x, y=top + 2, width=length, height=32, rx=2)
            _draw(rect, "title", f"{part.name}: {value}")
            if length > 62:  # the text fits into the segment
                _draw(svg, "text", value, css="inside", x=x + length / 2, y=top + 23, text_anchor="middle")
            x += length
        if totals:
            total = formatting.milliseconds(sum(part.ms for part in bar))
            _draw(svg, "text", total, css="value", x=x + 8, y=top + 23)
    return _markup(svg)


def columns(label: str, columns: Mapping[str, Sequence[Segment]], longest: float) -> Markup:
    """Draw numbered columns of segments, from the bottom up.

    Args:
        label: title for screen readers.
        columns: segments of each column, by the text of its tooltip.
        longest: milliseconds of the longest column.
    """
    height = 150
    distance = (WIDTH - _AXIS) / len(columns)
    width = min(60.0, distance * 0.8)
    svg = _svg(label, height + 30)
    for share in (0.0, 0.5, 1.0):
        _level(svg, _TOP + height * (1 - share), formatting.milliseconds(share * longest))
    for index, (title, parts) in enumerate(columns.items()):
        middle, y = _AXIS + (index + 0.5) * distance, float(_TOP + height)
        column = _draw(svg, "g")
        _draw(column, "title", title)
        for part in parts:
            length = height * part.ms / longest
            y -= length
            _draw(column, "rect", style=f"fill:{part.color}", x=middle - width / 2, y=y, width=width, height=length)
        _draw(column, "text", str(index + 1), css="axis", x=middle, y=height + 24, text_anchor="middle")
    return _markup(svg)


def area(label: str, points: Sequence[tuple[float, float]], end: float, peak: float) -> Markup:
    """Draw bytes over seconds, as the area below a line of steps.

    Args:
        label: title for screen readers.
        points: pairs of seconds and bytes, in order.
        end: seconds at the right edge.
        peak: bytes at the upper edge.
    """
    height = 130
    low = min(0.0, *(value for _, value in points))
    span = max(1.0, peak - low)

    def x(time: float) -> float:
        return _AXIS + (WIDTH - _AXIS) * min(1.0, time / end)

    def y(value: float) -> float:
        return _TOP + height * (1 - (value - low) / span)

    start, first = points[0]
    line = f"M{x(start):.1f} {y(first):.1f}"
    for (_, before), (time, value) in pairwise([*points, (end, points[-1][1])]):
        line += f"L{x(time):.1f} {y(before):.1f}L{x(time):.1f} {y(value):.1f}"
    svg = _svg(label, height + 32)
    for value in (low, (low + peak) / 2, peak):
        _level(svg, y(value), formatting.size_of(value))
    below = f"{line}L{x(end):.1f} {y(low):.1f}L{x(start):.1f} {y(low):.1f}Z"
    _draw(svg, "path", d=below, style="fill:var(--step);opacity:.25")
    _draw(svg, "path", d=line, style="fill:none;stroke:var(--step);stroke-width:1.5")
    for share, anchor in ((0.0, "start"), (0.5, "middle"), (1.0, "end")):
        text = formatting.milliseconds(1e3 * share * end)
        _draw(svg, "text", text, css="axis", x=x(share * end), y=height + 26, text_anchor=anchor)
    return _markup(svg)


def share_bar(share: float) -> Markup:
    """Draw a small bar for the cell of a table, full at 1."""
    svg = ET.Element("svg", _SVG | {"viewBox": "0 0 90 12", "style": "width:90px", "aria-hidden": "true"})
    _draw(svg, "rect", css="step", x=0, y=1, width=90 * share, height=10, rx=2)
    return _markup(svg)


def _ticks(low: float, high: float) -> list[float]:
    """Return four to eight round positions, zero among them."""
    span = high - low
    step = 10 ** math.floor(math.log10(span / 4))
    step *= next(factor for factor in (1, 2, 5, 10) if span / (step * factor) <= 7)
    return [n * step for n in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def _svg(label: str, height: float) -> ET.Element:
    return ET.Element("svg", _SVG | {"viewBox": f"0 0 {WIDTH} {height}", "aria-label": label})


def _draw(parent: ET.Element, tag: str, text: str = "", css: str = "", **attributes: str | float) -> ET.Element:
    """Append an element of class ``css`` to ``parent``; numbers keep two decimals."""
    element = ET.SubElement(parent, tag, {"class": css} if css else {})
    for name, value in attributes.items():
        element.set(name.replace("_", "-"), value if isinstance(value, str) else f"{round(value, 2):g}")
    element.text = formatting.visible(text)
    return element


def _level(svg: ET.Element, y: float, text: str) -> None:
    """Draw a line across a chart, with its value at the left."""
    _draw(svg, "line", css="tick", x1=_AXIS, y1=y, x2=WIDTH, y2=y)
    _draw(svg, "text", text, css="axis", x=_AXIS - 8, y=y + 4, text_anchor="end")


def _markup(svg: ET.Element) -> Markup:
    return Markup(ET.tostring(svg, encoding="unicode"))
