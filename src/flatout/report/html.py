"""The report as HTML, and what every page of flatout is made of."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from html import escape

from flatout.core import formatting
from flatout.report import charts, wording
from flatout.report.model import Gain, Row, Summary, Trial
from flatout.report.style import STYLE
from flatout.report.waterfall import waterfall


def page(title: str, body: str) -> str:
    """A whole document around fragments; it is well-formed XML too.

    Args:
        title: plain text.
        body: HTML.
    """
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
        f'<title>{text(title)}</title><style>{STYLE}</style></head><body class="flatout-page">'
        f'<div class="flatout">{body}</div></body></html>\n'
    )


def embedded(body: str) -> str:
    """A fragment with its style, for a page that is not ours (Jupyter)."""
    return f'<div class="flatout"><style>{STYLE}</style>{body}</div>'


def text(value: str) -> str:
    """Plain text as HTML."""
    return escape(formatting.clean(value))


def marked(value: str) -> str:
    """Plain text as HTML, with what stands between backquotes as code."""
    return re.sub("`([^`\n]+)`", r"<code>\1</code>", text(value))


def table(headings: Iterable[str], rows: Iterable[str], css: str = "") -> str:
    """A table of ``<tr>`` elements under their headings, which are HTML too, of a class of the style sheet."""
    head = "".join(f"<th>{heading}</th>" for heading in headings)
    return f'<table class="{css}"><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table>'


def footer(environment: Mapping[str, str]) -> str:
    """What the figures must be read with, as the last line."""
    facts = " · ".join(f"{text(key)} {text(value)}" for key, value in environment.items())
    return f'<footer class="quiet">{facts}</footer>'


def fragment(summary: Summary) -> str:
    """The report's parts, top to bottom, without document and style."""
    parts = (_header, _pace, _falls, _gains, _checklist, _notes)
    return f"<section>{''.join(part(summary) for part in parts)}</section>"


def _header(summary: Summary) -> str:
    factor = wording.speedup(summary)
    pills = " ".join(_pill(status, f"{number} {status}") for status, number in wording.tally(summary.rows))
    if factor is not None and factor >= 1.01:
        assert summary.before is not None
        assert summary.after is not None
        before, after = (formatting.count(pace.samples_per_second) for pace in (summary.before, summary.after))
        title = f'<span class="factor">{factor:.2f}×</span> the training speed it came with'
        return (
            f'<header><h1>{title}</h1><p class="lead">{before} → {after} samples per second</p><p>{pills}</p></header>'
        )
    return f"<header><h1>{text(wording.headline(summary))}</h1><p>{pills}</p></header>"


def _pace(summary: Summary) -> str:
    paces = wording.paces(summary)
    if not paces:
        return ""
    chart = charts.paces(paces)
    if chart:
        chart += _legend((part.colour, part.name) for part, _ in wording.times(*paces.values()))
    rows = (
        f"<tr><td>{text(figure.name)}</td>{''.join(f'<td>{text(value)}</td>' for value in figure.values)}"
        f'<td class="quiet">{text(figure.meaning)}</td></tr>'
        for figure in wording.figures(*paces.values())
    )
    figures = table(("", *paces, ""), rows, "versus")
    verdict = f"<p>{text(summary.verdict)}</p>" if summary.verdict else ""
    tuned = ""
    if summary.tuning_seconds > 0:
        tuned = f'<p class="quiet">Finding this out took {formatting.seconds(summary.tuning_seconds)}, once.</p>'
    return f"<h2>One batch, {' and '.join(paces)}</h2>{chart}{figures}{verdict}{tuned}"


def _falls(summary: Summary) -> str:
    fall = waterfall(summary)
    if fall is None:
        return ""
    note = (
        "Each bar is the time that a technique takes off a batch, or adds, in a trial of its own with those above it "
        "in use. In the end the whole is timed anew against the loop as it came, and what the trials do not add up to "
        f"is the bar “{wording.UNEXPLAINED}”: techniques that help or hinder one another, steps timed without the "
        "loader beside them, and a machine that is not equally fast all the time."
    )
    return f'<h2>Where the time went</h2>{charts.falls(fall)}<p class="quiet">{note}</p>'


def _legend(keys: Iterable[tuple[str, str]]) -> str:
    """What the colours of a chart stand for: pairs of a colour and a name."""
    told = " ".join(f'<i class="key" style="background:{colour}"></i>{text(name)}' for colour, name in keys)
    return f'<p class="quiet">{told}</p>'


def _gains(summary: Summary) -> str:
    chart = charts.gains(summary.rows)
    if not chart:
        return ""
    legend = _legend((("var(--kept)", "kept"), ("var(--rejected);opacity:.6", "tried, undone")))
    note = (
        "How much faster (right) or slower (left) training runs with each candidate, timed turn by turn against the "
        "loop as it stood then, on this model and data. The line across a bar is the 95 % interval: as far as noise "
        "allows to tell, the gain lies within it."
    )
    return f'<h2>What each candidate brought</h2>{chart}{legend}<p class="quiet">{note}</p>'


def _checklist(summary: Summary) -> str:
    if not summary.rows:
        return ""
    titles = ("#", "technique", "result", "speed", "memory", "usually", "what it does, and why it is in use or not")
    return f"<h2>The checklist</h2>{table(titles, map(_row, summary.rows))}"


def _row(row: Row) -> str:
    css = wording.LOOKS[row.status].css
    chosen = f'<div class="chosen">{text(row.chosen)}</div>' if row.chosen and row.chosen != row.title else ""
    number = "+" if row.number is None else row.number
    purpose = f'<div class="quiet">{marked(wording.purpose(row))}</div>' if wording.purpose(row) else ""
    return (
        f'<tr class="{css}"><td class="number">{number}</td>'
        f'<td class="technique">{text(row.title)}{chosen}</td><td>{_pill(row.status, row.status)}</td>'
        f'<td class="gain">{_gain(row.gain)}</td><td class="gain">{_memory(row)}</td>'
        f'<td><span class="quiet">{text(row.expected)}</span></td>'
        f'<td class="reason">{purpose}<div class="why">{marked(row.why)}</div>{_trials(row)}</td></tr>'
    )


def _gain(gain: Gain | None) -> str:
    if gain is None:
        return ""
    return f"<b>{formatting.percent(gain.ratio)}</b><br/><span>{wording.interval(gain)}</span>"


def _memory(row: Row) -> str:
    return formatting.percent(row.memory) if wording.is_change(row.memory) else ""


def _trials(row: Row) -> str:
    if not row.trials:
        return ""
    number = "1 trial" if len(row.trials) == 1 else f"{len(row.trials)} trials"
    return f"<details><summary>{number}</summary><ul>{''.join(map(_trial, row.trials))}</ul></details>"


def _trial(trial: Trial) -> str:
    told = []
    if trial.gain is not None:
        times = f"{formatting.milliseconds(trial.baseline_ms)} → {formatting.milliseconds(trial.candidate_ms)}"
        told.append(
            f"{times}, {formatting.percent(trial.gain.ratio)} ({wording.interval(trial.gain)}), {trial.pairs} pairs"
        )
    if trial.baseline_bytes is not None and trial.candidate_bytes is not None:
        told.append(
            f"step memory {formatting.size_of(trial.baseline_bytes)} → {formatting.size_of(trial.candidate_bytes)}"
        )
    told += wording.trial_notes(trial)
    return f"<li><b>{text(trial.candidate)}</b>: {text('; '.join(told) or 'not timed')}</li>"


def _pill(status: str, told: str) -> str:
    look = wording.LOOKS[status]  # type: ignore[index]
    return f'<span class="pill {look.css}" title="{escape(look.meaning)}">{look.mark} {text(told)}</span>'


def _notes(summary: Summary) -> str:
    notes = "".join(f"<li>{text(note)}</li>" for note in summary.notes)
    listed = f"<h2>Notes</h2><ul>{notes}</ul>" if notes else ""
    return listed + footer(summary.environment)
