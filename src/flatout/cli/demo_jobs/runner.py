"""Runner of the demo's jobs, with live progress."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from rich.rule import Rule

from flatout.cli.demo_jobs import digits, gpt
from flatout.cli.demo_jobs.demo_job import DemoJob
from flatout.cli.demo_jobs.loops import Naive, Optimized, Tick, make_model, take_turns
from flatout.cli.demo_jobs.result import DemoResult, JobResult

JOBS: dict[str, Callable[[str], DemoJob]] = {
    "digits": lambda size: digits.build(digits.SIZES[size]),
    "gpt": lambda size: gpt.build(gpt.SIZES[size]),
}
"""Builder of each job, by the job's name. The argument is the size, ``"cpu"``, ``"cuda"`` or ``"quick"``."""

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
    """Train each job twice, in turns, and print the comparison and the report.

    Args:
        names: names of jobs in ``JOBS``.
        console: console for progress and results.
        quick: use very small sizes.
        epochs: passes over the training data; None takes the job's own number.
        budget: seconds per job that measurements may take.
        command: command line of the user, for the result.

    Returns:
        The results of all jobs.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    start = time.perf_counter()
    results = []
    for name in names:
        job = JOBS[name]("quick" if quick else device.type)
        results.append(run_job(job, device, epochs or job.training.epochs, budget, console))
    return DemoResult(tuple(results), time.perf_counter() - start, command)


def run_job(job: DemoJob, device: torch.device, epochs: int, budget: float, console: Console) -> JobResult:
    """Train one job twice, in turns, and print the comparison and the report."""
    console.print(Rule(f"[bold]{job.title}", align="left", style="dim"))
    bars = _Bars(console, job, epochs)
    tuned = Optimized(job, device, epochs, bars.add("through flatout"), budget)
    first = Naive(job, device, epochs, bars.add("as first written"))
    with bars:
        take_turns([first, tuned])
    result = JobResult(
        job=job.name,
        title=job.title,
        unit=job.unit,
        epochs=epochs,
        parameters=sum(p.numel() for p in make_model(job).parameters() if p.requires_grad),
        naive=first.outcome(),
        optimized=tuned.outcome(),
        tuning_seconds=tuned.tuning_seconds,
        report=tuned.report,
    )
    console.print(result, "", tuned.report, "")
    return result


class _Bars:
    """Progress bars of the trainings. The bars advance in turns."""

    def __init__(self, console: Console, job: DemoJob, epochs: int) -> None:
        self._total = epochs * len(job.train)  # type: ignore[arg-type]
        self._progress = Progress(
            TextColumn("{task.description:<16}"),
            BarColumn(bar_width=28),
            TaskProgressColumn(),
            TextColumn("{task.fields[rate]:>8} " + job.unit + "/s", style="cyan"),
            TextColumn("{task.fields[seconds]}"),
            TextColumn("{task.fields[loss]}", style="dim"),
            console=console,
            auto_refresh=False,
        )

    def __enter__(self) -> _Bars:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def add(self, label: str) -> Tick:
        """Add a bar, and return the function that advances the bar."""
        task = self._progress.add_task(label, total=self._total, rate="", seconds="", loss="")
        done, shown = 0, 0.0

        def tick(samples: int, loss: float | None, seconds: float) -> None:
            nonlocal done, shown
            done += samples
            if seconds - shown > _REFRESH_SECONDS or done >= self._total:
                shown = seconds
                self._progress.update(
                    task,
                    completed=done,
                    rate=f"{done / max(seconds, 1e-9):,.0f}",
                    seconds=f"{seconds:.0f} s",
                    loss="" if loss is None else f"loss {loss:.3f}",
                    refresh=True,
                )

        return tick
