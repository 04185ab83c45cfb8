"""Formatted numbers and texts, equal in all outputs."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import flatout
from flatout.cli import doctor, main
from flatout.cli.diagnosis import Finding
from flatout.core import formatting
from flatout.mfu import MfuCounter
from flatout.mfu.timers import Reading
from flatout.report import Summary
from flatout.training.fit import EpochProgress
from tests.report.report_sample import sample


@pytest.mark.parametrize(
    ("part", "digits", "said"),
    [
        (0.412, None, "41 %"),
        (0.0994, None, "9.9 %"),
        (0.0996, None, "10 %"),
        (1.0, None, "100 %"),
        (0.0, None, "0.0 %"),
        (0.41, 1, "41.0 %"),
        (None, None, ""),
    ],
)
def test_share(part: float | None, digits: int | None, said: str) -> None:
    assert formatting.share(part, digits) == said


@pytest.mark.parametrize(
    ("value", "said"), [(12_340.4, "12,340"), (9.87, "9.9"), (2.0, "2"), (0.25, "0.25"), (0, "0"), (math.inf, "?")]
)
def test_count(value: float, said: str) -> None:
    assert formatting.count(value) == said


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "0.98 KiB"),
        (12.34 * 2**10, "12.3 KiB"),
        (310 * 2**20, "310 MiB"),
        (1.21 * 2**30, "1.21 GiB"),
        (4000 * 2**40, "4000 TiB"),
        (-1536, "-1.50 KiB"),
    ],
)
def test_size_of(value: float, said: str) -> None:
    assert formatting.size_of(value) == said


def test_capital() -> None:
    assert formatting.capital("the GPU idles") == "The GPU idles"
    assert formatting.capital("") == ""


def test_large_rates_and_long_steps_are_told_in_plain_numbers() -> None:
    reading = Reading(3, 9, 9, 4.5, 1.5, 1_234_567.0, 45.4, 1.5e12, 0.5, 0.5, 0.25, None)
    for figure in ("3 ", "1,500 ms", "1,234,567 ", "45 ", "1.5 TFLOP/s", "50.0 %", "25.0 %"):
        assert figure in str(reading)


FORMATS = [chr(n) for n in range(0x110000) if unicodedata.category(chr(n)) in ("Cf", "Zl", "Zp")]
CONTROLS = [chr(n) for n in range(0xA0) if unicodedata.category(chr(n)) == "Cc" and chr(n) not in "\t\n"]


def test_format_characters_are_shown_by_their_number_and_control_characters_are_not() -> None:
    assert formatting.visible("a\u202etxt.exe") == r"a\u202etxt.exe"
    assert formatting.visible("\U000e0041") == r"\U000e0041"
    assert formatting.visible(" zażółć 訓練 \N{MAN} é ") == " zażółć 訓練 \N{MAN} é "
    for character in FORMATS:
        shown = formatting.visible(f"a{character}b")
        assert shown.isascii()
        assert shown.encode().decode("unicode_escape") == f"a{character}b"
    assert formatting.visible("".join(CONTROLS)) == ""


def hostile(summary: Summary) -> Summary:
    """Return the summary with format and control characters added to every text."""

    def spoiled(value: Any) -> Any:
        if isinstance(value, str):
            return value + "".join(FORMATS[::20]) + "\u202e" + "".join(CONTROLS)
        if isinstance(value, (tuple, list)):
            return type(value)(map(spoiled, value))
        if isinstance(value, dict):
            return {spoiled(key): spoiled(each) for key, each in value.items()}
        if dataclasses.is_dataclass(value):
            return dataclasses.replace(
                value,
                **{
                    field.name: spoiled(getattr(value, field.name))
                    for field in dataclasses.fields(value)
                    if field.name not in ("status", "technique", "won", "phases")
                },
            )
        return value

    return spoiled(summary)


def assert_neutral(shown: str) -> None:
    assert not set(shown) & {*FORMATS, *CONTROLS}


def test_no_format_character_reaches_a_report() -> None:
    report = flatout.Report(hostile(sample()))
    page = io.StringIO()
    Console(file=page, width=120).print(report)
    for shown in (page.getvalue(), str(report), repr(report), report._repr_html_()):
        assert_neutral(shown)
    assert r"\u202e" in str(report)
    assert json.loads(report.to_json())["notes"] == list(report.summary.notes)  # data keep their exact values


def test_a_lone_surrogate_is_exact_in_json_and_valid_utf8(tmp_path: Path) -> None:
    spoiled = dataclasses.replace(sample(), notes=("\udce9",))
    flatout.Report(spoiled).to_json(tmp_path / "report.json")
    assert flatout.Report.from_json(tmp_path / "report.json").summary.notes == ("\udce9",)
    flatout.Report(spoiled).to_html(tmp_path / "report.html")


def test_no_format_character_reaches_a_progress_bar(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLATOUT_PROGRESS", "1")
    with EpochProgress(1, [1], MfuCounter(), visible=True) as bar:
        bar.begin(0)
        bar.end({"eval_[bold]\u202e\x1b[31m": 1.0})
    shown = capsys.readouterr().err
    assert "\u202e" not in shown
    assert r"eval_[bold]\u202e" in shown


def test_no_format_character_reaches_the_errors_of_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "no\u202e\x1b[31m.py"]) == 1
    assert_neutral(capsys.readouterr().err)


def test_no_format_character_of_a_finding_reaches_the_doctors_page() -> None:
    page = io.StringIO()
    doctor.show(
        doctor.blocks([Finding("topic", "name", "found\u202e\x1b[31m", "slow", "fix\u202e")]),
        Console(file=page, width=200),
    )
    assert_neutral(page.getvalue())
