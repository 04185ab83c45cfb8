"""Claim: what this commit tunes trains no slower than what an earlier commit tunes, and is tuned in half the time.

    FLATOUT_BENCH_BASE=/earlier/.venv/bin/python python -m pytest benchmarks/against_commit.py -s \\
        --benchmark-json=benchmarks/results/against_commit.json

FLATOUT_BENCH_BASE is an interpreter that imports the earlier flatout, with the same torch. The six jobs of
benchmarks/optimize.py: both commits tune the same job, each in a process of its own with empty caches, and then take
turns of a second. The order of the two tunings is drawn for each job. Goals: a ratio whose interval reaches 1.0 on each
job, and 81 s to tune all six, half of the 163 s of benchmarks/results/optimize.json of 2026-11-22.
``FLATOUT_BENCH_SHRINK=10`` takes a tenth of budgets and turns.
"""

from __future__ import annotations

import os
import random

import pytest
from support.intervals import gain
from support.loops import tuned_loop
from support.machine_facts import commit_of
from support.training_jobs import JOBS
from support.turns import LaneApart, closing, take_turns

BASE = os.environ.get("FLATOUT_BENCH_BASE")
SHRINK = int(os.environ.get("FLATOUT_BENCH_SHRINK", "1"))
ROUNDS = max(2, 24 // SHRINK)
TURN = 1.0 / SHRINK

BUDGET = 90.0 / SHRINK
"""Seconds that each commit may take to tune."""

MOST_SECONDS = 81.0
"""Goal for the seconds in which this commit tunes all jobs."""

needs_base = pytest.mark.skipif(BASE is None, reason="needs FLATOUT_BENCH_BASE, an interpreter with an earlier flatout")

tuning_seconds: dict[str, dict[str, float]] = {"base": {}, "this": {}}
"""By commit and job."""


def cache_of(side: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the variable of an empty cache that keeps no plans."""
    folder = tmp_path_factory.mktemp(side)
    (folder / "plans").touch()
    return {"FLATOUT_CACHE": str(folder)}


@needs_base
@pytest.mark.parametrize("name", JOBS)
def test_job(name: str, benchmark, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Times this commit's loop; the earlier commit's takes turns with it and is in ``extra_info``."""
    lanes: dict[str, LaneApart] = {}
    for side in random.Random(name).sample(["base", "this"], 2):
        lanes[side] = LaneApart(
            side,
            tuned_loop,
            name,
            BUDGET,
            python=BASE if side == "base" else None,
            environment=cache_of(side, tmp_path_factory),
        )
    tunings = {side: lane.told for side, lane in lanes.items()}
    assert tunings["base"].folder != tunings["this"].folder, "FLATOUT_BENCH_BASE imports this commit"
    with closing(list(lanes.values())):
        rates = take_turns(list(lanes.values()), ROUNDS, TURN)
        benchmark.pedantic(lambda: lanes["this"].turn(TURN), rounds=1)
    times = gain(rates, "this", "base")
    for side, tuning in tunings.items():
        tuning_seconds[side][name] = tuning.seconds
    print(f"\n{name}: {times.ratio:.3f}x the base ({times.low:.3f} to {times.high:.3f})")
    for side, tuning in tunings.items():
        print(f"  {side} kept {tuning.kept}, tuned in {tuning.seconds:.1f} s")
    benchmark.extra_info |= {
        "times as fast as the base": [round(each, 3) for each in (times.ratio, times.low, times.high)],
        "tuning seconds": {side: round(tuning.seconds, 1) for side, tuning in tunings.items()},
        "kept": {side: tuning.kept for side, tuning in tunings.items()},
        "commits": {side: commit_of(tuning.folder) for side, tuning in tunings.items()},
    }


@needs_base
def test_tuning_seconds() -> None:
    """Prints the seconds in which both commits tuned all jobs."""
    sums = {side: sum(seconds.values()) for side, seconds in tuning_seconds.items()}
    jobs = len(tuning_seconds["this"])
    print(f"\ntuning of {jobs} jobs: {sums['this']:.0f} s (goal {MOST_SECONDS:.0f} s), base {sums['base']:.0f} s")
