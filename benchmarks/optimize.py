"""Claim: loops tuned by ``flatout.optimize`` are as fast as the best loops written by hand, on every job.

    pytest benchmarks/optimize.py -s --full

The benchmark compares loops on seven jobs: a naive loop, an expert's loop, Lightning Fabric, accelerate, and flatout.
Fabric and accelerate use the expert's flags and the better of 0 and 2 workers. flatout decides without flags. Each loop
has a separate process, and all loops take turns of a second. Goals: at least 1.0 times the speed of the best other loop
on each job, 1.05 in the geometric mean, and twice the speed of the naive loop.

The expert chooses from all combinations of bf16, compilation of model and loss, channels_last, and attention by plain
products. All combinations are screened in three turns. The best three are timed again, for as long as the last race.
The last race counts only its own turns. The turns that chose the expert's loop favor this loop by chance, and would
overestimate its speed.

The results also contain the setup time, from the start of the process to the first timed step. Compilers start with an
empty cache. The setup time of flatout includes tuning.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
from support import loops, scale
from support.loops import Flags, made
from support.scale import scaled
from support.training_jobs import JOBS, Job
from support.turns import LaneApart, closing, ratio, take_turns
from torch import nn

ROUNDS = scaled(12, 2)
TURN = scaled(1.0, 0.1)
SCREEN_ROUNDS = scaled(3, 1)
"""Number of turns in which each combination of the expert is screened."""

FINALISTS = 3
"""Number of the expert's best combinations that are timed for as many turns as the last race."""

BUDGET = scaled(90.0, 2.0)
"""Seconds that flatout may take to tune."""


def grid(job: Job) -> list[Flags]:
    """Return all combinations of flags from which the expert chooses for a job."""
    convolves = any(isinstance(module, nn.Conv2d) for module in made(job).modules())
    either = (False, True)
    if not scale.full:
        return [Flags()]
    choices = either, either, either if convolves else (False,), either if job.attends else (False,)
    return list(itertools.starmap(Flags, itertools.product(*choices)))


def best_of(lanes: list[LaneApart], count: int, rounds: int) -> list[LaneApart]:
    """Return the fastest ``count`` lanes after ``rounds`` turns, and close all other lanes."""
    rates = take_turns(lanes, rounds, TURN)
    ranked = sorted(lanes, key=lambda lane: -statistics.median(rates[lane.name]))
    with closing(ranked[count:]):
        return ranked[:count]


def loop(kind: str, name: str, *args: Any) -> tuple[Iterator[int], None]:
    """Return the steps of a loop by its name in ``support.loops``."""
    return getattr(loops, kind)(JOBS[name](), *args), None


@pytest.mark.parametrize("name", scaled(list(JOBS), ["tabular"]))
def test_job(name: str, benchmark) -> None:
    """Time flatout's loop in turns with the other loops. Their results are in ``extra_info``."""
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
        with_workers = {f"Lightning Fabric ({n} workers)": n for n in scaled((0, 2), (0,))}
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
