"""Claim: a checkpoint that is written beside the training costs it less than 2 %.

    python -m pytest benchmarks/checkpoints.py -s --benchmark-json=benchmarks/results/checkpoints.json

The digits CNN and the byte GPT, each with what flatout chooses by rule: so many steps with one asynchronous save among
them, in turns with as many without, and with one that training waits for. Goal: less than 2 % for the first.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from pathlib import Path

import pytest
from support.loops import tuned
from support.training_jobs import JOBS

EVERY = 200
"""Steps to a save."""

ROUNDS = 9

SAVES = {"none": None, "asynchronous": True, "waited for": False}


@pytest.mark.parametrize("name", ["digits_cnn", "byte_gpt"])
def test_cost(name: str, benchmark, tmp_path: Path) -> None:
    """Times the asynchronous turn; the others take turns with it and are in ``extra_info``."""
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
