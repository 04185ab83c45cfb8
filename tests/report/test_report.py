"""What a reader of the report gets, whichever way it is looked at."""

import dataclasses
import io
import json
import math
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_sample import HOSTILE, compile_row, sample
from rich.console import Console

from flatout import words
from flatout.report import Gain, Pace, Report, Row, Summary, terminal, wording
from flatout.report.charts import _ticks

EMPTY = Summary(rows=(), environment={})


def shown(report: Report, width: int, **options: object) -> str:
    sink = io.StringIO()
    Console(file=sink, width=width, **options).print(report)  # type: ignore[arg-type]
    return sink.getvalue()


def chart(root: ET.Element, begins: str) -> ET.Element:
    """The chart whose label begins with these words."""
    (found,) = (element for element in root.iter() if element.attrib.get("aria-label", "").startswith(begins))
    return found


def widths(element: ET.Element) -> list[float]:
    return [float(e.attrib["width"]) for e in element.iter() if e.tag.endswith("rect")]


def squeezed(text: str) -> str:
    """Without the wrapping: one space between words."""
    return " ".join(text.split())


@pytest.mark.parametrize("width", [80, 140])
@pytest.mark.parametrize("ascii_only", [False, True])
def test_every_row_is_told_at_every_width(width: int, ascii_only: bool) -> None:
    summary = sample()
    lines = terminal.to_text(summary, width, ascii_only).splitlines()
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    for row in summary.rows:
        assert row.title in text
        first_words = " ".join(row.why.split()[:3])
        assert first_words in squeezed(text), f"the reason of {row.technique} is missing"
    assert sum(status in line for line in lines[3:] for status in wording.LOOKS) == len(summary.rows)
    if ascii_only:
        assert text.isascii()
        assert "?" not in text  # what stands for a character without an ASCII form


def test_reasons_are_whole_where_lines_are_not_in_columns() -> None:
    text = squeezed(terminal.to_text(sample(), 80, False))
    for row in sample().rows:
        assert squeezed(words.clean(row.why)) in text


def test_gain_pace_cost_and_environment_are_told() -> None:
    text = squeezed(terminal.to_text(sample(), 80, False))
    assert "torch.compile · default ✓ kept +41 % (+38 … +44 %)" in text
    assert "31 s to set up, pays back after 26,000 steps" in text
    assert "wait for data forward backward update rest = a batch" in text
    assert "before 2.10 ms 1.23 ms 2.05 ms 0.615 ms 0.205 ms 6.20 ms" in text
    assert "after 0.080 ms 0.570 ms 0.950 ms 0.285 ms 0.095 ms 1.98 ms" in text
    assert "samples/s 5,161 16,162 what" in text
    assert "loader alone 15,238 400,000 samples/s" in text
    assert "step alone 7,805 16,842 samples/s" in text
    assert "step memory 1.91 MiB 1.18 MiB what" in text
    assert "MFU 2.1 % 6.6 % share" in text
    assert "3.13× the speed it came with" in text
    assert "measuring took 45 s" in text
    assert "torch 2.14.1" in text
    assert "4 not applicable" in text
    for width in (80, 140):
        text = squeezed(terminal.to_text(sample(), width, False))
        assert "Multiplies matrices in numbers of" in text
        assert "memory −38 %" in text
        assert text.count("usually") == 1
        assert "usually up to 2×" in text


def test_print_gives_text_without_colour_and_a_console_gives_colour() -> None:
    report = Report(sample())
    assert "torch.compile" in str(report)
    assert "\x1b" not in str(report)
    coloured = shown(report, 100, force_terminal=True, color_system="truecolor")
    assert "\x1b[1;32m✓ kept" in coloured
    assert "\x1b[31m" not in coloured  # the hostile text's own escape


def test_hostile_text_is_shown_as_it_is() -> None:
    text = squeezed(terminal.to_text(sample(), 140, False))
    assert "[red]not markup[/red]" in text


def test_ascii_is_chosen_where_standard_output_has_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    assert str(Report(sample())).isascii()


@pytest.mark.parametrize("summary", [sample(), EMPTY], ids=["sample", "empty"])
def test_json_round_trip(summary: Summary, tmp_path: object) -> None:
    file = tmp_path / "report.json"  # type: ignore[operator]
    text = Report(summary).to_json(file)
    assert json.loads(text)["schema"] == 1
    assert json.loads(file.read_text()) == Report(summary).to_dict()
    for source in (text, file, str(file)):
        again = Report.from_json(source)
        assert again.to_dict() == Report(summary).to_dict()
    if not summary.rows:
        assert Report.from_json(text).summary == summary
    else:
        again = Report.from_json(text).summary
        assert (again.before, again.after, again.won) == (summary.before, summary.after, summary.won)
        assert again.rows[9] == summary.rows[9]


def test_a_report_from_before_there_was_a_waterfall_is_read() -> None:
    data = Report(sample()).to_dict()
    del data["won"], data["before"]["loader_per_second"]
    for row in data["rows"]:
        del row["purpose"]
    again = Report.from_json(json.dumps(data)).summary
    assert again.won == ()
    assert again.before.loader_per_second is None
    assert again.rows[9].purpose == ""


def test_numbers_that_json_lacks_come_back_as_nan() -> None:
    row = dataclasses.replace(compile_row(), trials=compile_row().trials[1:])
    text = Report(Summary((row,), {})).to_json()
    assert "NaN" not in text
    (trial,) = Report.from_json(text).rows[0].trials
    assert math.isnan(trial.candidate_ms)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "must be JSON"),
        ("[]", "key 'schema'"),
        ('{"schema": 99}', "schema must be 1, got 99"),
        ('{"schema": 1, "environment": {}}', "lacks the field 'rows'"),
        ('{"schema": 1, "rows": 3, "environment": {}}', "of the wrong kind"),
    ],
)
def test_what_is_no_report_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint.replace("(", r"\(")):
        Report.from_json(text)


def test_an_unknown_status_is_refused() -> None:
    data = Report(sample()).to_json().replace('"advice",', '"great",')
    with pytest.raises(ValueError, match=r"status must be one of kept, .*; got 'great'"):
        Report.from_json(data)


def test_page_is_well_formed_self_contained_and_escaped(tmp_path: object) -> None:
    file = tmp_path / "report.html"  # type: ignore[operator]
    Report(sample()).to_html(file)
    text = file.read_text(encoding="utf-8")
    root = ET.fromstring(text)  # fails on an unclosed or badly nested tag, and on control characters
    assert root.tag == "html"
    tags = {element.tag.rpartition("}")[2] for element in root.iter()}
    assert not tags & {"script", "link", "img", "iframe"}
    assert "url(" not in text
    assert "@import" not in text
    said = "".join(root.itertext())
    assert words.clean(HOSTILE) in said
    for row in sample().rows:
        assert row.title in said
        assert words.clean(row.why) in said
    assert "−38 %" in said
    assert "up to 2×" in said
    assert "1.91 MiB → 1.18 MiB" in said
    assert "prefers-color-scheme:dark" in text


def test_chart_has_a_bar_and_a_whisker_per_timed_trial() -> None:
    root = ET.fromstring(Report(sample())._repr_html_())
    gains = chart(root, "speed")
    timed = [trial for row in sample().rows for trial in row.trials if trial.gain is not None]
    bars = [e for e in gains.iter() if e.tag.endswith("rect")]
    assert len(bars) == len(timed) == 6
    assert sum(e.attrib.get("class") == "whisker" for e in gains.iter()) == 6
    assert [e.attrib["class"] for e in bars].count("kept") == 3


def test_phases_are_stacked_on_one_scale() -> None:
    before, *_ = parts = widths(chart(ET.fromstring(Report(sample())._repr_html_()), "milliseconds per batch"))
    assert len(parts) == 10
    expected = [2.1, 4.1 * 0.3, 4.1 * 0.5, 4.1 * 0.15, 4.1 * 0.05, 0.08, 1.9 * 0.3, 1.9 * 0.5, 1.9 * 0.15, 1.9 * 0.05]
    assert [width / before * 2.1 for width in parts] == pytest.approx(expected, abs=0.005)


@given(
    load=st.floats(0, 1e3),
    step=st.floats(1e-3, 1e3),
    shares=st.dictionaries(st.sampled_from(["forward", "backward", "update", "other"]), st.floats(0, 1), max_size=4),
)
def test_the_parts_of_a_batch_add_up(load: float, step: float, shares: dict[str, float]) -> None:
    whole = max(1.0, sum(shares.values()))
    pace = Pace(step, load, 1.0, phases={name: share / whole for name, share in shares.items()})
    times = wording.times(pace, Pace(1.0, 0.0, 1.0, phases=pace.phases))
    assert sum(ms[0] for _, ms in times) == pytest.approx(pace.total_ms)
    assert all(any(ms) for _, ms in times)


def test_a_step_is_whole_where_one_side_has_no_phases() -> None:
    before = dataclasses.replace(sample().before, phases={}, loader_per_second=None, mfu=None, step_bytes=None)
    summary = dataclasses.replace(sample(), before=before)
    text = squeezed(terminal.to_text(summary, 80, False))
    assert "wait for data step = a batch" in text
    assert "before 2.10 ms 4.10 ms 6.20 ms" in text
    assert "loader alone 400,000 samples/s" in text
    parts = widths(chart(ET.fromstring(Report(summary)._repr_html_()), "milliseconds per batch"))
    assert len(parts) == 4
    assert parts[0] / parts[1] == pytest.approx(2.1 / 4.1, rel=0.01)
    assert sum(parts[2:]) / sum(parts[:2]) == pytest.approx(1.98 / 6.2, rel=0.01)


def test_what_nobody_knows_is_left_out() -> None:
    bare = dataclasses.replace(sample(), before=Pace(4.1, 2.1, 5161.3), after=Pace(1.9, 0.08, 16161.6), won=())
    for text in (terminal.to_text(bare, 80, False), Report(bare)._repr_html_()):
        assert "step alone" in text
        for unknown in ("loader alone", "on top of parameters", "MFU"):
            assert unknown not in text
    nothing = dataclasses.replace(bare, before=Pace(math.nan, math.nan, math.nan), after=Pace(1.0, 0.0, 1.0))
    root = ET.fromstring(Report(nothing)._repr_html_())
    assert not [e for e in root.iter() if e.attrib.get("aria-label", "").startswith("milliseconds")]
    assert "before ? ? ?" in squeezed(terminal.to_text(nothing, 80, False))


def test_a_loop_that_was_not_raced_tells_its_pace_and_no_factor() -> None:
    summary = dataclasses.replace(sample(), before=None)
    text = squeezed(terminal.to_text(summary, 80, False))
    assert "no time left to race it" in text
    assert "before" not in text.split("= a batch")[1].split("what training")[0]
    assert "after 0.080 ms 0.570 ms" in text
    assert "samples/s 16,162 what training" in text
    root = ET.fromstring(Report(summary)._repr_html_())
    assert len(widths(chart(root, "milliseconds per batch after"))) == 5
    assert "One batch, after" in "".join(root.itertext())


def test_names_of_code_are_set_as_code() -> None:
    row = Row("x", 1, "X", "rejected", "`a<b>` is slower", purpose="calls `fit`")
    said = Report(Summary((row,), {}))._repr_html_()
    assert "<code>a&lt;b&gt;</code> is slower" in said
    assert "Calls <code>fit</code>." in said


def test_bars_that_lose_end_left_of_zero_and_bars_that_win_right_of_it() -> None:
    root = chart(ET.fromstring(Report(sample())._repr_html_()), "speed")
    zero = next(float(e.attrib["x1"]) for e in root.iter() if e.attrib.get("class") == "zero")
    for group in (e for e in root.iter() if e.tag.endswith("}g")):
        bar = next(e for e in group if e.tag.endswith("rect"))
        left = float(bar.attrib["x"])
        loses = "−" in "".join(group[0].itertext()).split("(")[0]
        assert (left < zero - 1) == loses


@pytest.mark.parametrize("summary", [EMPTY, Summary(sample().rows[:1], {}, Pace(0.0, 0.0, 0.0), Pace(0.0, 0.0, 0.0))])
def test_a_report_with_nothing_timed_is_still_a_report(summary: Summary) -> None:
    report = Report(summary)
    ET.fromstring(report._repr_html_())
    assert "nothing was timed" in str(report)
    assert "nothing was timed" in repr(report)


def test_row_by_name() -> None:
    assert Report(sample()).row("compile").number == 9
    with pytest.raises(KeyError, match="no row 'compiler'; there are: pinned, "):
        Report(sample()).row("compiler")


@pytest.mark.parametrize(
    ("ratio", "said"),
    [(1.25, "+25 %"), (1.031, "+3.1 %"), (0.985, "−1.5 %"), (1.0, "0.0 %"), (0.9999, "0.0 %"), (math.nan, "?")],
)
def test_percent(ratio: float, said: str) -> None:
    assert words.percent(ratio) == said


def test_interval_has_the_decimals_of_its_gain() -> None:
    assert wording.interval(Gain(1.5, 1.05, 1.9)) == "+5 … +90 %"
    assert wording.interval(Gain(1.05, 0.99, 1.2)) == "−1.0 … +20.0 %"


@pytest.mark.parametrize(
    ("value", "said"),
    [(0.0, "0.00 ms"), (0.4123, "0.412 ms"), (6.234, "6.23 ms"), (184.2, "184 ms"), (2100, "2,100 ms")],
)
def test_milliseconds(value: float, said: str) -> None:
    assert words.milliseconds(value) == said


@pytest.mark.parametrize(("value", "said"), [(8.44, "8.4 s"), (75.2, "75 s"), (250.0, "4 min 10 s")])
def test_seconds(value: float, said: str) -> None:
    assert words.seconds(value) == said


@pytest.mark.parametrize(("low", "high"), [(0.0, 0.05), (-0.5, 0.6), (-0.9, 12.0), (0.0, 0.2)])
def test_ticks_are_few_and_hold_zero(low: float, high: float) -> None:
    ticks = _ticks(low, high)
    assert 0 in ticks
    assert 2 <= len(ticks) <= 8
    assert all(low - 1e-9 <= tick <= high + 1e-9 for tick in ticks)


def test_every_status_has_a_look() -> None:
    statuses = {row.status for row in sample().rows}
    assert statuses == set(wording.LOOKS)
    assert isinstance(sample().rows[0], Row)


def test_a_run_of_rows_with_one_reason_tells_it_once() -> None:
    rows = tuple(Row(f"t{i}", i, f"Technique {i}", "not built yet", "Comes later.") for i in range(5))
    text = terminal.to_text(Summary(rows, {}), 80, False)
    assert text.count("Comes later.") == 1
    assert all(row.title in text for row in rows)
    purposeful = tuple(Row(f"t{i}", i, f"T {i}", "not tried", "No time.", purpose=f"does {i}") for i in range(3))
    text = squeezed(terminal.to_text(Summary(purposeful, {}), 80, False))
    assert all(f"Does {i}. No time." in text for i in range(3))


@pytest.mark.parametrize("width", [60, 80, 140])
def test_each_finding_of_advice_has_a_line_of_its_own_and_long_places_are_whole(width: int) -> None:
    place = f"/home/somebody/{'a_long_folder/' * 12}train.py:1234"
    findings = (f"{place}: Images.__getitem__ (float, div) takes 1.20 ms", "data.py:7: Normalize takes 0.30 ms")
    row = Row("transforms", 13, "transforms on the device", "advice", "\n".join(findings))
    text = terminal.to_text(Summary((row,), {}), width, False)
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    assert any(line.strip().startswith("data.py:7: Normalize") or "  data.py:7: Normalize" in line for line in lines)
    assert "".join(place.split()) in "".join(text.replace("→ advice", "").replace("13", "", 1).split())
    root = ET.fromstring(Report(Summary((row,), {}))._repr_html_())
    (why,) = (element for element in root.iter() if element.attrib.get("class") == "why")
    assert why.text == row.why
    assert ".why{white-space:pre-line;overflow-wrap:anywhere}" in Report(Summary((row,), {}))._repr_html_()
    assert Report.from_json(Report(Summary((row,), {})).to_json()).rows == (row,)
