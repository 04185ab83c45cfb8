"""Claim: what ``flatout.optimize`` finds trains as fast as the best that was written by hand, on every job.

    python -m pytest benchmarks/optimize.py -s --benchmark-json=benchmarks/results/optimize.json

Six jobs; for each the loop as first written, an expert's (the best of every combination of bf16, compilation of model
and loss, channels_last and attention by plain products, screened here), Lightning Fabric and accelerate with the
expert's flags and the better of 0 and 2 workers, and flatout, which chooses by itself. Each has a process of its own,
and all take turns of a second. Goals: at least 1.0 times the best of the others on each job, 1.05 in the geometric
mean, and twice the naive loop.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from support import loops
from support.loops import Flags, expert, fabric, made
from support.training_jobs import JOBS, Job
from support.turns import Lane, LaneApart, closing, fastest, ratio, take_turns
from torch import nn

ROUNDS = 12
TURN = 1.0
SCREEN_ROUNDS = 3
"""Turns that each of an expert's choices is given."""

BUDGET = 90.0
"""Seconds that flatout may take to tune."""

torch._dynamo.config.recompile_limit = (
    64  # what an expert screens shares the model's code; nothing is to run uncompiled
)


def screened(job: Job) -> Flags:
    """The best of an expert's choices."""
    convolves = any(isinstance(module, nn.Conv2d) for module in made(job).modules())
    either = (False, True)
    grid = itertools.product(either, either, either if convolves else (False,), either if job.attends else (False,))
    flags = {str(each): each for each in itertools.starmap(Flags, grid)}
    return flags[_fastest([Lane(name, expert(job, each)) for name, each in flags.items()])]


def better_workers(job: Job, flags: Flags) -> int:
    """0 or 2, for the libraries' loaders."""
    return int(_fastest([Lane(str(n), fabric(job, flags, n)) for n in (0, 2)]))


def _fastest(lanes: list[Lane]) -> str:
    with closing(lanes):
        return fastest(take_turns(lanes, SCREEN_ROUNDS, TURN))


def loop(kind: str, name: str, *args: Any) -> tuple[Iterator[int], None]:
    """A contender's steps, by its name in ``support.loops``."""
    return getattr(loops, kind)(JOBS[name](), *args), None


def tuned_loop(name: str) -> tuple[Iterator[int], tuple[str, float]]:
    """flatout's steps, what it kept, and the seconds that it took to find that."""
    run, steps = loops.tuned(JOBS[name](), budget=BUDGET)
    return steps, (loops.kept_by(run), run.report.summary.tuning_seconds)


@pytest.mark.parametrize("name", JOBS)
def test_job(name: str, benchmark) -> None:
    """Times flatout's loop; the others take turns with it and are in ``extra_info``."""
    job = JOBS[name]()
    flags = screened(job)
    lanes = [LaneApart("naive", loop, "naive", name), LaneApart(f"expert ({flags})", loop, "expert", name, flags)]
    workers = better_workers(job, flags) if find_spec("lightning") else 0
    if find_spec("lightning"):
        lanes.append(LaneApart("Lightning Fabric", loop, "fabric", name, flags, workers))
    if find_spec("accelerate"):
        lanes.append(LaneApart("accelerate", loop, "accelerated", name, flags, workers))
    ours = LaneApart("flatout", tuned_loop, name)
    lanes.append(ours)
    with closing(lanes):
        rates = take_turns(lanes, ROUNDS, TURN)
        benchmark.pedantic(lambda: ours.turn(TURN), rounds=1)
    kept, tuning = ours.told
    speed = {lane: statistics.median(each) for lane, each in rates.items()}
    print(f"\n{job.name}: flatout {speed['flatout']:,.0f} samples/s, tuned in {tuning:.0f} s: {kept}")
    ratios = {other: ratio(rates, "flatout", other) for other in rates if other != "flatout"}
    for other, times in ratios.items():
        print(f"  {times:6.2f}x {other:40} {speed[other]:12,.0f} samples/s")
    benchmark.extra_info |= {
        "kept": kept,
        "tuning seconds": round(tuning, 1),
        "samples/s": {lane: round(each, 1) for lane, each in speed.items()},
        "times as fast as": {other: round(times, 3) for other, times in ratios.items()},
        "best other": min(ratios, key=lambda other: ratios[other]),
    }
