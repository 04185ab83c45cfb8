"""Rendered samples, by the names of their files."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

from flatout.cli import demo, doctor
from flatout.cli.demo import Process
from flatout.cli.diagnosis import Finding
from flatout.cli.monitor import table
from flatout.report import Pace, Report, Summary
from flatout.report.model import RankPace
from flatout.report.terminal import show
from tests.monitor import monitor_sample
from tests.profile.profile_sample import ended_early, sync_bound
from tests.renderings.rendered import drawn, everywhere, in_terminal, on_page, root_of
from tests.report import report_sample

FOLDER = Path(__file__).parent


def reports() -> dict[str, str]:
    """Return the renderings of the sample report, and of reports that lack parts of it."""
    whole = report_sample.sample()
    bare = dataclasses.replace(whole, rows=(), notes=(), won=())
    ranks = (
        RankPace(0, "node1", "cuda:0", 0.0, 1.52, 0.38, 0.41),
        RankPace(1, "node1", "cuda:1", 0.0, 1.82, 0.09, 0.4),
    )
    unphased = dataclasses.replace(whole.before, phases={}, loader_per_second=None, mfu=None, step_bytes=None)
    lacking = {
        "without phases before": dataclasses.replace(bare, before=unphased),
        "two ranks": dataclasses.replace(
            bare,
            before=dataclasses.replace(whole.before, exposed_ms=0.31),
            after=dataclasses.replace(whole.after, exposed_ms=0.042, ranks=ranks, scaling=0.93),
        ),
        "ten ranks": dataclasses.replace(
            bare,
            after=dataclasses.replace(
                whole.after, ranks=tuple(dataclasses.replace(ranks[i % 2], rank=i) for i in range(10))
            ),
        ),
        "paces alone": dataclasses.replace(bare, before=Pace(4.1, 2.1, 5161.3), after=Pace(1.9, 0.08, 16161.6)),
        "an unknown pace": dataclasses.replace(
            bare, before=Pace(math.nan, math.nan, math.nan), after=Pace(1.0, 0.0, 1.0)
        ),
        "not raced": dataclasses.replace(bare, before=None),
        "tuned and not raced": dataclasses.replace(bare, before=None, won=whole.won),
        "slower": dataclasses.replace(bare, before=whole.after, after=whole.before),
        "as fast": dataclasses.replace(bare, before=whole.before, after=whole.before),
        "nothing": Summary(rows=(), environment={}),
        "from one pair": Summary((report_sample.one_pair_row(),), {}),
    }
    report = Report(whole)
    rendered = everywhere(report) | {"repr": repr(report)}
    rendered |= {f"all rows, {width} columns": in_terminal(report.full(), width) for width in (80, 140)}
    for name, summary in lacking.items():
        report = Report(summary)
        rendered[f"{name}: terminal, 80 columns"] = in_terminal(report, 80)
        rendered[f"{name}: page"] = on_page(root_of(report))
        rendered[f"{name}: repr"] = repr(report)
    return rendered


def profiles() -> dict[str, str]:
    """Return the renderings of the profile of a sync-bound training."""
    profile = sync_bound()
    early = dataclasses.replace(ended_early(), environment=profile.environment)
    return everywhere(profile) | {
        "ended before the profiler began: terminal, 80 columns": in_terminal(early, 80),
    }


def demos() -> dict[str, str]:
    """Return the renderings of a job of the demo. Tuning paid in the first job, and not in the second."""
    receipt = "flatout  1.95× (1.90 to 2.00)\ntuned in 3.2 s"
    plain = Process("plain PyTorch", 38.2, 35.1, "loss 0.0291, accuracy 98.9%", "")
    second = Process("flatout, again", 23.0, 18.9, "loss 0.0301, accuracy 98.6%", receipt)
    return {
        "terminal, 80 columns": drawn(partial(show, [*demo.blocks([plain, first_start(27.1, receipt), second])]), 80),
        "terminal, 60 columns": drawn(partial(show, [*demo.blocks([plain, first_start(41.3, receipt), second])]), 60),
    }


def first_start(seconds: float, receipt: str) -> Process:
    return Process("flatout, first", seconds, 19.1, "loss 0.0301, accuracy 98.6%", receipt)


def monitors() -> dict[str, str]:
    """Return the tables of two GPUs, of a GPU that cannot be reached, and without a GPU."""
    whole = table(monitor_sample.whole())
    return {
        "whole, 80 columns": in_terminal(whole, 80),
        "whole, 80 columns, ASCII": in_terminal(whole, 80, ascii_only=True),
        "whole, 130 columns": in_terminal(whole, 130),
        "lost, 100 columns": in_terminal(table(monitor_sample.lost()), 100),
        "no GPU, 80 columns": in_terminal(table(monitor_sample.without_gpu()), 80),
    }


FINDINGS = (
    Finding("install", "torch", "2.14.1, on a machine with an NVIDIA GPU", "broken", "install a build for CUDA"),
    Finding("install", "flatout", "0.1.0"),
    Finding("memory", "/dev/shm", "64.0 MiB free", "slow", "docker run --shm-size=8g"),
    Finding("GPU", "cuda:0 peak", "not in the table", "note", "flatout.mfu.measured_peak_flops()"),
)


def doctors() -> dict[str, str]:
    """Return the renderings of the doctor's findings."""
    return {
        "terminal, 80 columns": drawn(partial(show, [*doctor.blocks(FINDINGS)]), 80),
        "terminal, 40 columns, ASCII": drawn(partial(show, [*doctor.blocks(FINDINGS)]), 40, ascii_only=True),
    }


SAMPLES: dict[str, Callable[[], dict[str, str]]] = {
    "demo": demos,
    "doctor": doctors,
    "monitor": monitors,
    "profile": profiles,
    "report": reports,
}


def file_of(name: str) -> Path:
    return FOLDER / f"{name}.txt"


def render(name: str) -> str:
    """Return the text of a file: all its renderings, each below its name."""
    return "\n".join(f"==== {title}\n{text.rstrip()}\n" for title, text in SAMPLES[name]().items())
