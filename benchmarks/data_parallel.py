"""Claim: data-parallel training with flatout is as fast as with torch DDP, accelerate and Lightning Fabric.

    pytest benchmarks/data_parallel.py -s --full

A process group has two ranks, on two GPUs with NCCL, or on the CPU with gloo and one thread per rank. Every rank holds
all trainings, with the same weights, the same batches on the device, and torch's fused AdamW. The peers have
``gradient_as_bucket_view=True`` and ``static_graph=True``, and on a CPU ``bucket_cap_mb=25``. Blocks of steps take
turns, in an order that all ranks draw from the same seed. The time of a block is that of its slowest rank.

The benchmark runs in sixteen process groups, one after another. Memory addresses can make two equal trainings of one
process differ by several percent. Each process group gives the geometric mean of its rounds. A ratio is the geometric
mean of these sixteen numbers, with their 95 % interval. The losses of all trainings are compared after the first steps
and after the last steps.

"flatout" is ``run.step`` with all measured techniques off. It differs from the peers in the way that gradients are
averaged. Its ranks also agree in every step if one of them ran out of memory, and its loss is the mean of all ranks.
"flatout tuned" uses the techniques that ``flatout.optimize`` keeps, and may have another precision. The first process
group tunes and saves the plan, and the others apply it. Goal: the lower bound of the interval of flatout against the
fastest peer is at least 0.97.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.data_parallel_jobs import JOBS
from support.intervals import gain
from support.scale import scaled
from support.turns import fastest

RANKS = 2
LAUNCHES = scaled(16, 2)
"""Number of process groups."""

ROUNDS = scaled(6, 2)
"""Rounds of each process group."""

SECONDS = scaled(0.5, 0.1)
"""Duration of a block, in seconds."""

BUDGET = scaled(30.0, 3.0)
"""Seconds that flatout may take to tune."""

LEAST = 0.97
"""Goal for the lower bound of flatout's ratio to the fastest peer."""


def race(name: str, folder: Path) -> list[dict[str, Any]]:
    """Run all trainings of a job in several process groups, and return the records of each rank 0."""
    plan = folder / "plan.json"
    return [_launch(name, folder / f"{number}.json", plan) for number in range(LAUNCHES)]


def _launch(name: str, file: Path, plan: Path) -> dict[str, Any]:
    launcher = (
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={RANKS}",
        "-m",
        "support.rank_process",
    )
    done = subprocess.run(
        [sys.executable, *launcher, name, str(file), str(plan), str(ROUNDS), str(SECONDS), str(BUDGET)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(file.read_text())


@pytest.mark.skipif(torch.cuda.device_count() == 1, reason="needs two CUDA devices, or none")
@pytest.mark.parametrize("name", scaled(list(JOBS), ["mlp"]))
def test_job(name: str, benchmark, tmp_path: Path) -> None:
    """Let all trainings of a job take turns on two ranks."""
    pytest.importorskip("accelerate")
    pytest.importorskip("lightning")
    load = os.getloadavg()[0]
    found = benchmark.pedantic(race, (name, tmp_path), rounds=1)
    rates = {lane: [statistics.geometric_mean(each["rates"][lane]) for each in found] for lane in found[0]["rates"]}
    peers = {lane: each for lane, each in rates.items() if not lane.startswith("flatout")}
    best = fastest(peers)
    speed = {lane: statistics.median(each) for lane, each in rates.items()}
    ratios = {
        f"{ours} / {peer}": gain(rates, ours, peer) for ours in rates.keys() - peers.keys() for peer in sorted(peers)
    }
    reached = ratios[f"flatout / {best}"].low
    print(f"\n{name}: fastest peer {best}, {speed[best]:,.0f} samples/s; load {load:.1f} on {os.cpu_count()} cores")
    for pair, each in sorted(ratios.items()):
        print(f"  {pair:35}{each.ratio:7.3f}x ({each.low:.3f} to {each.high:.3f})")
    print(f"  goal {LEAST:g}: {'met' if reached >= LEAST else 'MISSED'}")
    benchmark.extra_info |= {
        "load before": round(load, 1),
        "best peer": best,
        "samples/s": {lane: round(each, 1) for lane, each in speed.items()},
        "steps of a block": [each["steps"] for each in found],
        "losses": [each["losses"] for each in found],
        "times as fast": {
            pair: [round(number, 3) for number in (each.ratio, each.low, each.high)] for pair, each in ratios.items()
        },
    }
