"""Claim: the demo's jobs train faster through ``flatout.optimize``, data loading included.

    pytest benchmarks/demo_jobs.py -s

Naive and optimized epochs take turns in one process, so that what else the machine does hits both alike; the
ratio printed is the median of the paired epochs. Tuning is outside what is timed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from flatout.demo import JOBS
from flatout.demo.training import make_loader, make_model, naive_epoch, optimize

EPOCHS = {"digits": 20, "gpt": 3}
"""Timed pairs of epochs."""

BUDGET = 45.0
"""Seconds that tuning may take."""


@pytest.mark.parametrize("name", JOBS)
def test_epoch(name: str, benchmark: BenchmarkFixture) -> None:
    """Times the optimized epochs; the naive ones run between them and are in ``extra_info``."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    job = JOBS[name](device.type)

    run, tuning_seconds = optimize(job, device, BUDGET)
    model, loader = make_model(job).to(device), make_loader(job)
    optimizer = torch.optim.AdamW(model.parameters(), lr=job.training.lr)

    def naive() -> None:
        naive_epoch(job, model, loader, optimizer, device, lambda samples, loss: None)

    def optimized() -> None:
        for batch in run.loader:
            run.step(batch)

    def timed(epoch: Callable[[], None], seconds: list[float]) -> None:
        start = time.perf_counter()
        epoch()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)

    first: list[float] = []
    tuned: list[float] = []
    timed(naive, [])  # warm-up
    timed(optimized, [])
    benchmark.pedantic(
        lambda: timed(optimized, tuned), setup=lambda: timed(naive, first), rounds=EPOCHS[name], warmup_rounds=0
    )

    pairs = list(zip(first, tuned, strict=True))
    ratio = statistics.median(before / after for before, after in pairs)
    samples = len(job.train)  # type: ignore[arg-type]
    rates = {side: samples / statistics.median(times) for side, times in (("naive", first), ("flatout", tuned))}
    benchmark.extra_info.update(ratio=ratio, tuning_seconds=tuning_seconds, device=str(device), **rates)
    print(
        f"\n{name}: {rates['naive']:,.0f} -> {rates['flatout']:,.0f} {job.unit}/s, {ratio:.2f}x as fast "
        f"(median of {len(pairs)} paired epochs; tuned in {tuning_seconds:.0f} s)"
    )
