"""Claim: what ``flatout.optimize`` finds trains as fast as the best that was written by hand, on every job.

    python -m pytest benchmarks/optimize.py -s --benchmark-json=benchmarks/results/optimize.json

Six jobs; for each the loop as first written, an expert's, Lightning Fabric and accelerate with the expert's flags and
the better of 0 and 2 workers, and flatout, which chooses by itself. Each has a process of its own, and all take turns
of a second. Goals: at least 1.0 times the best of the others on each job, 1.05 in the geometric mean, and twice the
naive loop.

The expert chooses from every combination of bf16, compilation of model and loss, channels_last and attention by plain
products. All are screened in three turns, and the best three are timed again, as long as the last race. The last race
counts only its own turns. The turns that chose the expert favor it by luck, and would make it look faster than it is.

Beside each speed stands the time to set up: from the start of the process to the first timed step. Compilers start from
an empty cache. flatout's tuning is part of its time. ``FLATOUT_BENCH_SHRINK=10`` takes a tenth of budgets and turns.
"""

from __future__ import annotations

import itertools
import os
import statistics
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
from support import loops
from support.loops import Flags, made
from support.training_jobs import JOBS, Job
from support.turns import LaneApart, closing, ratio, take_turns
from torch import nn

SHRINK = int(os.environ.get("FLATOUT_BENCH_SHRINK", "1"))
ROUNDS = max(2, 12 // SHRINK)
TURN = 1.0 / SHRINK
SCREEN_ROUNDS = max(1, 3 // SHRINK)
"""Turns that each of an expert's choices is given."""

FINALISTS = 3
"""The expert's best choices, which are given as many turns as the last race."""

BUDGET = 90.0 / SHRINK
"""Seconds that flatout may take to tune."""


def grid(job: Job) -> list[Flags]:
    """Every combination of what an expert chooses from for a job."""
    convolves = any(isinstance(module, nn.Conv2d) for module in made(job).modules())
    either = (False, True)
    choices = either, either, either if convolves else (False,), either if job.attends else (False,)
    return list(itertools.starmap(Flags, itertools.product(*choices)))


def best_of(lanes: list[LaneApart], count: int, rounds: int) -> list[LaneApart]:
    """The fastest ``count`` in so many turns; the others are closed."""
    rates = take_turns(lanes, rounds, TURN)
    ranked = sorted(lanes, key=lambda lane: -statistics.median(rates[lane.name]))
    with closing(ranked[count:]):
        return ranked[:count]


def loop(kind: str, name: str, *args: Any) -> tuple[Iterator[int], None]:
    """A contender's steps, by its name in ``support.loops``."""
    return getattr(loops, kind)(JOBS[name](), *args), None


@pytest.mark.parametrize("name", JOBS)
def test_job(name: str, benchmark) -> None:
    """Times flatout's loop; the others take turns with it and are in ``extra_info``."""
    job = JOBS[name]()
    flags = {f"expert ({each})": each for each in grid(job)}
    finalists = best_of(
        [LaneApart(lane, loop, "expert", name, each) for lane, each in flags.items()], FINALISTS, SCREEN_ROUNDS
    )
    (expert,) = best_of(finalists, 1, ROUNDS)
    best = flags[expert.name]
    lanes = [LaneApart("naive", loop, "naive", name), expert]
    workers = 0
    if find_spec("lightning"):
        with_workers = {f"Lightning Fabric ({n} workers)": n for n in (0, 2)}
        fabrics = [LaneApart(lane, loop, "fabric", name, best, n) for lane, n in with_workers.items()]
        (fabric,) = best_of(fabrics, 1, SCREEN_ROUNDS)
        workers = with_workers[fabric.name]
        lanes.append(fabric)
    if find_spec("accelerate"):
        lanes.append(LaneApart(f"accelerate ({workers} workers)", loop, "accelerated", name, best, workers))
    ours = LaneApart("flatout", loops.tuned_loop, name, BUDGET)
    lanes.append(ours)
    with closing(lanes):
        rates = take_turns(lanes, ROUNDS, TURN)
        benchmark.pedantic(lambda: ours.turn(TURN), rounds=1)
    speed = {lane: statistics.median(each) for lane, each in rates.items()}
    setup = {lane.name: lane.setup_seconds for lane in lanes}
    print(
        f"\n{job.name}: flatout {speed['flatout']:,.0f} samples/s, ready in {setup['flatout']:.0f} s: {ours.told.kept}"
    )
    ratios = {other: ratio(rates, "flatout", other) for other in rates if other != "flatout"}
    for other, times in ratios.items():
        print(f"  {times:6.2f}x {other:40} {speed[other]:12,.0f} samples/s, ready in {setup[other]:.0f} s")
    benchmark.extra_info |= {
        "kept": ours.told.kept,
        "tuning seconds": round(ours.told.seconds, 1),
        "setup seconds": {lane: round(each, 1) for lane, each in setup.items()},
        "samples/s": {lane: round(each, 1) for lane, each in speed.items()},
        "times as fast as": {other: round(times, 3) for other, times in ratios.items()},
        "best other": min(ratios, key=lambda other: ratios[other]),
    }
