"""What the demo shows and writes."""

import io
import json
import xml.etree.ElementTree as ET

import pytest
from rich.console import Console

from flatout.demo.result import DemoResult, JobResult
from flatout.demo.training import Outcome
from flatout.report import Pace, Report, Row, Summary


@pytest.fixture
def result() -> DemoResult:
    report = Report(Summary((Row("x", 1, "A <b> technique", "kept", "It pays."),), {}, Pace(2, 2, 10), Pace(1, 1, 20)))
    naive = Outcome(10.0, 1437.0, {"loss": 0.05, "accuracy": 0.9861})
    tuned = Outcome(4.0, 3592.5, {"loss": 0.06, "accuracy": 0.9889})
    job = JobResult("digits", "digits <i>", "images", 10, 57_594, naive, tuned, 41.0, report)
    return DemoResult((job,), 63.0, "flatout demo --job digits")


def test_comparison_in_the_terminal(result: DemoResult) -> None:
    sink = io.StringIO()
    Console(file=sink, width=80).print(result.jobs[0])
    lines = [" ".join(line.split()) for line in sink.getvalue().splitlines()]
    assert "training time images/s held-out loss held-out accuracy" in lines
    assert "as first written 10 s 1,437 0.0500 98.6 %" in lines
    assert "through flatout 4.0 s 3,592 0.0600 98.9 %" in lines
    assert any("2.50× the training throughput" in line and "tuning took 41 s" in line for line in lines)


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
    assert "digits <i>" in said
    assert "A <b> technique" in said
    assert "2.50× the training throughput" in said
