"""Charts as inline SVG. The page's style sheet sets their colors.

Positions across a chart are percentages, so a chart is as wide as the text, and letters have one size at every width.
"""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from flatout.core import formatting

_LINE = 26
"""Height of a bar with its margins, pixels."""

_THICK = 34
"""Height of a stacked bar, pixels."""

_SVG = {"xmlns": "http://www.w3.org/2000/svg", "width": "100%"}


@dataclass(frozen=True)
class Bar:
    """Line of a bar chart.

    Attributes:
        name: text left of the bar.
        value: text right of the bar.
        start: start of the bar on the axis of the chart.
        end: end of the bar on the axis of the chart.
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
    """Part of a stacked bar.

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
    """Draw a bar for each line, over one axis. The axis cuts off whiskers that are much longer than the bars.

    Args:
        label: title for screen readers.
        bars: lines from top to bottom.
        tick: text of a position on the axis.
        reach: smallest end of the axis.
        connected: draw a thread from the end of each bar to the next bar.
    """
    low, high = _axis(bars, reach)
    ticks = _ticks(low, high)

    def x(value: float) -> str:
        return _percent((value - low) / (high - low))

    chart = _chart(label)
    end = None
    for index, bar in enumerate(bars):
        plot = _line(chart, bar.name, bar.value, _LINE)
        for value in ticks:
            _draw(plot, "line", css="tick" if value else "zero", x1=x(value), y1=0, x2=x(value), y2=_LINE)
        left, right = sorted((bar.start, bar.end))
        width = _percent(max(0.003, (right - left) / (high - low)))
        _draw(plot, "rect", css=bar.css, x=x(left), y=5, width=width, height=_LINE - 10, rx=2)
        if bar.interval:
            ends, middle = tuple(map(x, bar.interval)), _LINE / 2
            whisker = _draw(plot, "g", css="whisker")
            _draw(whisker, "line", x1=ends[0], y1=middle, x2=ends[1], y2=middle)
            for at in ends:
                _draw(whisker, "line", x1=at, y1=middle - 4, x2=at, y2=middle + 4)
        if connected and end is not None:
            _draw(plot, "line", css="thread", x1=end, y1=0, x2=end, y2=5)
        end = x(bar.end)
        if connected and index < len(bars) - 1:
            _draw(plot, "line", css="thread", x1=end, y1=_LINE - 5, x2=end, y2=_LINE)
    axis = _line(chart, "", "", 20, css="scale")
    for value in ticks:
        _draw(axis, "text", tick(value), css="axis", x=x(value), y=14, text_anchor="middle")
    return _markup(chart)


def _axis(bars: Sequence[Bar], reach: float) -> tuple[float, float]:
    """Return the ends of the axis. Whiskers lengthen each side of the axis by half the length of the bars at most."""
    ends = [0.0, reach, *(end for bar in bars for end in (bar.start, bar.end))]
    whiskers = [*ends, *(end for bar in bars for end in bar.interval)]
    low, high = min(ends), max(ends)
    room = (high - low) / 2
    return max(low - room, min(whiskers)), min(high + room, max(whiskers))


def stacked(label: str, bars: Mapping[str, Sequence[Segment]]) -> Markup:
    """Draw horizontal bars of segments, all on one scale, each with its length.

    Args:
        label: title for screen readers.
        bars: segments of each bar, from left to right. At least one bar has a length.
    """
    longest = max(sum(part.ms for part in bar) for bar in bars.values())
    chart = _chart(label, "stacked")
    for name, bar in bars.items():
        total = formatting.milliseconds(sum(part.ms for part in bar))
        plot = _line(chart, name, total, _THICK + 6)
        begin = 0.0
        for part in bar:
            length, value = part.ms / longest, formatting.milliseconds(part.ms)
            x, width = _percent(begin), _percent(length)
            segment = _draw(plot, "rect", style=f"fill:{part.color}", x=x, y=3, width=width, height=_THICK, rx=2)
            _draw(segment, "title", f"{part.name}: {value}")
            if length > 0.18:  # the text fits into the segment
                middle = _percent(begin + length / 2)
                _draw(plot, "text", value, css="inside", x=middle, y=_THICK / 2 + 8, text_anchor="middle")
            begin += length
    return _markup(chart)


def _ticks(low: float, high: float) -> list[float]:
    """Return four to eight round positions, zero among them."""
    span = high - low
    step = 10 ** math.floor(math.log10(span / 4))
    step *= next(factor for factor in (1, 2, 5, 10) if span / (step * factor) <= 7)
    return [n * step for n in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def _chart(label: str, css: str = "") -> ET.Element:
    return ET.Element("div", {"class": f"chart {css}".strip(), "role": "img", "aria-label": formatting.clean(label)})


def _line(chart: ET.Element, name: str, value: str, height: float, css: str = "") -> ET.Element:
    """Append a line with name, plot and value to a chart. Return the plot."""
    line = ET.SubElement(chart, "div", {"class": f"line {css}".strip()})
    _draw(line, "span", name, css="name")
    plot = ET.SubElement(line, "svg", _SVG | {"height": f"{height:g}"})
    _draw(line, "span", value, css="value")
    return plot


def _percent(share: float) -> str:
    return f"{round(100 * share, 2):g}%"


def _draw(parent: ET.Element, tag: str, text: str = "", css: str = "", **attributes: str | float) -> ET.Element:
    """Append an element of class ``css`` to ``parent``. Numbers keep two decimals."""
    element = ET.SubElement(parent, tag, {"class": css} if css else {})
    for name, value in attributes.items():
        element.set(name.replace("_", "-"), value if isinstance(value, str) else f"{round(value, 2):g}")
    element.text = formatting.unbroken(formatting.visible(text))
    return element


def _markup(chart: ET.Element) -> Markup:
    return Markup(ET.tostring(chart, encoding="unicode", short_empty_elements=False))
