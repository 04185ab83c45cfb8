"""HTML form of a report."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import accumulate, pairwise

from markupsafe import Markup

from flatout.core import formatting
from flatout.report import charts, html, wording
from flatout.report.charts import Bar, Segment
from flatout.report.model import Pace, Row, Status, Summary, Trial
from flatout.report.waterfall import Waterfall, waterfall

INAPPLICABLE: tuple[Status, ...] = ("not applicable",)
"""Statuses of rows that the page shows on request."""


def fragment(summary: Summary, *, title: str = "") -> Markup:
    """Return the HTML of the report, without the document around it and without style.

    Args:
        summary: the report.
        title: name of the tuned module, in a report on several modules.
    """
    fall = waterfall(summary)
    return html.render(
        "report.html.j2",
        summary=summary,
        title=title,
        rows=[row for row in summary.rows if row.status not in INAPPLICABLE],
        inapplicable=[row for row in summary.rows if row.status in INAPPLICABLE],
        wording=wording,
        trial_facts=_trial_facts,
        pace_chart=pace_chart(wording.paces(summary)),
        waterfall_chart=waterfall_chart(fall) if fall else "",
        gain_chart=gain_chart(summary.rows),
    )


def pace_chart(paces: Mapping[str, Pace]) -> str:
    """Draw the milliseconds per batch of each pace, by part of the batch. Return "" if the times are unknown."""
    whole = [pace.total_ms for pace in paces.values()]
    if not (math.isfinite(sum(whole)) and any(whole)):
        return ""
    times = wording.times(*paces.values())
    bars = {name: [Segment(part.name, ms[index], part.color) for part, ms in times] for index, name in enumerate(paces)}
    return charts.stacked(f"milliseconds per batch {' and '.join(paces)}, by what they go to", bars)


def waterfall_chart(fall: Waterfall) -> str:
    """Draw the time of a batch from the original loop to the tuned loop. Each bar starts at the end of the last one."""
    steps = [
        (wording.name(change.row, change.row.chosen), change.ms, "kept" if change.ms <= 0 else "rejected")
        for change in fall.changes
    ]
    steps.append((wording.UNEXPLAINED, fall.unexplained, "rest"))
    levels = accumulate((ms for _, ms, _ in steps), initial=fall.before)
    bars = [
        Bar("as it came", formatting.milliseconds(fall.before), 0, fall.before, "whole"),
        *(
            Bar(name, wording.change(ms), start, end, css)
            for (name, ms, css), (start, end) in zip(steps, pairwise(levels), strict=True)
        ),
        Bar("as tuned", formatting.milliseconds(fall.after), 0, fall.after, "whole"),
    ]
    label = "milliseconds of a batch, from the loop as it came to the loop as tuned, by technique"
    return charts.bars(label, bars, lambda ms: f"{ms:,g} ms", connected=True)


def gain_chart(rows: tuple[Row, ...]) -> str:
    """Draw the gain of each timed trial, with its 95 % interval if known. Return "" if nothing was timed."""
    bars = []
    for row in rows:
        for trial in row.trials:
            gain = trial.gain
            if gain is None or not math.isfinite(gain.ratio):
                continue
            value = f"{formatting.percent(gain.ratio)} ({wording.interval(gain, trial.pairs)})"
            css = "kept" if row.status == "kept" and trial.candidate == row.chosen else "rejected"
            interval = tuple(end - 1 for end in gain.interval or ())
            bars.append(Bar(wording.name(row, trial.candidate), value, 0, gain.ratio - 1, css, interval))
    if not bars:
        return ""
    label = "speed gained by every candidate that was timed, with 95 % intervals"
    return charts.bars(label, bars, lambda gain: formatting.percent(1 + gain, 0) if gain else "as before", reach=0.05)


def _trial_facts(trial: Trial) -> list[str]:
    """Return the facts about a trial, numbers first."""
    facts = []
    if trial.gain is not None:
        times = f"{formatting.milliseconds(trial.baseline_ms)} → {formatting.milliseconds(trial.paired_ms)}"
        gain = f"{formatting.percent(trial.gain.ratio)} ({wording.interval(trial.gain, trial.pairs)})"
        facts.append(f"{times}, {gain}, {trial.pairs} pairs" if trial.gain.interval else f"{times}, {gain}")
    if trial.baseline_bytes is not None and trial.candidate_bytes is not None:
        before, after = formatting.size_of(trial.baseline_bytes), formatting.size_of(trial.candidate_bytes)
        facts.append(f"step memory {before} → {after}")
    return facts + wording.trial_notes(trial)
