"""Claim: an asynchronous checkpoint costs the training less than 2 % of its speed.

    pytest benchmarks/checkpoints.py -s --full

The benchmark trains the digits CNN and the byte GPT with flatout's rules. Three kinds of blocks of ``EVERY`` steps take
turns: with one asynchronous save, without a save, and with one save that training waits for. Goal: an asynchronous save
costs less than 2 %.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from pathlib import Path

import pytest
from support.loops import tuned
from support.scale import scaled
from support.training_jobs import JOBS

EVERY = scaled(200, 20)
"""Number of steps for each save."""

ROUNDS = scaled(9, 3)

SAVES = {"none": None, "asynchronous": True, "waited for": False}


@pytest.mark.parametrize("name", scaled(["digits_cnn", "byte_gpt"], ["digits_cnn"]))
def test_cost(name: str, benchmark, tmp_path: Path) -> None:
    """Time the asynchronous saves in turns with the other kinds, whose results are in ``extra_info``."""
    run, steps = tuned(JOBS[name](), budget=0)
    returned: dict[str, list[float]] = {kind: [] for kind in SAVES}
    took: dict[str, list[float]] = {kind: [] for kind in SAVES}

    def turn(kind: str) -> None:
        begun = time.perf_counter()
        if SAVES[kind] is not None:
            run.save(tmp_path / "a.pt", asynchronous=SAVES[kind])
        returned[kind].append(time.perf_counter() - begun)
        for _ in itertools.islice(steps, EVERY):
            pass
        took[kind].append(time.perf_counter() - begun)
        run.flush_saves()

    order = random.Random(0)
    for _ in range(ROUNDS):
        for kind in order.sample(list(SAVES), len(SAVES)):
            turn(kind)
    cost = {
        kind: statistics.median(with_it / without for with_it, without in zip(took[kind], took["none"], strict=True))
        for kind in SAVES
    }
    size = (tmp_path / "a.pt").stat().st_size
    benchmark.pedantic(lambda: turn("asynchronous"), rounds=1)
    waits = {kind: 1e3 * statistics.median(returned[kind]) for kind in SAVES}
    step_ms = 1e3 * statistics.median(took["none"]) / EVERY
    print(f"\n{name}: {size / 2**20:.1f} MiB every {EVERY} steps of {step_ms:.2f} ms")
    for kind in ("asynchronous", "waited for"):
        print(f"  {kind}: {100 * (cost[kind] - 1):+.2f} %, save() returns after {waits[kind]:.1f} ms")
    benchmark.extra_info |= {
        "bytes": size,
        "steps to a save": EVERY,
        "seconds of these steps": round(statistics.median(took["none"]), 3),
        "times as long": {kind: round(value, 4) for kind, value in cost.items()},
        "save() returns after ms": {kind: round(value, 2) for kind, value in waits.items()},
    }
