"""Claim: what ``flatout.optimize`` finds trains as fast as the best that was written by hand, on every job.

    python -m pytest benchmarks/optimize.py -s --benchmark-json=benchmarks/results/optimize.json

Six jobs; for each the loop as first written, an expert's (the best of every combination of bf16, compilation and
channels_last, screened here), Lightning Fabric and accelerate with the expert's flags and the better of 0 and 2
workers, and flatout, which chooses by itself. All take turns of a second in one process. Goals: at least 1.0 times the
best of the others on each job, 1.05 in the geometric mean, and twice the naive loop.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Iterator

import pytest
import torch
from support.loops import DEVICE, Flags, accelerated, closing, expert, fabric, made, naive, tuned
from support.training_jobs import JOBS, Job
from torch import nn

ROUNDS = 12
TURN = 1.0
SCREEN = 1.0
"""Seconds that each of an expert's choices is tried for, twice."""


def rate(lane: Iterator[int], seconds: float) -> float:
    """Samples per second over a turn."""
    begun, samples = time.perf_counter(), 0
    while time.perf_counter() - begun < seconds:
        samples += next(lane)
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return samples / (time.perf_counter() - begun)


def take_turns(lanes: dict[str, Iterator[int]], rounds: int, seconds: float) -> dict[str, list[float]]:
    """Samples per second of each, round by round; a few steps come before."""
    rates: dict[str, list[float]] = {name: [] for name in lanes}
    order = random.Random(0)
    for lane in lanes.values():
        for _ in range(3):
            next(lane)
    for _ in range(rounds):
        for name in order.sample(list(lanes), len(lanes)):
            rates[name].append(rate(lanes[name], seconds))
    return rates


def screened(job: Job) -> Flags:
    """The best of an expert's choices."""
    has_convolutions = any(isinstance(module, nn.Conv2d) for module in made(job).modules())
    grid = itertools.product((False, True), (False, True), (False, True) if has_convolutions else (False,))
    flags = {str(each): each for each in itertools.starmap(Flags, grid)}
    lanes = {name: expert(job, each) for name, each in flags.items()}
    with closing(lanes):
        rates = take_turns(lanes, 2, SCREEN)
    return flags[max(rates, key=lambda name: max(rates[name]))]


def better_workers(job: Job, flags: Flags) -> int:
    """0 or 2, for the libraries' loaders."""
    lanes = {str(n): fabric(job, flags, n) for n in (0, 2)}
    with closing(lanes):
        rates = take_turns(lanes, 2, SCREEN)
    return int(max(rates, key=lambda name: max(rates[name])))


@pytest.mark.parametrize("name", JOBS)
def test_job(name: str, benchmark) -> None:
    """Times flatout's loop; the others take turns with it and are in ``extra_info``."""
    job = JOBS[name]()
    flags = screened(job)
    lanes = {"naive": naive(job), f"expert ({flags})": expert(job, flags)}
    try:
        workers = better_workers(job, flags)
        lanes["Lightning Fabric"] = fabric(job, flags, workers)
    except ImportError:
        workers = 0
    try:
        import accelerate  # noqa: F401

        lanes["accelerate"] = accelerated(job, flags, workers)
    except ImportError:
        pass
    run, lanes["flatout"] = tuned(job)
    with closing(lanes):
        rates = take_turns(lanes, ROUNDS, TURN)
        benchmark.pedantic(lambda: rate(lanes["flatout"], TURN), rounds=1)
    ours = rates.pop("flatout")
    kept = ", ".join(f"{row.title} ({row.chosen})" for row in run.report.rows if row.status == "kept" and row.chosen)
    tuning = run.report.summary.tuning_seconds
    print(f"\n{job.name}: flatout {statistics.median(ours):,.0f} samples/s, tuned in {tuning:.0f} s: {kept}")
    benchmark.extra_info |= {"flatout": statistics.median(ours), "kept": kept, "tuning seconds": round(tuning, 1)}
    for other, theirs in rates.items():
        ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
        print(f"  {ratio:6.2f}x {other:40} {statistics.median(theirs):12,.0f} samples/s")
        benchmark.extra_info[other] = {"samples/s": statistics.median(theirs), "ratio": round(ratio, 3)}
    best = max(rates, key=lambda other: statistics.median(rates[other]))
    benchmark.extra_info["best other"] = best
