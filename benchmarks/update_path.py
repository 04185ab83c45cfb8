"""Comparison of updates (unscale + check + clip + AdamW) of flatout, torch and other libraries.

    pytest benchmarks/update_path.py -s --full

With clipping, two variants of flatout compete with torch's ``unscale_``, ``clip_grad_norm_`` and ``step``. "flatout
lazy" is ``scaler.step(optimizer, max_grad_norm=...)``, which leaves ``p.grad`` scaled. "flatout eager" uses torch's
calls, which rewrite ``p.grad``. Without clipping, "flatout plain" leaves unscaled gradients, as
``scaler.step(optimizer)`` does in both libraries.

All contenders of a case take turns in one process, each with new gradients, so that drift of the machine affects all of
them equally. A plain copy takes turns, too. A ratio compares times of one round. The table shows medians and quartiles
over rounds. Bytes per parameter are counted from the passes of each contender (benchmarks/support/contenders.py). GB/s
are these bytes divided by the median time. "of copy" compares this bandwidth with the copy of the same round.
bitsandbytes, torchao, apex, TransformerEngine and flashoptim take part if they are installed. The tests assert only
that all contenders have the same parameters afterwards. Each figure is printed with its goal, and with "met" or
"MISSED".

On a CPU, the machine must be quiet. The load is printed. If another program occupies one core, torch's barrier after
every tensor costs a time slice. torch's 100 tensors then take ten times their normal time, and the ratios are
meaningless. The cases on CUDA have not run yet.
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
from support.scale import scaled
from torch.autograd import DeviceType

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
    """Goals by device and contender: the least ratio to torch, and the least share of the copy's bandwidth."""

    def sizes(self, device: str) -> list[int]:
        if self.small:
            return [512] * max(1, self.tensors // scaled(1, 100))
        total = 32_000_000
        if device == "cuda":
            # Per parameter: 12 bytes for each contender of torch and flatout (others join while there is room), 8 for
            # temporaries of foreach, 12 for gradients, 12 for the creation of values.
            total = min(1_200_000_000, int(0.9 * torch.cuda.mem_get_info()[0] / (12 * 6 + 8 + 12 + 12)))
        return [total // scaled(1, 100) // self.tensors] * self.tensors


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
    """Return the seconds of one call, until the device is done ("done") or until the call returns ("returned")."""
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
    # A CPU reads the cache lines of the target before it overwrites them. An update reads its targets anyway.
    copied = (3 if device == "cpu" else 2) * source.nbytes
    rounds = max(5, (100 if case.small else 20) // scaled(1, 100))
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


# ---- host time on CUDA -------------------------------------------------------------------------------------


def traced(run: Callable[[], object]) -> tuple[int, list[str]]:
    """Return the number of kernels of one call, and the names of its waits and copies to the host."""
    wait("cuda")
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as trace, torch.profiler.record_function("one update"):
        run()
    events = trace.events()
    region = next(e for e in events if e.name == "one update" and e.device_type == DeviceType.CPU)
    # torch annotates every optimizer's step, and this function annotates the update.
    annotations = {e.name for e in events if e.is_user_annotation}
    on_device = [e.name for e in events if e.device_type == DeviceType.CUDA and e.name not in annotations]
    # After the region, the profiler also waits for the device.
    inside = [e.name for e in events if region.time_range.start <= e.time_range.start <= region.time_range.end]
    waits = [name for name in inside if "Synchronize" in name] + [name for name in on_device if "DtoH" in name]
    return sum(not name.startswith(("Memcpy", "Memset")) for name in on_device), waits


def replayed(contender: c.Contender, problem: c.Problem) -> Callable[[], None]:
    """Return a replay of the update as a CUDA graph, on gradients at fixed addresses."""
    problem.fresh_gradients(contender.params)
    graph = torch.cuda.CUDAGraph()
    wait("cuda")
    with torch.cuda.graph(graph):
        contender.update()
    return graph.replay


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
def test_host_time_on_cuda(benchmark: pytest.FixtureRequest) -> None:
    """Measure the host time for 2,000 tensors, and count kernels and waits."""
    problem = c.Problem([512] * max(1, 2000 // scaled(1, 100)), "cuda")
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
