"""Report in the terminal, as text, as a page and as JSON."""

import dataclasses
import io
import json
import math
import re
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from flatout.core import formatting
from flatout.report import Gain, Pace, Report, Row, Summary, Trial, wording
from flatout.report.terminal import plain_text
from tests.reasons import reasons
from tests.renderings.rendered import in_terminal, root_of
from tests.report.drawn import bars, chart, charts, lines, share, table_rows, whiskers, widths
from tests.report.report_sample import HOSTILE, compile_row, sample

EMPTY = Summary(rows=(), environment={})


def squeezed(text: str) -> str:
    """Return the text with single spaces instead of line breaks."""
    return " ".join(text.split())


def headline_codes(report: Report) -> set[str]:
    return reasons(repr(report))


@pytest.mark.parametrize("width", [80, 140])
@pytest.mark.parametrize("ascii_only", [False, True])
def test_every_row_is_shown_at_every_width(width: int, ascii_only: bool) -> None:
    report = Report(sample())
    lines = in_terminal(report.full(), width, ascii_only).splitlines()
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    for row in report.rows:
        assert row.title in text
        first_words = " ".join(row.why.split()[:3])
        assert first_words in squeezed(text), f"the reason of {row.technique} is missing"
    begin = next(i for i, line in enumerate(lines) if line.startswith(" #"))
    end = next(i for i, line in enumerate(lines) if "not applicable here" in line)
    shown = [status for line in lines[begin:end] for status in (*wording.LOOKS, "+ rule", "✓ rule") if status in line]
    expected = [row.status for row in report.rows if row.status != "not applicable" and row not in report.summary.rules]
    assert [status for status in shown if "rule" not in status] == expected
    assert len(shown) - len(expected) == len(report.summary.rules)
    if ascii_only:
        assert text.isascii()
        assert "?" not in text  # replacement of a character without an ASCII form


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("ascii_only", [False, True])
def test_a_receipt_fits_one_screen_and_names_what_is_in_use(width: int, ascii_only: bool) -> None:
    report = Report(sample())
    lines = in_terminal(report, width, ascii_only).splitlines()
    assert max(map(len, lines)) <= width
    assert len(lines) <= 40
    names = {row.technique for row in report.rows if row.status in ("kept", "rejected", "advice")}
    words = set(squeezed("\n".join(lines)).replace(",", " ").split())
    assert names <= words
    if ascii_only:
        assert "\n".join(lines).isascii()


def test_a_receipt_compares_mfu_only_at_one_precision() -> None:
    assert "MFU" in in_terminal(Report(sample()), 120)
    row = Row("precision", 10, "Mixed precision", "kept", "", "bf16", Gain(1.5))
    assert "MFU" not in in_terminal(Report(dataclasses.replace(sample(), rows=(row,))), 120)


def test_a_receipt_gives_each_reason_against_a_trial_once() -> None:
    rows = [Row(name, None, name, "not tried", "no GPU") for name in ("pinned", "tf32", "cuda_graph")]
    text = in_terminal(Report(dataclasses.replace(sample(), rows=tuple(rows))), 80)
    assert text.count("no GPU") == 1
    assert all(row.technique in text for row in rows)


def test_an_epoch_takes_its_samples_at_the_pace() -> None:
    summary = sample()
    assert summary.before is not None
    assert summary.epoch_samples is not None
    assert summary.epoch_seconds(summary.before) == summary.epoch_samples / summary.before.samples_per_second
    assert dataclasses.replace(summary, epoch_samples=None).epoch_seconds(summary.before) is None


def test_reasons_are_complete_in_narrow_terminals() -> None:
    text = squeezed(in_terminal(Report(sample()).full(), 80))
    for row in sample().rows:
        assert squeezed(formatting.clean(row.why)) in text


@pytest.mark.parametrize("width", range(40, 140, 5))
@pytest.mark.parametrize("ascii_only", [False, True])
def test_no_line_ends_within_a_fact_of_the_environment(width: int, ascii_only: bool) -> None:
    environment = {
        "cpu": "Some Processor 8581C @ 2.10GHz",
        "cores": "2",
        "torch": "2.14.1+cu130",
        "date": "2026-11-26 22:09",
    }
    report = Report(dataclasses.replace(sample(), environment=environment))
    for shown in (report, report.full()):
        text = in_terminal(shown, width, ascii_only)
        assert max(map(len, text.splitlines())) <= width
        assert all(f"{name} {value}" in text for name, value in environment.items())


def test_print_gives_text_without_colour_and_a_console_gives_colour() -> None:
    report = Report(sample()).full()
    assert "torch.compile" in str(report)
    assert "\x1b" not in str(report)
    sink = io.StringIO()
    Console(file=sink, width=100, force_terminal=True, color_system="truecolor").print(report)
    assert "\x1b[1;32m✓ kept" in sink.getvalue()
    assert "\x1b[31m" not in sink.getvalue()  # the escape in the hostile text


@pytest.mark.parametrize("ascii_only", [False, True])
def test_text_equals_console_output(ascii_only: bool) -> None:
    text = plain_text(wording.full(sample()), 80, ascii_only)
    assert squeezed(text) == squeezed(in_terminal(Report(sample()).full(), 80, ascii_only))


def test_markup_in_text_is_shown_unchanged() -> None:
    assert "[red]not markup[/red]" in squeezed(in_terminal(Report(sample()).full(), 140))


def test_ascii_is_chosen_if_standard_output_supports_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    assert str(Report(sample())).isascii()


@pytest.mark.parametrize("summary", [sample(), EMPTY], ids=["sample", "empty"])
def test_json_round_trip(summary: Summary, tmp_path: object) -> None:
    file = tmp_path / "report.json"  # type: ignore[operator]
    text = Report(summary).to_json(file)
    assert json.loads(text)["schema"] == 2
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
        for trial in row["trials"]:
            del trial["noise"]
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


def test_stretches_are_scaled_with_their_pace_and_not_invented() -> None:
    pace = Pace(2.0, 1.0, 10.0, stretches=((0.5, 2.0), (1.5, 2.0)))
    assert pace.scaled(2.0).stretches == ((1.0, 4.0), (3.0, 4.0))
    assert pace.with_faster_steps(2.0).stretches == ()


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        ("{", None),
        ("[]", "schema"),
        ('{"schema": 99}', "schema.*99"),
        ('{"schema": 1, "environment": {}}', "rows"),
        ('{"schema": 1, "rows": 3, "environment": {}}', None),
    ],
)
def test_invalid_reports_are_refused(text: str, fact: str | None) -> None:
    with pytest.raises(ValueError, match=fact):
        Report.from_json(text)


def test_reports_of_version_1_are_read_without_the_fields_that_came_later() -> None:
    summary = sample()
    data = Report(summary).to_dict() | {"schema": 1}
    del data["gain"], data["gain_statistic"]
    for row in data["rows"]:
        del row["left_out"]
    again = Report.from_json(json.dumps(data)).summary
    assert again.rows[9] == summary.rows[9]
    assert (again.gain, again.gain_statistic) == (None, "wall")
    assert wording.speedup(again) == pytest.approx(summary.after.samples_per_second / summary.before.samples_per_second)  # type: ignore[union-attr]


def test_a_field_with_a_default_may_be_missing_and_a_number_must_be_one() -> None:
    data = Report(sample()).to_dict()
    del data["tuning_seconds"], data["rows"][8]["chosen"]
    again = Report.from_json(json.dumps(data)).summary
    assert (again.tuning_seconds, again.rows[8].chosen) == (0.0, "")
    data["rows"][8]["number"] = "nine"
    with pytest.raises(ValueError, match="nine"):
        Report.from_json(json.dumps(data))


def test_an_unknown_status_is_refused() -> None:
    data = Report(sample()).to_json().replace('"advice",', '"great",')
    with pytest.raises(ValueError, match=r"status.*'great'"):
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
    said = "".join(root.itertext()).replace("\u00a0", " ")
    assert formatting.clean(HOSTILE) in said
    for row in sample().rows:
        assert row.title in said
        assert formatting.clean(row.why) in said
    assert all(row.expected in said and row.chosen in said for row in sample().rows)
    assert "prefers-color-scheme:dark" in text


def test_a_page_is_a_plain_string_that_callers_can_escape() -> None:
    assert type(Report(sample())._repr_html_()) is str


def test_chart_has_a_bar_and_a_whisker_per_timed_trial() -> None:
    gains = chart(root_of(Report(sample())), "speed")
    timed = [trial for row in sample().rows for trial in row.trials if trial.gain is not None]
    assert len(bars(gains)) == len(timed) == 6
    assert sum(e.attrib.get("class") == "whisker" for e in gains.iter()) == 6
    assert [e.attrib["class"] for e in bars(gains)].count("kept") == 3


def test_phases_are_stacked_on_one_scale() -> None:
    before, *_ = parts = widths(chart(root_of(Report(sample())), "milliseconds per batch"))
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
    assert sum(ms[0] for _, _, ms in times) == pytest.approx(pace.total_ms)
    assert all(any(ms) for _, _, ms in times)


def test_a_step_has_one_bar_if_one_side_has_no_phases() -> None:
    before = dataclasses.replace(sample().before, phases={}, loader_per_second=None, mfu=None, step_bytes=None)
    report = Report(dataclasses.replace(sample(), before=before))
    parts = widths(chart(root_of(report), "milliseconds per batch"))
    assert len(parts) == 4
    assert parts[0] / parts[1] == pytest.approx(2.1 / 4.1, rel=0.01)
    assert sum(parts[2:]) / sum(parts[:2]) == pytest.approx(1.98 / 6.2, rel=0.01)
    unknown = [cells for cells in table_rows(root_of(report), "samples/s") if not cells[1]]
    assert [bool(after) for _, _, after, _ in unknown] == [True] * 3  # known only after optimization, and shown


def test_unknown_figures_are_left_out() -> None:
    whole = sample()
    bare = dataclasses.replace(whole, before=Pace(4.1, 2.1, 5161.3), after=Pace(1.9, 0.08, 16161.6), won=())
    rows = table_rows(root_of(Report(bare)), "samples/s")
    assert len(rows) == 2  # samples per second of the loop, and of the step alone
    assert all(all(cells) for cells in rows)
    left_out = {name for name, *_ in table_rows(root_of(Report(whole)), "samples/s")} - {name for name, *_ in rows}
    assert len(left_out) == 3
    assert not [name for name in left_out if name in in_terminal(Report(dataclasses.replace(bare, rows=())), 80)]
    nothing = dataclasses.replace(bare, before=Pace(math.nan, math.nan, math.nan), after=Pace(1.0, 0.0, 1.0))
    assert len(charts(root_of(Report(nothing)))) == len(charts(root_of(Report(bare)))) - 1


def test_a_loop_without_a_race_shows_its_pace_and_no_factor() -> None:
    raced, unraced = Report(sample()), Report(dataclasses.replace(sample(), before=None))
    assert "nothing-raced" in headline_codes(unraced)
    assert "factor" not in {e.attrib.get("class") for e in root_of(unraced).iter()}
    assert "factor" in {e.attrib.get("class") for e in root_of(raced).iter()}
    assert len(widths(chart(root_of(unraced), "milliseconds per batch"))) == 5
    assert {len(cells) for cells in table_rows(root_of(unraced), "samples/s")} == {3}  # no column for the earlier pace
    assert {len(cells) for cells in table_rows(root_of(raced), "samples/s")} == {4}


def test_names_of_code_are_set_as_code() -> None:
    row = Row("x", 1, "X", "rejected", "`a<b>` is slower", purpose="calls `fit`")
    said = Report(Summary((row,), {}))._repr_html_()
    assert "<code>a&lt;b&gt;</code> is slower" in said
    assert "Calls <code>fit</code>." in said


def test_bars_that_lose_end_left_of_zero_and_bars_that_win_right_of_it() -> None:
    root = chart(root_of(Report(sample())), "speed")
    zero = next(share(e, "x1") for e in root.iter() if e.attrib.get("class") == "zero")
    for _, value, bar in lines(root):
        assert (share(bar, "x") < zero - 0.1) == ("−" in value.split("(")[0])


@pytest.mark.parametrize("summary", [EMPTY, Summary(sample().rows[:1], {}, Pace(0.0, 0.0, 0.0), Pace(0.0, 0.0, 0.0))])
def test_a_report_with_nothing_timed_is_still_a_report(summary: Summary) -> None:
    report = Report(summary)
    assert charts(root_of(report)) == []
    assert headline_codes(report) == {"nothing-timed"}
    assert reasons(str(report)) >= {"nothing-timed"}


def test_row_by_name() -> None:
    assert Report(sample()).row("compile").number == 9
    with pytest.raises(KeyError, match=r"'compiler'.* pinned, "):
        Report(sample()).row("compiler")


@pytest.mark.parametrize(
    ("ratio", "said"),
    [(1.25, "+25 %"), (1.031, "+3.1 %"), (0.985, "−1.5 %"), (1.0, "0.0 %"), (0.9999, "0.0 %"), (math.nan, "?")],
)
def test_percent(ratio: float, said: str) -> None:
    assert formatting.percent(ratio) == said


def test_interval_has_the_decimals_of_its_gain() -> None:
    assert wording.interval(Gain(1.5, 1.05, 1.9), 12) == "+5 … +90 %"
    assert wording.interval(Gain(1.05, 0.99, 1.2), None) == "−1.0 … +20.0 %"


UNCERTAIN = [Gain(1.4), Gain(1.4, 1.4, 1.4), Gain(1.4, 0.0, math.inf), Gain(1.4, math.nan, math.nan)]
"""Gains without an interval: from too few pairs, from one pair of an old report, with open ends, with unknown ends."""


@pytest.mark.parametrize("gain", UNCERTAIN)
@pytest.mark.parametrize("pairs", [1, 2])
def test_a_gain_without_an_interval_is_shown_without_one(gain: Gain, pairs: int) -> None:
    row = Row(
        "x", 1, "X", "rejected", "It was timed too seldom.", gain=gain, trials=(Trial("on", 4.0, 3.0, gain, pairs),)
    )
    summary = Summary((row, compile_row()), {})
    report = Report(summary)
    shown = "from one pair" if pairs == 1 else "from 2 pairs, no interval"
    drawn = chart(root_of(report), "speed")
    assert f"+40 % ({shown})" in {e.text for e in drawn.iter()}
    assert sum(e.attrib.get("class") == "whisker" for e in drawn.iter()) == 1  # the whisker of torch.compile
    for text in (squeezed(in_terminal(report.full(), 80)), squeezed("".join(root_of(report).itertext()))):
        assert shown in text
    plain = report.to_dict()["rows"][0]
    assert plain["gain"] == plain["trials"][0]["gain"] == {"ratio": 1.4, "low": None, "high": None}
    again = Report.from_json(report.to_json())
    assert again.rows[0].gain == Gain(1.4)
    assert again.rows[1].gain == compile_row().gain
    assert again._repr_html_() == report._repr_html_()


def test_a_gain_whose_trial_is_unknown_says_only_that_it_has_no_interval() -> None:
    row = Row("x", 1, "X", "kept", "It pays.", gain=Gain(1.4))
    assert row.gain_pairs is None
    assert "no interval" in in_terminal(Report(Summary((row,), {})), 80)


@given(st.floats(0.1, 100), st.floats(0.1, 100), st.floats(0.1, 10))
def test_shown_times_agree_with_their_gain(baseline: float, candidate: float, ratio: float) -> None:
    trial = Trial("on", baseline, candidate, Gain(ratio, ratio / 2, 2 * ratio), 12)
    assert trial.baseline_ms / trial.paired_ms == pytest.approx(ratio)
    row = Row("x", 1, "X", "rejected", "", trials=(trial,))
    (fact,) = root_of(Report(Summary((row,), {}))).iter("li")
    said = "".join(fact.itertext())
    assert f"{formatting.milliseconds(baseline)} → {formatting.milliseconds(trial.paired_ms)}, " in said


def test_without_a_gain_the_time_is_that_of_the_trial() -> None:
    assert Trial("on", 4.0, 3.0, None, 0).paired_ms == 3.0
    assert Trial("on", 4.0, 3.0, Gain(0.0), 1).paired_ms == 3.0


@pytest.mark.parametrize(
    ("value", "said"),
    [(0.0, "0.00 ms"), (0.4123, "0.412 ms"), (6.234, "6.23 ms"), (184.2, "184 ms"), (2100, "2,100 ms")],
)
def test_milliseconds(value: float, said: str) -> None:
    assert formatting.milliseconds(value) == said


@pytest.mark.parametrize(
    ("value", "said"), [(8.44, "8.4 s"), (75.2, "75 s"), (250.0, "4 min 10 s"), (65_100.0, "18 h 5 min")]
)
def test_seconds(value: float, said: str) -> None:
    assert formatting.seconds(value) == said


@pytest.mark.parametrize(("low", "high"), [(0.0, 0.05), (-0.5, 0.6), (-0.9, 12.0), (0.0, 0.2)])
def test_ticks_are_few_and_hold_zero(low: float, high: float) -> None:
    gain = Gain(1 + (low + high) / 2, 1 + low, 1 + high)
    row = Row("x", 1, "X", "kept", "", "on", gain, (Trial("on", 4.0, 3.0, gain, 9),))
    drawn = chart(root_of(Report(Summary((row,), {}))), "speed")
    ticks = [e for e in drawn.iter() if e.attrib.get("class") in ("zero", "tick")]
    assert 2 <= len(ticks) <= 8
    assert sum(e.attrib["class"] == "zero" for e in ticks) == 1
    assert sum(e.attrib.get("class") == "axis" for e in drawn.iter()) == len(ticks)
    (ends,) = whiskers(drawn)
    places = [share(tick, "x1") for tick in ticks]
    assert min(ends) - 0.1 <= min(places) <= max(places) <= max(ends) + 0.1


def test_a_whisker_that_is_much_longer_than_the_bars_is_cut_off() -> None:
    wide, narrow = Gain(1.94, 0.27, 14.06), Gain(1.5, 1.4, 1.6)
    trials = (Trial("a", 4.0, 3.0, wide, 9), Trial("b", 4.0, 3.0, narrow, 9))
    drawn = chart(root_of(Report(Summary((Row("x", 1, "X", "rejected", "", trials=trials),), {}))), "speed")
    first, second = whiskers(drawn)
    assert first[1] > 100
    assert 0 < second[0] < second[1] < 100
    assert max(widths(drawn)) > 30  # the bars are readable


def test_numbers_and_their_units_stay_on_one_line() -> None:
    said = "".join(ET.fromstring(Report(sample())._repr_html_()).itertext())
    assert "6.20\u00a0ms" in said
    assert not re.search(r"\d (ms|%|MiB|×)(?!\w)", said)


def test_rows_that_do_not_apply_are_shown_on_request() -> None:
    root = root_of(Report(sample()))
    (more,) = (e for e in root.iter("details") if e.attrib.get("class") == "more")
    assert "open" not in more.attrib
    hidden = {row.title for row in sample().rows if row.status == "not applicable"}
    assert {e.text for cell in more.iter("td") if cell.attrib.get("class") == "technique" for e in cell} == hidden


def test_a_page_has_one_headline_number_and_ends_with_the_machine() -> None:
    root = root_of(Report(dataclasses.replace(sample(), environment={"device": "a machine", "date": "today"})))
    assert "".join(root.itertext()).split()[-5:] == ["device", "a", "machine", "·", "date", "today"][-5:]
    assert sum(e.attrib.get("class") == "factor" for e in root.iter()) == 1


def test_every_status_has_a_look() -> None:
    statuses = {row.status for row in sample().rows}
    assert statuses == set(wording.LOOKS)
    assert isinstance(sample().rows[0], Row)


def test_techniques_that_do_not_apply_for_one_reason_show_it_once() -> None:
    rows = tuple(Row(f"t{i}", i, f"Technique {i}", "not applicable", "Comes later.") for i in range(5))
    text = in_terminal(Report(Summary(rows, {})).full(), 80)
    assert text.count("Comes later.") == 1
    assert all(row.title in text for row in rows)
    purposeful = tuple(Row(f"t{i}", i, f"T {i}", "not tried", "No time.", purpose=f"does {i}") for i in range(3))
    text = squeezed(in_terminal(Report(Summary(purposeful, {})).full(), 80))
    assert all(f"Does {i}. No time." in text for i in range(3))


@pytest.mark.parametrize("width", [60, 80, 140])
def test_each_finding_has_its_own_line_and_long_paths_are_complete(width: int) -> None:
    place = f"/home/somebody/{'a_long_folder/' * 12}train.py:1234"
    findings = (f"{place} makes Python wait for the GPU once in a step (item)", "data.py:7: Normalize takes 0.30 ms")
    row = Row("sync_points", 13, "sync points", "advice", "\n".join(findings))
    text = in_terminal(Report(Summary((row,), {})).full(), width)
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    assert any(line.strip().startswith("data.py:7: Normalize") or "  data.py:7: Normalize" in line for line in lines)
    assert "".join(place.split()) in "".join(text.replace("→ advice", "").replace("13", "", 1).split())
    root = root_of(Report(Summary((row,), {})))
    (why,) = (element for element in root.iter() if element.attrib.get("class") == "why")
    assert why.text == row.why
    assert Report.from_json(Report(Summary((row,), {})).to_json()).rows == (row,)


PACES = st.floats(1e-3, 1e4)


@given(PACES, PACES, st.floats(0.0, 1e3))
def test_the_steps_that_pay_save_as_much_as_the_tuning_took(before: float, after: float, took: float) -> None:
    summary = Summary((), {}, Pace(before, 0.0, 1e3 / before), Pace(0.0, after, 1e3 / after), took)
    steps = summary.pays_back_after
    if took > 0 and after < before:
        assert steps is not None
        assert steps * (before - after) / 1e3 == pytest.approx(took)
    else:
        assert steps is None


@pytest.mark.parametrize("width", [80, 140])
def test_a_gain_shows_the_steps_that_pay_for_it_and_no_gain_shows_none(width: int) -> None:
    whole = sample()
    assert whole.before is not None
    assert whole.after is not None
    steps = formatting.count(math.ceil(whole.tuning_seconds * 1e3 / (whole.before.total_ms - whole.after.total_ms)))
    for report in (Report(whole), Report(dataclasses.replace(whole, rows=()))):
        assert f"tuned in 45 s, pays back after {steps} steps" in in_terminal(report, width)
        assert f"Tuned in 45 s, pays back after {steps} steps." in "".join(root_of(report).itertext())
    rate, step_ms = whole.after.samples_per_second / 1.005, whole.after.step_ms * 1.005
    noise = dataclasses.replace(whole.after, samples_per_second=rate, step_ms=step_ms)
    for before in (whole.after, noise, None):
        bare = dataclasses.replace(whole, rows=(), before=before)
        assert "pays back" not in in_terminal(Report(bare), width)
    assert wording.cost(EMPTY) == ""


def headline(**changes: object) -> str:
    return wording.headline(dataclasses.replace(sample(), **changes))


CORES = {"device": "cpu (x)", "cores": "2"}


@pytest.mark.parametrize(
    ("changes", "is_busy"),
    [
        ({"environment": CORES, "load_average": 2.1}, True),
        ({"environment": CORES, "load_average": 2.0}, False),
        ({"environment": CORES, "before": Pace(10.0, 1.0, 100.0, cpu_ms=5.0)}, True),
        ({"environment": CORES, "before": Pace(10.0, 1.0, 100.0, cpu_ms=9.9)}, False),
        ({"environment": {"device": "cuda (x)"}, "before": Pace(10.0, 1.0, 100.0, cpu_ms=1.0)}, False),
        ({"environment": {}}, False),
    ],
)
def test_a_headline_names_a_busy_machine(changes: dict[str, object], is_busy: bool) -> None:
    assert dataclasses.replace(sample(), **changes).is_busy == is_busy
    assert ("busy" in headline(**changes)) == is_busy


def test_a_loop_on_which_nothing_was_tried_is_not_called_as_fast() -> None:
    same = {"before": sample().before, "after": sample().before, "won": ()}
    untried = [Row(name, 1, name, "not tried", "the training ended first") for name in "abc"]
    forbidden = Row("d", 1, "d", "not tried", "forbidden", left_out=True)
    rule = Row("e", 1, "e", "kept", "always right")
    assert headline(**same, rows=(*untried, forbidden, rule)) == "nothing was tried: the training ended first"
    assert headline(**same, rows=(rule,)) == "nothing was tried"
    assert "tried" not in headline(**same, rows=(*untried, compile_row()))


def test_rules_are_no_techniques() -> None:
    summary = sample()
    assert [row.technique for row in summary.rules] == ["criterion", "no_grad", "profiler"]
    assert "3 of 12 techniques" in repr(Report(summary))
    forced = dataclasses.replace(summary.rows[4], chosen="on")
    assert forced not in dataclasses.replace(summary, rows=(forced,)).rules
    pills = [e.text for e in root_of(Report(summary)).iter() if e.attrib.get("class", "").startswith("pill")]
    assert pills[:2] == ["✓ 3 kept", "✓ 3 rules"]


@pytest.mark.parametrize("width", [70, 80, 100])
@pytest.mark.parametrize("ascii_only", [False, True])
def test_a_narrow_receipt_cuts_no_figure_and_no_reason(width: int, ascii_only: bool) -> None:
    text = squeezed(in_terminal(Report(sample()), width, ascii_only))
    for row in sample().rows:
        if row.status == "rejected":
            assert row.why in text
        if row.gain is not None and not ascii_only:
            assert wording.interval(row.gain, row.gain_pairs) in text
    assert "memory" in text


@pytest.mark.parametrize(("low", "high", "is_noise"), [(0.97, 1.07, True), (1.0, 1.02, True), (1.01, 1.07, False)])
def test_a_bar_whose_interval_contains_zero_is_drawn_as_noise(low: float, high: float, is_noise: bool) -> None:
    gain = Gain(1.015, low, high)
    row = Row("x", 1, "X", "rejected", "", gain=gain, trials=(Trial("on", 4.0, 3.9, gain, 9),))
    drawn = chart(root_of(Report(Summary((row,), {}))), "speed")
    ((_, value, bar),) = lines(drawn)
    assert (bar.attrib["class"] == "noise") == is_noise
    assert ("noise" in value) == is_noise
    assert ("noise" in in_terminal(Report(Summary((row,), {})).full(), 80)) == is_noise


def test_prose_in_a_notebook_is_aligned_left() -> None:
    style = next(e.text or "" for e in root_of(Report(sample())).iter("style"))
    selector = ".flatout.flatout th,.flatout.flatout td{"
    (cells,) = (rule for rule in style.split("}") if rule.strip().startswith(selector))
    assert "text-align:left" in cells
