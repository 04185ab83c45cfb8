"""Unscale + check + clip + AdamW: flatout's updates beside torch's and everybody else's.

    pytest benchmarks/update_path.py -s            (the file must be named: it is no test of the suite)

With clipping, "flatout lazy" (``scaler.step(optimizer, max_grad_norm=...)``, which leaves ``p.grad`` scaled) and
"flatout eager" (torch's calls, which rewrite it) stand against torch's ``unscale_``, ``clip_grad_norm_`` and ``step``.
Without, "flatout plain" leaves torch's unscaled gradients, as ``scaler.step(optimizer)`` does in either library.

All contenders of a case take turns in one process, each with fresh gradients, so that a machine that drifts slows all
alike; a plain copy takes its turns too. Ratios are medians over rounds of the times of one round, with their quartiles.
Bytes per parameter are counted from the passes each one makes (benchmarks/support/contenders.py), GB/s are those bytes
over the median time, and "of copy" compares them with the copy of the same round. bitsandbytes, torchao, apex,
TransformerEngine and flashoptim take part where they are installed. Nothing is asserted but that the contenders have
the same parameters afterwards: beside a figure stands its goal, and whether it is met.

On a CPU the machine must be quiet (the load is printed): with one core taken by somebody else, torch's barrier after
every tensor costs a time slice, and its 100 tensors ten times what they should; such ratios say nothing.
The cases on CUDA have not been run yet. ``FLATOUT_BENCH_SHRINK=100`` makes everything so much smaller, to see it run.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from support import contenders as c
from torch.autograd import DeviceType

SHRINK = int(os.environ.get("FLATOUT_BENCH_SHRINK", "1"))
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")),
]
RATIO, COPY = "times torch", "of copy"


@dataclass(frozen=True)
class Case:
    title: str
    makers: list[Callable[[c.Problem], c.Contender]]
    tensors: int
    small: bool
    goals: dict[tuple[str, str], dict[str, float]]
    """By device and contender: the least ratio to torch, and the least share of the copy's bandwidth."""

    def sizes(self, device: str) -> list[int]:
        if self.small:
            return [512] * max(1, self.tensors // SHRINK)
        total = 32_000_000
        if device == "cuda":
            # Per parameter: 12 bytes of each of torch's and flatout's (others join while there is room), 8 of
            # foreach's temporaries, 12 of gradients, 12 while values are made.
            total = min(1_200_000_000, int(0.9 * torch.cuda.mem_get_info()[0] / (12 * 6 + 8 + 12 + 12)))
        return [total // SHRINK // self.tensors] * self.tensors


LARGE = {("cpu", "flatout lazy"): {RATIO: 1.7, COPY: 0.9}, ("cuda", "flatout lazy"): {RATIO: 1.45, COPY: 0.9}}
CASES = {
    "fp32_in_1": Case("float32, one tensor", c.FP32, 1, False, LARGE),
    "fp32_in_100": Case("float32, 100 tensors", c.FP32, 100, False, LARGE),
    "plain_in_1": Case("float32, one tensor, without clipping", c.PLAIN, 1, False, {}),
    "plain_in_100": Case("float32, 100 tensors, without clipping", c.PLAIN, 100, False, {}),
    "plain_in_2000_small": Case("float32, 2,000 tensors of 512, without clipping", c.PLAIN, 2000, True, {}),
    "fp32_in_2000_small": Case(
        "float32, 2,000 tensors of 512", c.FP32, 2000, True, {("cpu", "flatout lazy"): {RATIO: 2.5}}
    ),
    "bf16_in_100": Case(
        "bfloat16 with masters, 100 tensors", c.BF16, 100, False,
        {
            ("cpu", "flatout, float32 masters"): {RATIO: 1.3},
            ("cpu", "flatout, remainder"): {RATIO: 1.3},
            ("cuda", "flatout, remainder"): {RATIO: 1.75},
        },
    ),
}  # fmt: skip


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def seconds(run: Callable[[], object], device: str, until: str = "done") -> float:
    """Of one call, until the device is done or ("returned") until the host may go on."""
    wait(device)
    start = time.perf_counter()
    run()
    if until == "done":
        wait(device)
    elapsed = time.perf_counter() - start
    wait(device)
    return elapsed


def in_turns(
    contenders: list[c.Contender],
    problem: c.Problem,
    rounds: int,
    copy: Callable[[], object] | None,
    until: str = "done",
) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in (*(x.name for x in contenders), *(["copy"] if copy else []))}
    for i in range(rounds):
        for x in contenders[i % len(contenders) :] + contenders[: i % len(contenders)]:
            problem.fresh_gradients(x.params)
            times[x.name].append(seconds(x.update, problem.device, until))
        if copy is not None:
            times["copy"].append(seconds(copy, problem.device))
    return times


def quartiles(values: list[float]) -> tuple[float, float, float]:
    low, middle, high = statistics.quantiles(values, n=4)
    return middle, low, high


def against(goal: float | None, reached: float) -> str:
    return "" if goal is None else f"goal {goal:g}: {'met' if reached >= goal else 'MISSED'}"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CASES)
def test_update(name: str, device: str, benchmark: pytest.FixtureRequest) -> None:
    case = CASES[name]
    load = f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores before"
    problem = c.Problem(case.sizes(device), device)
    contenders, missing = c.assemble(case.makers, problem)
    c.assert_agreement(contenders)
    source = torch.rand(min(max(problem.total, 1 << 22), 1 << 28), device=device)
    target = torch.empty_like(source)
    # A CPU reads the lines of the target before it overwrites them; an update's targets are read anyway.
    copied = (3 if device == "cpu" else 2) * source.nbytes
    rounds = max(5, (100 if case.small else 20) // SHRINK)
    times = in_turns(contenders, problem, rounds, lambda: target.copy_(source))
    copy = copied / statistics.median(times["copy"])

    where = f"CPU, {torch.get_num_threads()} threads" if device == "cpu" else torch.cuda.get_device_name()
    print(f"\n\n{case.title}: {problem.total / 1e6:,.1f} M parameters on {where}; copy {copy / 1e9:.1f} GB/s; {load}")
    print(f"  {'':30}{'median':>10}{'min':>10}  {'B/param':>7}  {'GB/s':>7}  {'of copy':>7}  ", end="")
    print(f"{contenders[0].name} / it (quartiles)")
    info: dict[str, object] = {"parameters": problem.total, "copy_GB/s": copy / 1e9, "missing": missing, "load": load}
    for x in contenders:
        mine = times[x.name]
        ratio, low, high = quartiles([a / b for a, b in zip(times[contenders[0].name], mine, strict=True)])
        row = {"ms_median": statistics.median(mine) * 1e3, "ms_min": min(mine) * 1e3}
        row |= {"ratio_median": ratio, "ratio_quartiles": (low, high)}
        goals = case.goals.get((device, x.name), {})
        bandwidth = f"{'?':>7}  {'?':>7}  {'?':>7}"
        share = 0.0
        if x.bytes_per_param is not None:
            moved = x.bytes_per_param * problem.total
            share = quartiles([moved / a / (copied / b) for a, b in zip(mine, times["copy"], strict=True)])[0]
            row |= {"bytes_per_param": x.bytes_per_param, "GB/s": moved / row["ms_median"] / 1e6, "of_copy": share}
            bandwidth = f"{x.bytes_per_param:7g}  {row['GB/s']:7.1f}  {share:7.0%}"
        verdict = "; ".join(filter(None, (against(goals.get(RATIO), ratio), against(goals.get(COPY), share))))
        info[x.name] = row | {"goals": goals}
        print(
            f"  {x.name:30}{row['ms_median']:7.2f} ms{row['ms_min']:7.2f} ms  {bandwidth}  "
            f"{ratio:5.2f}x ({low:.2f} to {high:.2f})   {verdict}"
        )
    for reason in missing:
        print(f"  {reason}")
    benchmark.extra_info.update(info)  # type: ignore[attr-defined]
    ours = next(x for x in contenders if x.name.startswith("flatout"))
    benchmark.pedantic(ours.update, setup=lambda: problem.fresh_gradients(ours.params), rounds=3)  # type: ignore[attr-defined]


# ---- what the host does, on CUDA ---------------------------------------------------------------------------


def traced(run: Callable[[], object]) -> tuple[int, list[str]]:
    """Kernels that one call puts on the device, and what in it waited or copied back."""
    wait("cuda")
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as trace, torch.profiler.record_function("one update"):
        run()
    events = trace.events()
    region = next(e for e in events if e.name == "one update" and e.device_type == DeviceType.CPU)
    annotations = {e.name for e in events if e.is_user_annotation}  # torch's around every optimizer, and this one
    on_device = [e.name for e in events if e.device_type == DeviceType.CUDA and e.name not in annotations]
    # The profiler waits for the device too, after the region.
    inside = [e.name for e in events if region.time_range.start <= e.time_range.start <= region.time_range.end]
    waits = [name for name in inside if "Synchronize" in name] + [name for name in on_device if "DtoH" in name]
    return sum(not name.startswith(("Memcpy", "Memset")) for name in on_device), waits


def replayed(contender: c.Contender, problem: c.Problem) -> Callable[[], None]:
    """The same update as a CUDA graph, over gradients that stay where they are."""
    problem.fresh_gradients(contender.params)
    graph = torch.cuda.CUDAGraph()
    wait("cuda")
    with torch.cuda.graph(graph):
        contender.update()
    return graph.replay


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
def test_host_time_on_cuda(benchmark: pytest.FixtureRequest) -> None:
    """2,000 tensors: how long the host is held, how many kernels it launches, and whether it ever waits."""
    problem = c.Problem([512] * max(1, 2000 // SHRINK), "cuda")
    contenders, _ = c.assemble([c.torch_fused, c.torch_foreach, *c.FP32[2:4]], problem)
    c.assert_agreement(contenders)
    times = in_turns(contenders, problem, 50, copy=None, until="returned")
    kernels, waits = {}, {}
    for x in contenders:
        problem.fresh_gradients(x.params)
        kernels[x.name], waits[x.name] = traced(x.update)
    replay = replayed(contenders[2], problem)
    replay()
    name = "flatout lazy, replayed"
    times[name] = [seconds(replay, "cuda", "returned") for _ in range(50)]
    kernels[name], waits[name] = traced(replay)

    where = torch.cuda.get_device_name()
    print(f"\n\nhost time at {len(problem.sizes):,} tensors of 512 on {where}, until the call returns")
    print(f"  {'':30}{'median':>10}{'min':>10}  kernels  waits  torch fused / it")
    goals = {"flatout lazy": 4.0, name: 20.0}
    info: dict[str, object] = {}
    for key, mine in times.items():
        ratio = statistics.median(times["torch fused"]) / statistics.median(mine)
        print(
            f"  {key:30}{statistics.median(mine) * 1e3:7.3f} ms{min(mine) * 1e3:7.3f} ms  {kernels[key]:7d}  "
            f"{len(waits[key]):5d}  {ratio:.2f}x   {against(goals.get(key), ratio)}"
        )
        info[key] = {"ms_median": statistics.median(mine) * 1e3, "ratio": ratio, "goal": goals.get(key)}
        info[key] |= {"kernels": kernels[key], "waits": waits[key]}  # type: ignore[operator]
    print(f"  waits of flatout lazy: {', '.join(waits['flatout lazy']) or 'none, as is the goal'}")
    benchmark.extra_info.update(info)  # type: ignore[attr-defined]
    benchmark.pedantic(replay, rounds=3)  # type: ignore[attr-defined]
