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
    console.print(Rule(f"[bold]{job.title}", align="left", style="dim"))
    with _bar(console, "as first written", job, epochs) as tick:
        first = naive(job, device, epochs, tick)
    with _bar(console, "through flatout ", job, epochs) as tick:
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


@contextmanager
def _bar(console: Console, label: str, job: Job, epochs: int) -> Iterator[Tick]:
    """A progress bar over the training's steps; it appears with the first of them."""
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=28),
        TaskProgressColumn(),
        TextColumn("{task.fields[rate]:>8} " + job.unit + "/s", style="cyan"),
        TextColumn("{task.fields[loss]}", style="dim"),
        TimeElapsedColumn(),
        console=console,
        auto_refresh=False,
    )
    total = epochs * len(job.train)  # type: ignore[arg-type]
    task = progress.add_task(label, total=total, start=False, rate="", loss="")
    done, start, shown = 0, 0.0, 0.0

    def tick(samples: int, loss: float | None) -> None:
        nonlocal done, start, shown
        now = time.perf_counter()
        if not done:
            progress.start()
            progress.start_task(task)
            start = shown = now
        done += samples
        if now - shown > _REFRESH_SECONDS or done >= total:
            shown = now
            rate = f"{done / max(now - start, 1e-9):,.0f}"
            seen = "" if loss is None else f"loss {loss:.3f}"
            progress.update(task, completed=done, rate=rate, loss=seen, refresh=True)

    try:
        yield tick
    finally:
        progress.stop()
