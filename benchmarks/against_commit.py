"""Claim: this commit tunes loops in half the time of an earlier commit, and its tuned loops are no slower.

    FLATOUT_BENCH_BASE=/earlier/.venv/bin/python pytest benchmarks/against_commit.py -s --full

FLATOUT_BENCH_BASE is an interpreter that imports the earlier flatout, with the same torch. The benchmark runs the seven
jobs of benchmarks/optimize.py. Both commits tune the same job, each in a separate process with empty caches. Then their
loops take turns of a second. The order of the two tunings is random for each job.

Goals: the interval of the ratio reaches 1.0 on each job. Tuning of all jobs takes 81 s, half of what six took in
benchmarks/results/optimize.json of 2026-11-22.
"""

from __future__ import annotations

import os
import random

import pytest
from support.intervals import gain
from support.loops import tuned_loop
from support.machine_facts import commit_of
from support.scale import scaled
from support.training_jobs import JOBS
from support.turns import LaneApart, closing, take_turns

BASE = os.environ.get("FLATOUT_BENCH_BASE")
ROUNDS = scaled(24, 2)
TURN = scaled(1.0, 0.1)

BUDGET = scaled(90.0, 3.0)
"""Seconds that each commit may take to tune."""

MOST_SECONDS = 81.0
"""Goal for the total tuning time of all jobs at this commit, in seconds."""

needs_base = pytest.mark.skipif(BASE is None, reason="needs FLATOUT_BENCH_BASE, an interpreter with an earlier flatout")

tuning_seconds: dict[str, dict[str, float]] = {"base": {}, "this": {}}
"""Seconds of each tuning, by commit and job."""


def cache_of(side: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the environment variable of an empty cache that stores no plans."""
    folder = tmp_path_factory.mktemp(side)
    (folder / "plans").touch()
    return {"FLATOUT_CACHE": str(folder)}


@needs_base
@pytest.mark.parametrize("name", scaled(list(JOBS), ["tabular"]))
def test_job(name: str, benchmark, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Time this commit's loop in turns with the earlier commit's loop. The comparison is in ``extra_info``."""
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
    """Print the total tuning time of all jobs for both commits."""
    sums = {side: sum(seconds.values()) for side, seconds in tuning_seconds.items()}
    jobs = len(tuning_seconds["this"])
    print(f"\ntuning of {jobs} jobs: {sums['this']:.0f} s (goal {MOST_SECONDS:.0f} s), base {sums['base']:.0f} s")
