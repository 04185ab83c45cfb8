"""Claim: the demo's jobs train faster with ``flatout.optimize``, data loading included.

    pytest benchmarks/demo_jobs.py -s --full

Naive and optimized training take turns of a second in one process, so that other load of the machine affects both
equally. The timed turns do not include tuning.
"""

from __future__ import annotations

from dataclasses import asdict

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from support.scale import scaled

from flatout.cli.demo_jobs import JOBS
from flatout.cli.demo_jobs.loops import Naive, Optimized, take_turns

BUDGET = scaled(45.0, 3.0)
"""Budget of the tuning, in seconds."""


@pytest.mark.parametrize("name", scaled(list(JOBS), ["digits"]))
def test_job(name: str, benchmark: BenchmarkFixture) -> None:
    """Time the optimized training in turns with the naive training, whose result is in ``extra_info``."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    job = JOBS[name](device.type)
    epochs = job.training.epochs
    tuned = Optimized(job, device, epochs, lambda *_: None, BUDGET)
    naive = Naive(job, device, epochs, lambda *_: None)
    benchmark.pedantic(lambda: take_turns([naive, tuned]), rounds=1, warmup_rounds=0)

    first, second = naive.outcome(), tuned.outcome()
    ratio = second.samples_per_second / first.samples_per_second
    benchmark.extra_info |= {
        "naive": asdict(first),
        "flatout": asdict(second),
        "ratio": ratio,
        "tuning_seconds": tuned.tuning_seconds,
        "environment": tuned.report.summary.environment,
    }
    print(
        f"\n{name}: {first.samples_per_second:,.0f} -> {second.samples_per_second:,.0f} {job.unit}/s, "
        f"{ratio:.2f}x as fast (tuned in {tuned.tuning_seconds:.0f} s); "
        f"held-out {first.metrics} -> {second.metrics}"
    )
    if "accuracy" in first.metrics:
        assert second.metrics["accuracy"] == pytest.approx(first.metrics["accuracy"], abs=0.01)
    else:
        assert second.metrics["loss"] == pytest.approx(first.metrics["loss"], rel=0.01)
