"""Claim: what ``flatout.optimize`` makes of a GPU, on a perceptron, a case study, two GPTs and a ResNet-50.

    make gpu-check PHASES="build optimize_gpu"      (one NVIDIA H200, 16 cores; where flatout is installed:
    python -m pytest benchmarks/optimize_gpu.py -s)

Written, not yet run on a GPU: no figure comes from it. On a CPU everything runs at sizes that show nothing but that it
runs. Loops take turns in one process, each with its own backend flags; NVML is read while flatout's loop runs alone.
MFU is ``run.stats``', which counts no masked pair of causal attention, relative to the data sheet's dense bf16 peak;
"dense" beside it counts attention as published figures do. Nothing is asserted: beside a figure stands its goal.
Figures go to benchmarks/results/optimize_gpu.json, on a GPU, and to $OUT where that is set, after every job.

The cheap and the important come first: seconds on an H200 are guessed at 40, 80, 55, 80 and 80.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import pytest
import torch
from support.gpu_jobs import SIZE, GpuJob, case_study, gpt2, resnet50, seed_mlp, wide_gpt
from support.gpu_results import Goal, keep, say
from support.loops import DEVICE, LONG, kept_by, size_of, steps_of
from support.turns import Alone, Lane, alone, closing, ratio, take_turns

import flatout
from flatout.core import formatting
from flatout.core.snapshot import Snapshot
from flatout.data import map_tensors, to_device
from flatout.mfu import FlopCount, count_flops, peak_flops

ON_GPU = DEVICE.type == "cuda"
BUDGET = 60.0 if ON_GPU else 2.0
"""Seconds of measuring: on a GPU they suffice for one compilation of a large model, and of the perceptron for two."""

ALONE = 3.0 if ON_GPU else 0.2
ROUNDS = 4
TURN = 1.0 if ON_GPU else 0.1


@pytest.fixture(autouse=True)
def as_it_came() -> Iterator[None]:
    """Flags are put back, and the device's memory is given back, after each job."""
    state = Snapshot.capture([])
    yield
    state.restore()
    gc.collect()
    if ON_GPU:
        torch.cuda.empty_cache()


# ---- loops -------------------------------------------------------------------------------------------------


def as_first_written(job: GpuJob) -> Iterator[int]:
    """float32 as torch multiplies it by default, and a loss that is read in every step."""
    model, optimizer = job.made()
    loader = job.batches()
    total = 0.0
    while True:
        for batch in loader:
            batch = to_device(batch, DEVICE)
            optimizer.zero_grad()
            loss = job.loss(model, batch)
            loss.backward()
            optimizer.step()
            total += loss.item()
            yield size_of(batch)


def amp(job: GpuJob) -> Iterator[int]:
    """The tutorials' loop: ``torch.cuda.amp``'s autocast and GradScaler, by their names of today."""
    model, optimizer = job.made()
    loader = job.batches()
    scaler = torch.amp.GradScaler(DEVICE.type)
    while True:
        for batch in loader:
            optimizer.zero_grad()
            with torch.amp.autocast(DEVICE.type):
                loss = job.loss(model, batch)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            yield size_of(batch)


def tuned(job: GpuJob, techniques: dict[str, Any] | None = None, budget: float = BUDGET) -> flatout.Run:
    """flatout, told that the training is long."""
    model, optimizer = job.made()
    return flatout.optimize(
        model,
        job.batches(),
        optimizer,
        job.loss_fn,
        techniques=techniques,
        expected_steps=LONG,
        budget=budget,
    )


# ---- figures -----------------------------------------------------------------------------------------------


def flops_of(job: GpuJob) -> FlopCount:
    """FLOPs of one sample, counted on a batch of one."""
    model, _ = job.made()
    one = map_tensors(lambda tensor: tensor[:1], to_device(next(iter(job.batches())), DEVICE))
    return count_flops(_Loss(job, model), one)


class _Loss(torch.nn.Module):
    def __init__(self, job: GpuJob, model: torch.nn.Module) -> None:
        super().__init__()
        self.job, self.model = job, model

    def forward(self, batch: Any) -> torch.Tensor:
        return self.job.loss(self.model, batch)


def share_of_bf16(flops_per_second: float) -> float | None:
    """Of the data sheet's dense peak; None without a GPU that has one."""
    peak = peak_flops(DEVICE, torch.bfloat16) if ON_GPU else None
    return None if peak is None else flops_per_second / peak


def percent(value: float | None) -> str:
    return "-" if value is None else formatting.share(value, 1)


def on_the_gpu(watched: Alone) -> str:
    """What NVML showed, in a line."""
    if watched.utilisation is None:
        return f"NVML: {watched.no_gpu}"
    power, clock = watched.power_watts or 0, watched.sm_clock_mhz or 0
    held = f", held down by {', '.join(watched.throttle)}" if watched.throttle else ""
    return (
        f"NVML: utilisation {percent(watched.utilisation)}, at the lowest {percent(watched.lowest_utilisation)}; "
        f"tensor cores {percent(watched.tensor_active)}; {power:.0f} W, {clock:.0f} MHz{held}"
    )


def compare(
    job: GpuJob,
    benchmark: Any,
    goals: Callable[[dict[str, Any]], list[Goal]],
    techniques: dict[str, Any] | None = None,
    budget: float = BUDGET,
) -> None:
    """flatout's loop alone, which is reported at once, then by turns with the tutorials' AMP loop.

    Args:
        job: what is trained.
        benchmark: times a turn of flatout's.
        goals: of the figures.
        techniques: as ``optimize`` takes them.
        budget: seconds of measuring.
    """
    flops = flops_of(job)
    theirs = Lane("AMP loop", amp(job))  # with the flags as they came
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
    keep(job.name, figures, goals(figures))
    say(job.name, lines)

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
    benchmark.extra_info |= keep(job.name, figures, goals(figures))
    theirs_mfu = percent(figures["amp_loop"]["mfu"])
    line = f"{times:.2f} times the AMP loop by turns: that trains on {job.rate(rate)}, MFU {theirs_mfu}"
    say(f"{job.name}, beside the tutorials' loop", [line, *map(str, goals(figures))])
    run.undo()


# ---- claims ------------------------------------------------------------------------------------------------


def busy(figures: dict[str, Any]) -> Goal:
    return Goal("NVML's utilisation", figures["alone"]["utilisation"], 0.95, percent=True)


def test_seed_mlp(benchmark: Any) -> None:
    """Three times the loop that the tutorial has for it."""
    compare(
        seed_mlp(),
        benchmark,
        lambda figures: [Goal("times its own AMP loop", figures.get("times_amp_loop"), 3.0), busy(figures)],
    )


def test_case_study(benchmark: Any) -> None:
    """BF16, the loader, twice the batch and compilation, one after the other: 3.75 times the naive loop."""
    start = SIZE.case_study.batch_size
    bf16 = {"precision": "bf16"}
    fed = bf16 | {"workers": {"num_workers": SIZE.workers, "persistent_workers": True}}
    small, large = case_study(start), case_study(2 * start)
    flops = flops_of(small)
    lanes = {"as first written": Lane("as first written", as_first_written(small))}
    runs: dict[str, flatout.Run] = {}
    for name, job, techniques in (
        ("+ BF16", small, bf16),
        ("+ loader workers", small, fed),
        (f"+ batch of {2 * start}", large, fed),
        ("+ torch.compile", large, fed | {"compile": "default"}),
    ):
        runs[name] = tuned(job, techniques, budget=0)
        lanes[name] = Lane(name, steps_of(runs[name]))

    figures: dict[str, Any] = {"unit": small.unit, "units_per_sample": small.units, "route": {}}
    for name, lane in lanes.items():
        lane.turn(TURN)
        if name in runs:
            runs[name].stats.reset()
        watched = alone(lane, ALONE / 2)
        mfu = share_of_bf16(watched.samples_per_second * flops.total)
        stall = runs[name].stats.stall_fraction if name in runs else None
        figures["route"][name] = {"mfu": mfu, "stall_fraction": stall, "alone": asdict(watched)}
    rates = take_turns([*lanes.values()], ROUNDS - 1, TURN)
    lines = []
    for name, row in figures["route"].items():
        times = ratio(rates, name, "as first written")
        rate = statistics.median(rates[name])
        row |= {"samples_per_second": rate, "times_first": times, "samples_per_second_by_turns": rates[name]}
        lines.append(
            f"{name:20} {rate:8,.1f} windows/s {times:6.2f}x"
            f"  NVML {percent(row['alone']['utilisation']):>7}  MFU {percent(row['mfu']):>7}"
        )
    last = figures["route"]["+ torch.compile"]
    goals = [
        Goal("times as first written", last["times_first"], 3.75),
        Goal("NVML's utilisation", last["alone"]["utilisation"], 0.95, percent=True),
    ]
    figures["environment"] = runs["+ torch.compile"].report.summary.environment
    benchmark.pedantic(lambda: lanes["+ torch.compile"].turn(TURN), rounds=1)
    benchmark.extra_info |= keep(small.name, figures, goals)
    say(small.name, [*lines, *map(str, goals)])
    for lane in lanes.values():
        lane.close()
    for run in reversed(runs.values()):
        run.undo()


def test_wide_gpt(benchmark: Any) -> None:
    """Layers as wide as a 7B model's: 60 % MFU. Steps take a third of a second: nothing is tried, all is asked for."""
    torch.set_float32_matmul_precision("high")
    compare(
        wide_gpt(),
        benchmark,
        lambda figures: [Goal("MFU", figures["mfu"], 0.60, percent=True), busy(figures)],
        {"precision": "bf16", "fused_optimizer": True, "compile": "default"},
        budget=0,
    )


def test_gpt2(benchmark: Any) -> None:
    """45 % MFU with 124 million parameters. TF32 is on from the start, as nanoGPT has it."""
    torch.set_float32_matmul_precision("high")
    compare(gpt2(), benchmark, lambda figures: [Goal("MFU", figures["mfu"], 0.45, percent=True), busy(figures)])


def test_resnet50(benchmark: Any) -> None:
    """3,300 images a second, which is 8 % MFU: no convolutional net is known to reach the 60 to 80 % one reads of."""
    compare(
        resnet50(),
        benchmark,
        lambda figures: [
            Goal("images/s", figures["samples_per_second"], 3300),
            Goal("MFU, of which 60 to 80 % are claimed for convolutional nets", figures["mfu"], 0.60, percent=True),
            busy(figures),
        ],
    )
