"""Waterfall from the original loop to the tuned loop, which accounts for the whole difference."""

import math
import xml.etree.ElementTree as ET
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.report import Gain, Pace, Report, Row, Summary, Trial, wording
from flatout.report.wording import waterfall
from tests.renderings.rendered import root_of
from tests.report.drawn import charts as charts_of
from tests.report.drawn import lines, share
from tests.report.report_sample import HOSTILE, sample

MS = st.floats(0, 1e4)


def row(name: str, before: float, ratio: float, **changes: object) -> Row:
    trial = Trial("on", before, math.nan, Gain(ratio, 0.9, 1.1), 20)
    return replace(Row(name, None, f"technique {name}", "kept", "It pays.", "on", trial.gain, (trial,)), **changes)


@st.composite
def summaries(draw: st.DrawFn) -> Summary:
    """Draw any mix of rows: kept by a trial, kept by a rule, rejected, without a finite time, named but missing."""
    names = draw(st.lists(st.sampled_from("abcdefgh"), unique=True))
    time = st.one_of(MS, st.just(math.nan), st.just(math.inf))
    rows = []
    for name in names:
        kind = draw(st.sampled_from(["won", "won", "forced", "rejected"]))
        made = row(name, draw(time), draw(st.one_of(st.floats(0.1, 10), st.sampled_from([0.0, math.nan, math.inf]))))
        if kind == "forced":
            made = replace(made, trials=(), gain=None)
        if kind == "rejected":
            made = replace(made, status="rejected", chosen="")
        rows.append(made)
    won = draw(st.permutations([*names, "not there"]))
    before, after = (Pace(draw(MS), draw(MS), 1.0) for _ in range(2))
    return Summary(tuple(rows), {}, before, after, won=tuple(won[: draw(st.integers(0, len(won)))]))


@given(summaries())
def test_first_bar_and_changes_make_the_last(summary: Summary) -> None:
    *changes, unexplained = waterfall(summary) or [("", 0.0)]
    timed = {
        row.technique: row.trials[0].baseline_ms / row.gain.ratio - row.trials[0].baseline_ms
        for row in summary.rows
        if row.chosen and row.trials and row.gain.ratio
    }
    expected = [(name, timed[name]) for name in summary.won if math.isfinite(timed.get(name, math.nan))]
    before, after = summary.before.total_ms, summary.after.total_ms
    if not changes:
        assert not expected or before == 0
        assert not fall_charts(Report(summary))
        return
    assert [name for name, _ in changes] == [f"technique {name}: on" for name, _ in expected]
    assert [ms for _, ms in changes] == pytest.approx([ms for _, ms in expected], abs=1e-9)
    assert before + sum(ms for _, ms in changes) + unexplained[1] == pytest.approx(after, abs=1e-6)

    (drawn,) = fall_charts(Report(summary))
    first, *steps, last = lines(drawn)
    levels = [before]
    for _, ms in expected:
        levels.append(levels[-1] + ms)
    levels.append(after)
    scale = 100 / (max(levels) - min(0.0, *levels))

    def x(level: float) -> float:
        return (level - min(0.0, *levels)) * scale

    spans = [(0.0, before), *pairwise(levels), (0.0, after)]
    for (_, _, bar), ends in zip([first, *steps, last], spans, strict=True):
        assert share(bar, "x") == pytest.approx(x(min(ends)), abs=0.02)
        assert share(bar, "width") == pytest.approx(max(0.3, x(max(ends)) - x(min(ends))), abs=0.02)


def fall_charts(report: Report) -> list[ET.Element]:
    """Return the waterfalls of a page."""
    return [drawn for drawn in charts_of(root_of(report)) if drawn.attrib["aria-label"].startswith("milliseconds of a")]


def test_every_technique_that_a_trial_kept_is_shown_in_order() -> None:
    (drawn,) = fall_charts(Report(sample()))
    found = lines(drawn)
    assert [(name, value, bar.attrib["class"]) for name, value, bar in found] == [
        (found[0][0], "6.20 ms", "whole"),
        ("Fused optimizer: flatout AdamW", "−0.326 ms", "kept"),
        ("torch.compile: default", "−1.19 ms", "kept"),
        ("Data in memory: cached tensors", "−2.12 ms", "kept"),
        (wording.UNEXPLAINED, "−0.581 ms", "rest"),
        (found[-1][0], "1.98 ms", "whole"),
    ]


def test_a_technique_that_costs_time_is_shown_as_slower() -> None:
    summary = Summary((row("a", 2.0, 0.8),), {}, Pace(4.0, 1.0, 1.0), Pace(4.0, 1.25, 1.0), won=("a",))
    (drawn,) = fall_charts(Report(summary))
    found = lines(drawn)
    assert [(value, bar.attrib["class"]) for _, value, bar in found[1:-1]] == [
        ("+0.500 ms", "rejected"),
        ("−0.250 ms", "rest"),
    ]


@pytest.mark.parametrize(
    "changes",
    [
        {"won": ()},
        {"before": None},
        {"after": None},
        {"before": Pace(math.nan, 0.0, 1.0)},
        {"before": Pace(0.0, 0.0, 0.0)},
        {"won": ("advice", "pinned", "nobody")},
    ],
)
def test_unknown_figures_draw_no_chart(changes: dict[str, object]) -> None:
    summary = replace(sample(), **changes)
    assert waterfall(summary) == []
    assert not fall_charts(Report(summary))


def test_hostile_names_are_escaped() -> None:
    hostile = row("a", 2.0, 2.0, title=HOSTILE)
    report = Report(Summary((hostile,), {}, Pace(4.0, 1.0, 1.0), Pace(3.0, 1.0, 1.0), won=("a",)))
    assert "<script" not in report._repr_html_()
    assert "\x1b" not in report._repr_html_()
    (drawn,) = fall_charts(report)
    assert any("<script>" in (element.text or "") for element in drawn.iter())
