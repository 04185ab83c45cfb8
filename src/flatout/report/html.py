"""HTML of blocks, with charts as inline SVG.

Positions across a chart are percentages, so a chart is as wide as the text, and letters have one size at every width.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from html import escape
from pathlib import Path

from flatout.core import formatting
from flatout.report.document import Block, Cell, Chart, Note, Part, Table

_LINE, _THICK = 26, 40
"""Heights of a bar with its margins, pixels: of a bar with one segment, and of a bar with several."""

_STATUSES = {"kept", "rejected", "advice", "untried", "na"}
"""Styles that a page shows as pills."""

_STYLE = Path(__file__).with_name("style.css")
"""Style sheet, scoped to the class ``flatout``, for light and dark displays, notebooks included."""


def page(title: str, blocks: Iterable[Block]) -> str:
    """Return blocks as one self-contained page."""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>\n'
        f"<title>{_text(title)}</title>\n<style>{_css()}</style></head>\n"
        f'<body class="flatout-page"><div class="flatout">\n{_fragment(blocks)}</div></body></html>\n'
    )


def cell(blocks: Iterable[Block]) -> str:
    """Return blocks for a page of another program, such as a notebook."""
    return f'<div class="flatout"><style>{_css()}</style>\n{_fragment(blocks)}</div>\n'


def _fragment(blocks: Iterable[Block]) -> str:
    """Return blocks without the page around them, and without style."""
    kinds = {Note: _note, Table: _table, Chart: _chart}
    return "".join(f"{kinds[type(block)](block)}\n" for block in blocks)  # type: ignore[operator]


def _text(text: str, *, is_verbatim: bool = False) -> str:
    """Escape a text. Numbers keep their units on the line, and text between backquotes is set as code."""
    if is_verbatim:  # readers copy the text
        return escape(formatting.visible(text))
    text = escape(formatting.unbroken(formatting.clean(text)))
    return re.sub("`([^`\n]+)`", r"<code>\1</code>", text)


def _part(part: Part, css: str = "") -> str:
    """Return a part of a line. A status is shown as a pill."""
    text, style = (part, "") if isinstance(part, str) else part
    if style == "code":
        return f"<code>{_text(text, is_verbatim=True)}</code>"
    css = f"pill {style}" if style in _STATUSES else f"{css} {style}".strip()
    text = _text(text) if text.strip() == text else f" {_text(text)} "
    return f'<span class="{css}">{text}</span>' if css else text


def _line(part: Part) -> str:
    """Return a line of a cell. Spaces before the text indent the line."""
    text, style = (part, "") if isinstance(part, str) else part
    if style in {"code", *_STATUSES}:
        return f"<div>{_part(part)}</div>"
    indent = "\u00a0" * (len(text) - len(text.lstrip()))
    return f'<div class="{style}">{indent}{_text(text)}</div>'


def _css() -> str:
    return _STYLE.read_text(encoding="utf-8")


def _note(note: Note) -> str:
    if note.style == "pre":
        return "".join(f"<pre>{_text(str(part), is_verbatim=True)}</pre>" for part in note.parts)
    tag = {"headline": "h1", "title": "h2"}.get(note.style, "p")
    text = escape(note.gap).join(_part(part, "fact" * bool(note.gap)) for part in note.parts)
    label = f'<span class="label">{_text(note.label)}</span>' if note.label else ""
    return f'<{tag} class="{note.style}">{label}{text}</{tag}>'


def _table(table: Table) -> str:
    names = [' class="number"' if i in table.right else "" for i in range(len(table.headings))]
    heads = (f"<th{css}>{_text(heading)}</th>" for css, heading in zip(names, table.headings, strict=True))
    head = f"<thead><tr>{''.join(heads)}</tr></thead>" if table.headings else ""
    rows = (f"<tr>{''.join(_cell(table, i, cell) for i, cell in enumerate(row))}</tr>" for row in table.rows)
    shown = f"<table>{head}<tbody>{''.join(rows)}</tbody></table>"
    if not table.folded:
        return shown
    return f'<details class="more"><summary>{_text(table.folded)}</summary>{shown}</details>'


def _cell(table: Table, column: int, cell: Cell) -> str:
    """Return a cell with a line for each part. Trials are shown on request."""
    heading = table.headings[column] if table.headings else ""
    parts = [part for part in (cell if isinstance(cell, list) else [cell]) if part]
    trials = [part[0] for part in parts if isinstance(part, tuple) and part[1] == "trial"]
    shown = "".join(_line(part) for part in parts if not (isinstance(part, tuple) and part[1] == "trial"))
    if trials:
        items = "".join(f"<li>{_text(trial)}</li>" for trial in trials)
        shown += f"<details><summary>{formatting.counted(len(trials), 'trial')}</summary><ul>{items}</ul></details>"
    if column in table.right:
        label = f' data-label="{_text(heading)}"' if heading.strip("#") else ""
        return f'<td class="number"{label}>{shown}</td>'
    is_reason = table.is_explained and column == len(table.headings) - 1
    return f'<td class="{"reason" if is_reason else _text(heading)}">{shown}</td>'


def _chart(chart: Chart) -> str:
    low, high = chart.axis
    is_stacked = chart.is_stacked
    height, ticks = (_THICK, []) if is_stacked else (_LINE, _ticks(low, high) if chart.tick else [])

    def x(value: float) -> str:
        return f"{round(100 * (value - low) / (high - low), 2):g}%"

    shown, last = "", ""
    for index, (name, value, parts) in enumerate(chart.bars):
        plot = "".join(_rule(x(at), 0, height, "tick" if at else "zero") for at in ticks)
        for start, end, style, part in parts:
            plot += _segment(x(min(start, end)), abs(end - start) / (high - low), height, style, part, is_stacked)
            if is_stacked and abs(end - start) > 0.18 * (high - low):  # the text fits into the segment
                middle = x((start + end) / 2)
                text = _text(formatting.milliseconds(end - start))
                plot += f'<text class="inside" x="{middle}" y="{height / 2 + 4:g}" text-anchor="middle">{text}</text>'
        interval = chart.intervals[index] if chart.intervals else ()
        if interval:
            plot += _whisker(x(interval[0]), x(interval[1]), height / 2)
        if chart.is_connected and last:
            plot += _rule(last, 0, 5, "thread")
        last = x(parts[-1][1]) if parts else last
        if chart.is_connected and index < len(chart.bars) - 1:
            plot += _rule(last, height - 5, height, "thread")
        shown += _plot(name, plot, value, height)
    if ticks and chart.tick:
        marks = "".join(
            f'<text class="axis" x="{x(at)}" y="14" text-anchor="middle">{_text(chart.tick(at))}</text>' for at in ticks
        )
        shown += _plot("", marks, "", 20, "line scale")
    css = "chart stacked" if is_stacked else "chart"
    legend = "".join(
        f'<span class="entry"><i class="key {style}"></i>{_text(name)}</span>' for style, name in chart.legend.items()
    )
    return f'<div class="{css}" role="img" aria-label="{_text(chart.title)}">{shown}</div>' + (
        f'<p class="quiet">{legend}</p>' if legend else ""
    )


def _plot(name: str, plot: str, value: str, height: int, css: str = "line") -> str:
    svg = f'<svg xmlns="http://www.w3.org/2000/svg" width="100%" height="{height}">{plot}</svg>'
    left, right = (f'<span class="{side}">{_text(text)}</span>' for side, text in (("name", name), ("value", value)))
    return f'<div class="{css}">{left}{svg}{right}</div>'


def _rule(x: str, top: float, bottom: float, css: str) -> str:
    return f'<line class="{css}" x1="{x}" y1="{top:g}" x2="{x}" y2="{bottom:g}"></line>'


def _segment(x: str, share: float, height: int, style: str, name: str, is_stacked: bool) -> str:
    width = f"{round(100 * (share if is_stacked else max(0.003, share)), 2):g}%"
    title = f"<title>{_text(name)}</title>" if name else ""
    return f'<rect class="{style}" x="{x}" y="5" width="{width}" height="{height - 10}" rx="2">{title}</rect>'


def _whisker(low: str, high: str, middle: float) -> str:
    ends = "".join(f'<line x1="{at}" y1="{middle - 4:g}" x2="{at}" y2="{middle + 4:g}"></line>' for at in (low, high))
    across = f'<line x1="{low}" y1="{middle:g}" x2="{high}" y2="{middle:g}"></line>'
    return f'<g class="whisker">{across}{ends}</g>'


def _ticks(low: float, high: float) -> list[float]:
    """Return four to eight round positions, zero among them."""
    span = high - low
    step = 10 ** math.floor(math.log10(span / 4))
    step *= next(factor for factor in (1, 2, 5, 10) if span / (step * factor) <= 7)
    return [n * step for n in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]
