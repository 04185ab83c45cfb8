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
from support import loops
from support.loops import Flags, made
from support.training_jobs import JOBS, Job
from support.turns import LaneApart, closing, fastest, ratio, take_turns
from torch import nn

ROUNDS = 12
TURN = 1.0
SCREEN_ROUNDS = 3
"""Turns that each of an expert's choices is given."""

BUDGET = 90.0
"""Seconds that flatout may take to tune."""


def grid(job: Job) -> list[Flags]:
    """Every combination of what an expert chooses from for a job."""
    convolves = any(isinstance(module, nn.Conv2d) for module in made(job).modules())
    either = (False, True)
    choices = either, either, either if convolves else (False,), either if job.attends else (False,)
    return list(itertools.starmap(Flags, itertools.product(*choices)))


def fastest_of(lanes: list[LaneApart]) -> LaneApart:
    """The fastest; the others are closed."""
    best = fastest(take_turns(lanes, SCREEN_ROUNDS, TURN))
    with closing([lane for lane in lanes if lane.name != best]):
        return next(lane for lane in lanes if lane.name == best)


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
    flags = {f"expert ({each})": each for each in grid(job)}
    expert = fastest_of([LaneApart(lane, loop, "expert", name, each) for lane, each in flags.items()])
    best = flags[expert.name]
    lanes = [LaneApart("naive", loop, "naive", name), expert]
    workers = 0
    if find_spec("lightning"):
        with_workers = {f"Lightning Fabric ({n} workers)": n for n in (0, 2)}
        fabric = fastest_of([LaneApart(lane, loop, "fabric", name, best, n) for lane, n in with_workers.items()])
        workers = with_workers[fabric.name]
        lanes.append(fabric)
    if find_spec("accelerate"):
        lanes.append(LaneApart(f"accelerate ({workers} workers)", loop, "accelerated", name, best, workers))
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
