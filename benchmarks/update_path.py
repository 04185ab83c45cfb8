"""Comparison of updates (unscale + check + clip + AdamW) of flatout, torch and other libraries.

    pytest benchmarks/update_path.py -s --full

With clipping, two variants of flatout compete with torch's ``unscale_``, ``clip_grad_norm_`` and ``step``. "flatout
lazy" is ``scaler.step(optimizer, max_grad_norm=...)``, which leaves ``p.grad`` scaled. "flatout eager" uses torch's
calls, which rewrite ``p.grad``. Without clipping, "flatout plain" leaves unscaled gradients, as
``scaler.step(optimizer)`` does in both libraries. Trainings with weights in bfloat16 alone have no scaler.

All contenders of a case take turns in one process, each with new gradients, so that drift of the machine affects all of
them equally. A plain copy takes turns, too. A ratio compares times of one round. The table shows medians and quartiles
over rounds. Bytes per parameter are counted from the passes of each contender (benchmarks/support/contenders.py). GB/s
are these bytes divided by the median time. "of copy" compares this bandwidth with the copy of the same round.
bitsandbytes, torchao, apex, TransformerEngine and flashoptim take part if they are installed. The tests assert only
that all contenders have the same parameters afterwards. Each figure is printed with its goal, and with "met" or
"missed".

On a GPU, the time of an update is that of the device, between two events. A kernel keeps the device busy until the host
has queued the update, so the time has no gap in which the device waits for the host, unless the update itself waits.
The time of the host has a separate test.

On a CPU, the machine must be quiet. The load is printed. If another program occupies one core, torch's barrier after
every tensor costs a time slice. torch's 100 tensors then take ten times their normal time, and the ratios are
meaningless. The cases on CUDA have not run yet.
"""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from support import contenders as c
from support.device_clock import device_seconds
from support.goals import Goal
from support.scale import scaled

from tests.gpu.trace import traced

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")),
]
RATIO, COPY = "times torch", "of copy"


# ---- cases -------------------------------------------------------------------------------------------------

Sizes = Callable[[str], list[int]]
"""Function from a device to the number of elements of each tensor."""


def equal(tensors: int) -> Sizes:
    """Return sizes of equal tensors that exceed any cache."""

    def sizes(device: str) -> list[int]:
        total, count = scaled(32_000_000, 320_000), scaled(tensors, min(tensors, 8))
        if device == "cuda":
            # Per parameter: 12 bytes for each contender of torch and flatout (others join while there is room), 8 for
            # temporaries of foreach, 12 for gradients, 12 for the creation of values.
            room = int(0.9 * torch.cuda.mem_get_info()[0] / (12 * 6 + 8 + 12 + 12))
            total = min(scaled(400_000_000, 20_000), room)
        return [total // count] * count

    return sizes


def of_512(tensors: int) -> Sizes:
    """Return sizes of tensors so small that a step takes only host time on most devices."""
    return lambda device: [512] * max(1, tensors // scaled(1, 100))


def gpt2(device: str) -> list[int]:
    """Return the 148 tensors of GPT-2 in the order of its modules, or a part of each tensor."""
    width = 768
    layer = [width, width, 3 * width**2, 3 * width, width**2, width, width, width]
    layer += [4 * width**2, 4 * width, 4 * width**2, width]
    whole = [50257 * width, 1024 * width, *layer * scaled(12, 1), width, width]
    parts = scaled(1 if device == "cuda" else 4, 5000)
    return [max(1, n // parts) for n in whole]


@dataclass(frozen=True)
class Case:
    title: str
    makers: list[Callable[[c.Problem], c.Contender]]
    sizes: Sizes
    goals: dict[tuple[str, str], dict[str, float]] = field(default_factory=dict)
    """Goals by device and contender: the least ratio to torch, and the least share of the copy's bandwidth."""
    rounds: int = 20
    no_decay_below: int = 0


LARGE = {("cpu", "flatout lazy"): {RATIO: 1.7, COPY: 0.9}, ("cuda", "flatout lazy"): {RATIO: 1.45, COPY: 0.9}}
CASES = {
    "fp32_in_100": Case("float32, 100 tensors", c.FP32, equal(100), LARGE),
    "bf16_in_100": Case(
        "bfloat16 with masters, 100 tensors", c.BF16, equal(100),
        {
            ("cpu", "flatout, float32 masters"): {RATIO: 1.3},
            ("cpu", "flatout, remainder"): {RATIO: 1.3},
            ("cuda", "flatout, remainder"): {RATIO: 1.75},
        },
    ),
    "pure_bf16_in_100": Case("bfloat16 alone, 100 tensors, without clipping", c.PURE_BF16, equal(100)),
    "fp32_in_gpt2": Case("float32, GPT-2's 148 tensors", c.FP32, gpt2, no_decay_below=scaled(4096, 10)),
    "pure_bf16_clipped_in_100": Case("bfloat16 alone, 100 tensors", c.PURE_BF16_CLIPPED, equal(100)),
    "fp32_in_1": Case("float32, one tensor", c.FP32, equal(1), LARGE),
    "fp32_in_2000_small": Case(
        "float32, 2,000 tensors of 512", c.FP32, of_512(2000), {("cpu", "flatout lazy"): {RATIO: 2.5}}, 100
    ),
    "plain_in_100": Case("float32, 100 tensors, without clipping", c.PLAIN, equal(100)),
    "plain_in_1": Case("float32, one tensor, without clipping", c.PLAIN, equal(1)),
    "plain_in_2000_small": Case("float32, 2,000 tensors of 512, without clipping", c.PLAIN, of_512(2000), rounds=100),
}  # fmt: skip
"""The most important ones come first."""


# ---- times -------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def own_memory() -> Iterator[None]:
    """Free the device's memory after each case, so that the next case has the same number of parameters."""
    yield
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def host_seconds(run: Callable[[], object], device: str) -> float:
    """Return the seconds until a call returns. On a CPU, its work is then done."""
    wait(device)
    start = time.perf_counter()
    run()
    elapsed = time.perf_counter() - start
    wait(device)
    return elapsed


@dataclass
class Times:
    """Times of the contenders of a case.

    Attributes:
        seconds: time of each round, by contender.
        waited: number of rounds in which the device waited for the host, by contender.
    """

    seconds: dict[str, list[float]] = field(default_factory=dict)
    waited: Counter[str] = field(default_factory=Counter)

    def add(self, name: str, run: Callable[[], object], device: str, lead: float = 0.0) -> None:
        """Time a call: on the device after a lead, or else until it returns."""
        taken, waited = device_seconds(run, lead) if lead else (host_seconds(run, device), False)
        self.seconds.setdefault(name, []).append(taken)
        self.waited[name] += waited


def in_turns(
    contenders: list[c.Contender],
    problem: c.Problem,
    rounds: int,
    copy: Callable[[], object] | None = None,
    *,
    on_device: bool,
) -> Times:
    """Time the contenders and a copy, by the clock of the device or by that of the host."""
    runs = {x.name: x.update for x in contenders} | ({} if copy is None else {"copy": copy})
    leads = dict.fromkeys(runs, 0.0)
    if on_device:
        for x in contenders:
            problem.fresh_gradients(x.params)
            leads[x.name] = 2 * host_seconds(x.update, problem.device) + 1e-3
        leads["copy"] = 1e-3
    times = Times()
    for i in range(rounds):
        for x in contenders[i % len(contenders) :] + contenders[: i % len(contenders)]:
            problem.fresh_gradients(x.params)
            times.add(x.name, x.update, problem.device, leads[x.name])
        if copy is not None:
            times.add("copy", copy, problem.device, leads["copy"])
    return times


def quartiles(values: list[float]) -> tuple[float, float, float]:
    low, middle, high = statistics.quantiles(values, n=4)
    return middle, low, high


# ---- claims ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CASES)
def test_update(name: str, device: str, benchmark: Any, keep: Callable[[dict[str, Any]], None]) -> None:
    case = CASES[name]
    load = f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores before"
    problem = c.Problem(case.sizes(device), device, case.no_decay_below)
    contenders, missing = c.assemble(case.makers, problem)
    differ = c.disagreements(contenders)
    source = torch.rand(min(max(problem.total, scaled(1 << 22, 1 << 16)), 1 << 28), device=device)
    target = torch.empty_like(source)
    # A CPU reads the cache lines of the target before it overwrites them. An update reads its targets anyway.
    copied = (3 if device == "cpu" else 2) * source.nbytes
    rounds = scaled(case.rounds, 2)
    found = in_turns(contenders, problem, rounds, lambda: target.copy_(source), on_device=device == "cuda")
    times = found.seconds
    copy = copied / statistics.median(times["copy"])

    where = f"CPU, {torch.get_num_threads()} threads" if device == "cpu" else torch.cuda.get_device_name()
    print(f"\n\n{case.title}: {problem.total / 1e6:,.1f} M parameters on {where}; copy {copy / 1e9:.1f} GB/s; {load}")
    print(f"  {'':30}{'median':>10}{'min':>10}  {'B/param':>7}  {'GB/s':>7}  {'of copy':>7}  ", end="")
    print(f"{contenders[0].name} / it (quartiles)")
    info: dict[str, Any] = {"parameters": problem.total, "copy_GB/s": copy / 1e9, "missing": missing, "load": load}
    for x in contenders:
        mine = times[x.name]
        ratio, low, high = quartiles([a / b for a, b in zip(times[contenders[0].name], mine, strict=True)])
        row = {"ms_median": statistics.median(mine) * 1e3, "ms_min": min(mine) * 1e3}
        row |= {"ratio_median": ratio, "ratio_quartiles": (low, high), "rounds_that_waited": found.waited[x.name]}
        goals = case.goals.get((device, x.name), {})
        bandwidth = f"{'?':>7}  {'?':>7}  {'?':>7}"
        share = None
        if x.bytes_per_param is not None:
            moved = x.bytes_per_param * problem.total
            share = quartiles([moved / a / (copied / b) for a, b in zip(mine, times["copy"], strict=True)])[0]
            row |= {"bytes_per_param": x.bytes_per_param, "GB/s": moved / row["ms_median"] / 1e6, "of_copy": share}
            bandwidth = f"{x.bytes_per_param:7g}  {row['GB/s']:7.1f}  {share:7.0%}"
        reached = {RATIO: ratio, COPY: share}
        verdict = "; ".join(str(Goal(what, reached[what], least)) for what, least in goals.items())
        waited = f"; the device waited in {found.waited[x.name]} rounds" if found.waited[x.name] else ""
        info[x.name] = row | {"goals": goals}
        print(
            f"  {x.name:30}{row['ms_median']:7.2f} ms{row['ms_min']:7.2f} ms  {bandwidth}  "
            f"{ratio:5.2f}x ({low:.2f} to {high:.2f})   {verdict}{waited}"
        )
    for reason in missing:
        print(f"  without {reason}")
    keep(info)
    ours = next(x for x in contenders if x.name.startswith("flatout"))
    benchmark.pedantic(ours.update, setup=lambda: problem.fresh_gradients(ours.params), rounds=3)
    assert not differ


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
@pytest.mark.parametrize("tensors", [4, 20, 148, 500, 2000])
def test_host_time_on_cuda(tensors: int, benchmark: Any, keep: Callable[[dict[str, Any]], None]) -> None:
    """Measure the time of the host and of the device for tensors of 512, and count kernels and waits."""
    problem = c.Problem([512] * max(1, tensors // scaled(1, 200)), "cuda")
    contenders, _ = c.assemble(c.FP32[:5], problem)
    differ = c.disagreements(contenders)
    rounds = scaled(30, 2)
    host = in_turns(contenders, problem, rounds, on_device=False).seconds
    device = in_turns(contenders, problem, rounds, on_device=True).seconds
    print(f"\n\nupdates of {len(problem.sizes):,} tensors of 512 on {torch.cuda.get_device_name()}")
    print(f"  {'':30}{'host':>10}{'device':>10}  torch fused / it, on the host")
    goals = {"flatout lazy": 4.0, "flatout lazy, replayed": 20.0} if tensors == 2000 else {}
    info: dict[str, dict[str, Any]] = {}
    for key, mine in host.items():
        ratio, goal = statistics.median(host["torch fused"]) / statistics.median(mine), goals.get(key)
        row = {
            "host_ms_median": statistics.median(mine) * 1e3,
            "device_ms_median": statistics.median(device[key]) * 1e3,
        }
        print(
            f"  {key:30}{row['host_ms_median']:7.3f} ms{row['device_ms_median']:7.3f} ms  {ratio:.2f}x"
            f"   {'' if goal is None else Goal(RATIO, ratio, goal)}"
        )
        info[key] = row | {"ratio": ratio, "goal": goal}
    keep(info)
    for x in contenders:
        problem.fresh_gradients(x.params)
        trace = traced(x.update)
        print(f"  {x.name}: {len(trace.kernels)} kernels, waits: {', '.join(trace.waits) or 'none'}")
        info[x.name] |= {"kernels": len(trace.kernels), "waits": trace.waits}
    keep(info)
    benchmark.pedantic(contenders[-1].update, rounds=3)
    assert not differ
