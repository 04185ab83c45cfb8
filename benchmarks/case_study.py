"""Claim: BF16, a faster loader, a larger batch and a compiler make a GPT's training 3.75 times as fast.

    pytest benchmarks/case_study.py -s --full

The case study of the literature begins with a GPT-2 medium that trains in float32, with a batch of 4 and a loader in
the training process. Each of the four steps adds one technique to the last ones. Each loop runs alone as soon as it is
made, and in the end all five take turns. The table has the samples per second, the share of the time in which the
device is busy, MFU, and the hours of an epoch. "Busy" is NVML's utilization on a GPU, and the used CPU time of all
cores on a CPU.

On a CPU, the model is small, and shows only the route. The goal is for an H200, which has not run this benchmark yet.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from support.goals import Goal
from support.gpu_jobs import SIZE, case_study
from support.gpu_loops import ON_GPU, as_first_written, flops_of, percent, share_of_bf16, tuned
from support.loops import steps_of
from support.scale import scaled
from support.turns import Lane, Rates, alone, closing, ratio, take_turns

from flatout.core.machine import usable_cores

TURN = scaled(1.0, 0.1)
ROUNDS = scaled(4 if ON_GPU else 6, 2)
ALONE = scaled(3.0, 0.2)

GOAL = 3.75
"""Goal for the speed of the last loop, relative to the first."""


@dataclass(frozen=True)
class Activity:
    """Rate of a loop that ran alone, and activity of its device: shares from 0 to 1, or None if unknown."""

    samples_per_second: float
    busy: float | None
    tensor_active: float | None


def activity(lane: Lane) -> Activity:
    """Run a loop alone and return the activity of its device."""
    if ON_GPU:
        seen = alone(lane, ALONE)
        return Activity(seen.samples_per_second, seen.utilization, seen.tensor_active)
    lane.turn(TURN)
    begun, used = time.perf_counter(), cpu_seconds()
    rate = lane.turn(ALONE)
    took = time.perf_counter() - begun
    return Activity(rate, (cpu_seconds() - used) / took / usable_cores(), None)


def cpu_seconds() -> float:
    """Return the CPU time of this process and of the workers that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def test_case_study(benchmark: Any, keep: Callable[[dict[str, Any]], None]) -> None:
    """Add BF16, workers, twice the batch size and compilation in turn."""
    start = SIZE.case_study.batch_size
    small, large = case_study(start), case_study(2 * start)
    bf16 = {"precision": "bf16"}
    fed = bf16 | {"workers": {"num_workers": SIZE.workers, "persistent_workers": True}}
    route = {
        "+ bf16": (small, bf16),
        "+ loader workers": (small, fed),
        f"+ batch of {2 * start}": (large, fed),
        "+ torch.compile": (large, fed | {"compile": "default"}),
    }
    flops = flops_of(small)
    epoch = len(small.batches().dataset)  # type: ignore[attr-defined]
    lanes: list[Lane] = []
    seen: dict[str, Activity] = {}
    figures: dict[str, dict[str, Any]] = {}

    def tell(rates: Rates, names: Iterable[str]) -> None:
        for name in names:
            rate, times = statistics.median(rates[name]), ratio(rates, name, lanes[0].name)
            mfu, hours = share_of_bf16(rate * flops.total), epoch / rate / 3600
            figures[name] = {
                "samples/s": rate,
                "times as fast": times,
                "busy": seen[name].busy,
                "tensor cores active": seen[name].tensor_active,
                "mfu": mfu,
                "hours of an epoch": hours,
            }
            print(
                f"  {name:20} {rate:9,.1f} windows/s {times:6.2f}x  busy {percent(seen[name].busy):>7}"
                f"  MFU {percent(mfu):>7}  {hours:7.3f} h an epoch",
                flush=True,
            )
        keep({"route": figures})

    def add(name: str, steps: Iterator[int]) -> None:
        lanes.append(Lane(name, steps))
        seen[name] = activity(lanes[-1])
        tell({known: [each.samples_per_second] for known, each in seen.items()}, [name])

    print(f"\n{small.name}: epochs of {epoch:,} windows of {small.units} tokens; first each loop alone")
    runs = []
    with closing(lanes):
        add("as first written", as_first_written(small))
        for name, (job, techniques) in route.items():
            runs.append(tuned(job, techniques, budget=0))
            add(name, steps_of(runs[-1]))
        print("  in turns")
        rates = take_turns(lanes, ROUNDS, TURN)
        benchmark.pedantic(lambda: lanes[-1].turn(TURN), rounds=1)
    tell(rates, rates)
    if ON_GPU:
        print(f"  {Goal('times as first written', figures['+ torch.compile']['times as fast'], GOAL)}")
    for run in reversed(runs):
        run.undo()
