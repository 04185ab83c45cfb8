"""Results of the demo, as data, as text and as a page."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType
from rich.table import Table
from rich.text import Text

from flatout.cli.demo_jobs.demo_job import LONG_TRAINING
from flatout.cli.demo_jobs.loops import Outcome
from flatout.core import formatting
from flatout.report import Report, html, report_page, wording

SCHEMA_VERSION = 1
"""Version of the demo's JSON form."""


@dataclass(frozen=True)
class JobResult:
    """Result of one job, trained twice.

    Attributes:
        job: name of the job.
        title: description in one line.
        unit: word for samples, in the plural.
        epochs: passes over the training data, the same for both trainings.
        parameters: number of trainable numbers in the model.
        naive: result of the plain loop.
        optimized: result of the training through ``flatout.optimize``.
        tuning_seconds: duration of ``flatout.optimize``.
        report: report of ``flatout.optimize``.
    """

    job: str
    title: str
    unit: str
    epochs: int
    parameters: int
    naive: Outcome
    optimized: Outcome
    tuning_seconds: float
    report: Report

    @property
    def speedup(self) -> float:
        """Ratio of training throughputs, optimized / naive, with data loading and without tuning."""
        return self.optimized.samples_per_second / self.naive.samples_per_second

    @property
    def why_another_number(self) -> str:
        """Sentences on the report's speedup, which differs from ``speedup``; empty if the report has no speedup."""
        factor = wording.speedup(self.report.summary)
        if factor is None:
            return ""
        return (
            f"The report gives {factor:.2f}×, because it compares steps of flatout before and after the tuning, in a "
            "short race. The demo compares whole trainings, one of them without flatout."
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain data. The report is nested, with its own schema version."""
        return {
            "job": self.job,
            "title": self.title,
            "unit": self.unit,
            "epochs": self.epochs,
            "parameters": self.parameters,
            "naive": asdict(self.naive),
            "optimized": asdict(self.optimized),
            "speedup": self.speedup,
            "tuning_seconds": self.tuning_seconds,
            "report": self.report.to_dict(),
        }

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold")
        for index, heading in enumerate(self.headings):
            table.add_column(heading, justify="left" if index == 0 else "right")
        for cells, style in zip(self.cells, ("", "bold green"), strict=True):
            table.add_row(Text(cells[0]), *(Text(cell, style=style) for cell in cells[1:]))
        yield table
        yield Text.assemble(
            (f"{self.speedup:.2f}× the training throughput", "bold green" if self.speedup > 1.01 else "bold"),
            f", data loading included; tuning took {formatting.seconds(self.tuning_seconds)} on top"
            f" and decided as for {LONG_TRAINING:,} steps.",
        )
        if self.why_another_number:
            yield Text(self.why_another_number, style="dim")

    @property
    def headings(self) -> list[str]:
        """Headings of the table that compares the trainings."""
        metrics = [f"held-out {name}" for name in self.naive.metrics]
        return ["training", "time", f"{self.unit}/s", *metrics]

    @property
    def cells(self) -> list[list[str]]:
        """Cells of the table that compares the trainings, one row for each training."""
        rows = []
        for name, outcome in (("as first written", self.naive), ("through flatout", self.optimized)):
            rate = formatting.count(outcome.samples_per_second)
            held_out = [_metric(key, outcome.metrics.get(key, math.nan)) for key in self.naive.metrics]
            rows.append([name, formatting.seconds(outcome.seconds), rate, *held_out])
        return rows


@dataclass(frozen=True)
class DemoResult:
    """Results of one run of the demo.

    Attributes:
        jobs: results of the jobs, in the order of the runs.
        seconds: duration of the whole run, with tuning and evaluation.
        command: command that repeats the measurements.
    """

    jobs: tuple[JobResult, ...]
    seconds: float
    command: str

    def to_json(self) -> str:
        """Return everything shown, as JSON text."""
        jobs = [job.to_dict() for job in self.jobs]
        data = {"schema": SCHEMA_VERSION, "command": self.command, "seconds": self.seconds, "jobs": jobs}
        return json.dumps(data, indent=2, ensure_ascii=False) + "\n"

    def to_html(self) -> str:
        """Return one self-contained page."""
        body = html.render("demo.html.j2", demo=self, steps=LONG_TRAINING, report=report_page.fragment)
        return str(html.render("page.html.j2", title="flatout demo", body=body))


def _metric(name: str, value: float) -> str:
    return formatting.share(value, 1) if name == "accuracy" else f"{value:.4f}"
