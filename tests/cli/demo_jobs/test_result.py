"""Output and files of the demo."""

import dataclasses
import json
import xml.etree.ElementTree as ET

import pytest

from flatout.cli.demo_jobs.result import DemoResult
from flatout.report import Report
from tests.renderings.rendered import in_terminal
from tests.renderings.samples import demo_result


@pytest.fixture
def result() -> DemoResult:
    return demo_result()


@pytest.mark.parametrize("width", [40, 80, 140])
def test_every_figure_is_in_the_terminal(result: DemoResult, width: int) -> None:
    shown = in_terminal(result.jobs[0], width)
    assert max(map(len, shown.splitlines())) <= width
    for figure in ("1,437", "3,592", "98.6 %", "98.9 %", "2.50", "41 s"):
        assert figure in shown


def test_json_holds_every_figure_and_the_report(result: DemoResult) -> None:
    data = json.loads(result.to_json())
    (job,) = data["jobs"]
    assert data["schema"] == 1
    assert job["speedup"] == pytest.approx(2.5)
    assert job["naive"]["metrics"]["accuracy"] == 0.9861
    assert job["optimized"]["seconds"] == 4.0
    assert job["tuning_seconds"] == 41.0
    assert Report.from_json(json.dumps(job["report"])).rows == result.jobs[0].report.rows


def test_page_is_well_formed_and_escaped(result: DemoResult) -> None:
    said = "".join(ET.fromstring(result.to_html()).itertext())
    assert result.jobs[0].title in said
    assert all(row.title in said for row in result.jobs[0].report.rows)
    assert "2.50" in said


def test_a_job_has_one_headline_number_and_says_why_the_report_has_another(result: DemoResult) -> None:
    root = ET.fromstring(result.to_html())
    assert [e.text for e in root.iter() if e.attrib.get("class") == "factor"] == ["2.50×"]
    assert "2.00×" in result.jobs[0].why_another_number
    assert result.jobs[0].why_another_number in "".join(root.itertext())


def test_a_report_without_a_number_needs_no_explanation(result: DemoResult) -> None:
    untimed = Report(dataclasses.replace(result.jobs[0].report.summary, before=None, after=None))
    assert dataclasses.replace(result.jobs[0], report=untimed).why_another_number == ""
