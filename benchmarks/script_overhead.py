"""Claim: after its tuning, `flatout run` adds less than 20 us of host time to a step.

    pytest benchmarks/script_overhead.py -s --full

A script trains a network of two small layers, so that a step has little other work. Processes of `python` and of
`flatout run --dry-run` take turns. The dry run measures every technique and keeps none. Each process prints the median
time of the last third of its steps, after all tuning.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from support.scale import scaled

REPEATS = scaled(4, 1)
SECONDS = scaled(35, 1)
"""Duration of the training of a process, with tuning."""

MOST_MICROSECONDS = 20.0
"""Goal for the host time that `flatout run` adds to a step."""

SCRIPT = """
import statistics, sys, time
import torch
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
torch.set_num_threads(1)
loader = DataLoader(TensorDataset(torch.randn(512, 8), torch.randn(512, 1)), batch_size=64)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
seconds, end = [], time.perf_counter() + float(sys.argv[1])
while time.perf_counter() < end:
    for x, y in loader:
        begun = time.perf_counter()
        loss = torch.nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seconds.append(time.perf_counter() - begun)
print(1e6 * statistics.median(seconds[-len(seconds) // 3 :]))
"""


def microseconds_of_step(folder: Path, *launcher: str) -> float:
    """Return the median time of a step in a separate process, in microseconds."""
    script = folder / "train.py"
    script.write_text(SCRIPT, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, *launcher, str(script), str(SECONDS)], cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return float(done.stdout)


def test_flatout_run_adds_little_to_a_step(benchmark: Any, tmp_path: Path) -> None:
    plain: list[float] = []
    watched: list[float] = []

    def measure() -> None:
        for _ in range(REPEATS):
            plain.append(microseconds_of_step(tmp_path))
            run = ("-m", "flatout", "run", "--dry-run", "--plan", "none", "--without", "compile")
            watched.append(microseconds_of_step(tmp_path, *run))

    benchmark.pedantic(measure, rounds=1)
    added = statistics.median(b - a for a, b in zip(plain, watched, strict=True))
    benchmark.extra_info.update(microseconds={"python": plain, "flatout run": watched}, added=added)
    print(f"\nflatout run adds {added:.1f} us to a step of {statistics.median(plain):.1f} us")
    assert added < scaled(MOST_MICROSECONDS, float("inf"))
