"""Speed and utilization of a GPU with ``flatout.optimize``, for a perceptron, two GPTs and a ResNet-50.

    make gpu-check PHASES="build optimize_gpu optimize_gpu_large"      (one NVIDIA H100 or H200, 16 cores)
    pytest benchmarks/optimize_gpu.py -s --full                         (if flatout is installed)

The benchmark has run on a GPU only beside other work, so no figure comes from it. On a CPU, the sizes are small, and
the run is only a test. Loops take turns in one process, each with separate backend flags. NVML is read while flatout's
loop runs alone.

MFU is that of ``run.stats``, relative to the data sheet's dense bf16 peak. It does not count masked pairs of causal
attention. The additional "dense" MFU counts attention as published figures do. The tests assert nothing, and print a
goal beside each figure. Figures of a loop are recorded as soon as they are measured.

Cheap and important jobs come first. On an H100, the jobs are estimated to take 55, 80, 50 and 75 seconds.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import pytest
import torch
from support.goals import Goal, as_figures, say
from support.gpu_jobs import GpuJob, gpt2, resnet50, seed_mlp, wide_gpt
from support.gpu_loops import ON_GPU, amp, flops_of, percent, share_of_bf16, tuned
from support.loops import kept_by, steps_of
from support.scale import scaled
from support.turns import Alone, Lane, alone, closing, ratio, take_turns

from flatout.core.snapshot import Snapshot

Keep = Callable[[dict[str, Any]], None]

BUDGET = scaled(40.0 if ON_GPU else 2.0, 1.0)
"""Budget of the tuning, in seconds. On a GPU, it is enough for one compilation of a large model, or two of the MLP."""

ALONE = scaled(3.0 if ON_GPU else 0.2, 0.2)
ROUNDS = scaled(4, 2)
TURN = scaled(1.0 if ON_GPU else 0.1, 0.1)


@pytest.fixture(autouse=True)
def as_it_came() -> Iterator[None]:
    """Restore flags and free the device's memory after each job."""
    state = Snapshot.capture([])
    yield
    state.restore()
    gc.collect()
    if ON_GPU:
        torch.cuda.empty_cache()


# ---- figures -----------------------------------------------------------------------------------------------


def on_the_gpu(watched: Alone) -> str:
    """Return the figures of NVML as a line of text."""
    if watched.utilization is None:
        return f"NVML: {watched.no_gpu}"
    power, clock = watched.power_watts or 0, watched.sm_clock_mhz or 0
    held = f", held down by {', '.join(watched.throttle)}" if watched.throttle else ""
    return (
        f"NVML: utilization {percent(watched.utilization)}, at the lowest {percent(watched.lowest_utilization)}; "
        f"tensor cores {percent(watched.tensor_active)}; {power:.0f} W, {clock:.0f} MHz{held}"
    )


def compare(
    job: GpuJob,
    benchmark: Any,
    keep: Keep,
    goals: Callable[[dict[str, Any]], list[Goal]],
    techniques: dict[str, Any] | None = None,
    budget: float = BUDGET,
) -> None:
    """Measure and report flatout's loop alone, and then in turns with the tutorials' AMP loop.

    Args:
        job: the job to train.
        benchmark: fixture that times a turn of flatout's loop.
        keep: fixture that records figures.
        goals: returns the goals for the figures.
        techniques: argument of ``optimize``.
        budget: budget of the tuning, in seconds.
    """
    flops = flops_of(job)
    theirs = Lane("AMP loop", amp(job))  # with the original flags
    rate = theirs.turn(TURN)
    say(job.name, [f"the AMP loop trains on {job.rate(rate)}, MFU {percent(share_of_bf16(rate * flops.total))}"])
    keep({"amp_loop": {"samples_per_second": rate, "mfu": share_of_bf16(rate * flops.total)}})
    run = tuned(job, techniques, budget)
    ours = Lane("flatout", steps_of(run))
    ours.turn(TURN)
    run.stats.reset()
    if ON_GPU:
        torch.cuda.reset_peak_memory_stats()
    watched = alone(ours, ALONE)
    reading = run.stats.total
    dense = None if reading.mfu is None else reading.mfu * flops.dense / flops.total
    figures: dict[str, Any] = {
        "unit": job.unit,
        "units_per_sample": job.units,
        "batch_size": job.batch_size,
        "samples_per_second": watched.samples_per_second,
        "mfu": reading.mfu,
        "mfu_dense": dense,
        "mfu_by_the_clock": share_of_bf16(watched.samples_per_second * flops.total),
        "hfu": reading.hfu,
        "step_ms": None if reading.step_seconds is None else 1e3 * reading.step_seconds,
        "stall_fraction": reading.stall_fraction,
        "alone": asdict(watched),
        "flops_per_sample": {"total": flops.total, "dense": flops.dense, "hardware": flops.hardware},
        "kept": kept_by(run),
        "verdict": str(run.verdict),
        "tuning_seconds": run.report.summary.tuning_seconds,
        "peak_bytes": torch.cuda.max_memory_allocated() if ON_GPU else None,
        "environment": run.report.summary.environment,
    }
    lines = [
        f"{job.rate(watched.samples_per_second)} in batches of {job.batch_size}, "
        f"tuned in {run.report.summary.tuning_seconds:.0f} s: {kept_by(run)}",
        f"MFU {percent(reading.mfu)}, dense {percent(dense)}; "
        f"by the host's clock {percent(figures['mfu_by_the_clock'])} of the peak in bf16",
        on_the_gpu(watched),
        str(run.verdict),
    ]
    keep(figures | {"goals": as_figures(goals(figures))})
    say(job.name, [*lines, *map(str, goals(figures))])

    with closing([theirs, ours]):
        rates = take_turns([theirs, ours], ROUNDS, TURN)
        benchmark.pedantic(lambda: ours.turn(TURN), rounds=1)
    times = ratio(rates, "flatout", "AMP loop")
    rate = statistics.median(rates["AMP loop"])
    figures |= {
        "times_amp_loop": times,
        "samples_per_second_by_turns": rates,
        "amp_loop": {"samples_per_second": rate, "mfu": share_of_bf16(rate * flops.total)},
    }
    keep(figures | {"goals": as_figures(goals(figures))})
    theirs_mfu = percent(figures["amp_loop"]["mfu"])
    line = f"{times:.2f} times the AMP loop by turns: that trains on {job.rate(rate)}, MFU {theirs_mfu}"
    say(f"{job.name}, beside the tutorials' loop", [line, *map(str, goals(figures))])
    run.undo()


# ---- claims ------------------------------------------------------------------------------------------------


def busy(figures: dict[str, Any]) -> Goal:
    return Goal("NVML's utilization", figures["alone"]["utilization"], 0.95, percent=True)


def test_seed_mlp(benchmark: Any, keep: Keep) -> None:
    """Train the perceptron. Goal: three times the speed of its tutorial's loop."""
    compare(
        seed_mlp(),
        benchmark,
        keep,
        lambda figures: [Goal("times its own AMP loop", figures.get("times_amp_loop"), 3.0), busy(figures)],
    )


def test_gpt2(benchmark: Any, keep: Keep) -> None:
    """Train 124 million parameters, with TF32 on from the start, as in nanoGPT. Goal: 45 % MFU."""
    torch.set_float32_matmul_precision("high")
    compare(gpt2(), benchmark, keep, lambda figures: [Goal("MFU", figures["mfu"], 0.45, percent=True), busy(figures)])


def test_wide_gpt(benchmark: Any, keep: Keep) -> None:
    """Train layers as wide as those of a 7B model. Goal: 60 % MFU.

    A step takes a third of a second, so all techniques are forced and none is tried.
    """
    torch.set_float32_matmul_precision("high")
    compare(
        wide_gpt(),
        benchmark,
        keep,
        lambda figures: [Goal("MFU", figures["mfu"], 0.60, percent=True), busy(figures)],
        {"precision": "bf16", "fused_optimizer": True, "compile": "default"},
        budget=0,
    )


def test_resnet50(benchmark: Any, keep: Keep) -> None:
    """Train ResNet-50. Goal: 3,300 images per second, which is 8 % MFU.

    Some texts claim an MFU of 60 to 80 %, but no known convolutional net reaches it.
    """
    compare(
        resnet50(),
        benchmark,
        keep,
        lambda figures: [
            Goal("images/s", figures["samples_per_second"], 3300),
            Goal("MFU, of which 60 to 80 % are claimed for convolutional nets", figures["mfu"], 0.60, percent=True),
            busy(figures),
        ],
    )
