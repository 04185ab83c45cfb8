"""Runs the demo's jobs and shows what happens while it happens."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.rule import Rule

from flatout.demo import digits, gpt
from flatout.demo.job import Job
from flatout.demo.result import DemoResult, JobResult
from flatout.demo.training import Tick, make_model, naive, optimized

JOBS: dict[str, Callable[[str], Job]] = {
    "digits": lambda size: digits.build(digits.SIZES[size]),
    "gpt": lambda size: gpt.build(gpt.SIZES[size]),
}
"""Every job: its name, and what builds it at the size ``"cpu"``, ``"cuda"`` or ``"quick"``."""

_REFRESH_SECONDS = 0.2


def run_demo(
    names: Iterable[str],
    *,
    console: Console,
    quick: bool = False,
    epochs: int | None = None,
    budget: float = 45.0,
    command: str = "flatout demo",
) -> DemoResult:
    """Trains each job twice and prints the comparison and the report.

    Args:
        names: of ``JOBS``.
        console: where progress and results are shown.
        quick: very small sizes.
        epochs: passes over the training data; None takes the job's own number.
        budget: seconds per job that measuring may take.
        command: what the user typed, for the record.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    start = time.perf_counter()
    results = []
    for name in names:
        job = JOBS[name]("quick" if quick else device.type)
        results.append(run_job(job, device, epochs or job.training.epochs, budget, console))
    return DemoResult(tuple(results), time.perf_counter() - start, command)


def run_job(job: Job, device: torch.device, epochs: int, budget: float, console: Console) -> JobResult:
    """Trains one job twice and prints the comparison and the report."""
    console.print(Rule(f"[bold]{job.title}", align="left"))
    steps = epochs * -(-len(job.train) // job.training.batch_size)  # type: ignore[arg-type]
    with _progress(console, "as first written", job, epochs) as tick:
        first = naive(job, device, epochs, tick)
    with (
        console.status(f"flatout.optimize: measuring what pays, {budget:.0f} s at most"),
        _progress(console, "through flatout", job, epochs) as tick,
    ):
        second = optimized(job, device, epochs, budget, tick)
    result = JobResult(
        job=job.name,
        title=job.title,
        unit=job.unit,
        epochs=epochs,
        parameters=sum(p.numel() for p in make_model(job).parameters() if p.requires_grad),
        naive=first,
        optimized=second.outcome,
        tuning_seconds=second.tuning_seconds,
        report=second.report,
    )
    console.print(result, "", second.report, "")
    return result
