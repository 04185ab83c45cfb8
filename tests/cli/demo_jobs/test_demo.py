"""The demo from end to end, at its smallest."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from flatout.cli import main
from flatout.cli.demo_jobs import JOBS, run_demo
from flatout.report import Report


@pytest.mark.slow
@pytest.mark.parametrize("name", JOBS)
def test_both_trainings_reach_the_same_quality(name: str) -> None:
    sink = io.StringIO()
    result = run_demo([name], console=Console(file=sink, width=100), quick=True, budget=0)
    (job,) = result.jobs
    assert job.naive.metrics.keys() == job.optimized.metrics.keys()
    assert job.optimized.metrics["loss"] == pytest.approx(job.naive.metrics["loss"], rel=0.1)
    assert job.optimized.samples_per_second > 0
    assert job.report.rows
    assert job.title in sink.getvalue()


def test_command_writes_json_and_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)  # short paths fit on one line
    data, page = Path("demo\u202e.json"), Path("demo.html")
    options = ["--job", "digits", "--quick", "--epochs", "1", "--budget", "0", "--json", str(data), "--html", str(page)]
    assert main(["demo", *options]) == 0
    (job,) = json.loads(data.read_text())["jobs"]
    assert job["epochs"] == 1
    assert Report.from_json(json.dumps(job["report"])).rows
    assert page.read_text().startswith("<!DOCTYPE html>")
    printed = capsys.readouterr().out
    assert job["title"] in printed
    assert "demo\\u202e.json" in printed
    assert "\u202e" not in printed
