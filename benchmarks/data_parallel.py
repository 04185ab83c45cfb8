"""Claim: data-parallel training through flatout is as fast as by torch DDP, accelerate and Lightning Fabric.

    python -m pytest benchmarks/data_parallel.py -s --benchmark-json=benchmarks/results/data_parallel.json

Two ranks of one process group, on two GPUs with NCCL, or on the CPU with gloo and a thread each. Every rank holds all
trainings: the same weights, the same batches, which lie on the device already, and torch's fused AdamW. The peers have
``gradient_as_bucket_view=True`` and ``static_graph=True``, and on a CPU ``bucket_cap_mb=25``. Blocks of steps take
turns, in an order that all ranks draw from the same seed. A block takes the time of its slowest rank. A ratio is a
geometric mean over rounds, with its 95 % interval. The losses of all trainings are compared after the first steps and
after the last.

"flatout" is ``run.step`` with all measured techniques off: what differs is the way that gradients are averaged, that
ranks agree in every step on whether one has run out of memory, and that the loss is the mean of all ranks. "flatout
tuned" is what ``flatout.optimize`` keeps, and may have another precision. Goal: the lower end of the interval of
flatout against the fastest peer is at least 0.97. ``FLATOUT_BENCH_SHRINK=10`` takes a tenth of the time.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.data_parallel_jobs import JOBS
from support.intervals import gain
from support.machine_facts import machine_facts
from support.turns import fastest

RANKS = 2
SHRINK = int(os.environ.get("FLATOUT_BENCH_SHRINK", "1"))
ROUNDS = max(3, 60 // SHRINK)
SECONDS = 0.5 / SHRINK
"""Length of a block."""

BUDGET = 30.0 / SHRINK
"""Seconds that flatout may take to tune."""

LEAST = 0.97
"""Goal for the lower end of flatout's ratio to the fastest peer."""


def race(name: str, file: Path) -> dict[str, dict[str, list[float]]]:
    """Run all trainings of a job on all ranks, and return what rank 0 has written."""
    launcher = (
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={RANKS}",
        "-m",
        "support.rank_process",
    )
    done = subprocess.run(
        [sys.executable, *launcher, name, str(file), str(ROUNDS), str(SECONDS), str(BUDGET)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(file.read_text())


@pytest.mark.skipif(torch.cuda.device_count() == 1, reason="needs two CUDA devices, or none")
@pytest.mark.parametrize("name", JOBS)
def test_job(name: str, benchmark, tmp_path: Path) -> None:
    """Lets all trainings of a job take turns on two ranks."""
    pytest.importorskip("accelerate")
    pytest.importorskip("lightning")
    load = os.getloadavg()[0]
    found = benchmark.pedantic(race, (name, tmp_path / "found.json"), rounds=1)
    rates = found["rates"]
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
        "machine": machine_facts(),
        "load before": round(load, 1),
        "best peer": best,
        "samples/s": {lane: round(each, 1) for lane, each in speed.items()},
        "steps of a block": found["steps"],
        "losses": found["losses"],
        "times as fast": {
            pair: [round(number, 3) for number in (each.ratio, each.low, each.high)] for pair, each in ratios.items()
        },
    }
