"""Overhead of counting: the host time that each counter adds to a step, and the time to count FLOPs.

    pytest benchmarks/counting_overhead.py -s --full

Goal: less than 5 us of host time per step, with phases. This is 0.1 % of a step of 5 ms. If lightning is installed, the
work of its ThroughputMonitor is timed, too: `_update` on every batch and `_compute` on every tenth batch, which is the
default of its trainer.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import random
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from support.scale import scaled
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

import flatout
from flatout.data import to_device
from flatout.mfu import MfuCounter, count_flops

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STEP_SECONDS = 5e-3
ROUNDS = scaled(15, 3)
STEPS = scaled(500, 20)
"""Number of steps in a round."""


def by_turns(tried: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each function, by round. The order is random, because each function changes the caches."""
    took: dict[str, list[float]] = {name: [] for name in tried}
    order = random.Random(0)
    for turn in range(-2, rounds):
        for name in order.sample(list(tried), len(tried)):
            work = tried[name]
            begun = time.perf_counter()
            work()
            if turn >= 0:
                took[name].append(time.perf_counter() - begun)
    return took


def nothing() -> None:
    for _ in range(STEPS):
        pass


def steps_of(counter: MfuCounter) -> Callable[[], None]:
    def loop() -> None:
        for _ in range(STEPS):
            with counter.step(32):
                pass

    return loop


def phases_of(counter: MfuCounter) -> Callable[[], None]:
    def loop() -> None:
        for _ in range(STEPS):
            with counter.step(32) as step:
                with step.phase("h2d"):
                    pass
                with step.phase("forward"):
                    pass
                with step.phase("backward"):
                    pass
                with step.phase("update"):
                    pass

    return loop


def loader_and_phases_of(counter: MfuCounter) -> Callable[[], None]:
    def loop() -> None:
        for _ in counter.batches(range(STEPS)):
            with counter.step(32) as step:
                with step.phase("h2d"):
                    pass
                with step.phase("forward"):
                    pass
                with step.phase("backward"):
                    pass
                with step.phase("update"):
                    pass

    return loop


def lightning_monitor() -> Callable[[], None] | None:
    """Return a function that runs the callback's work after a step, as in a Trainer; None without lightning."""
    try:
        from lightning.fabric.utilities.throughput import Throughput
        from lightning.pytorch.callbacks import ThroughputMonitor
        from lightning.pytorch.trainer.states import RunningStage
    except ImportError:
        return None
    stage = RunningStage.TRAINING
    logger = SimpleNamespace(should_update_logs=True, log_metrics=lambda metrics, step: None)
    trainer: Any = SimpleNamespace(
        state=SimpleNamespace(stage=stage, fn="fit"),
        strategy=SimpleNamespace(root_device=torch.device(DEVICE)),
        _logger_connector=logger,
    )
    module: Any = SimpleNamespace(flops_per_batch=10**9)
    batch = torch.ones(32, 1)
    monitor = ThroughputMonitor(batch_size_fn=len)
    monitor._throughputs[stage] = Throughput(available_flops=10**12, world_size=1)
    monitor._start(trainer)
    steps = itertools.count(1)

    def behind_step() -> None:
        step = next(steps)
        monitor._update(trainer, module, batch, step)
        if step % 10 == 0:
            monitor._compute(trainer, step)

    return behind_step


def test_host_time_of_a_step(benchmark):
    """Measure the microseconds that each counter adds to an empty step."""
    tried: dict[str, Callable[[], object]] = {
        "an empty loop": nothing,
        "step": steps_of(MfuCounter(1e9, 1e12, device=DEVICE)),
        "step and phases, on every 10th": phases_of(MfuCounter(1e9, 1e12, device=DEVICE)),
        "loader, step and phases, on every 10th": loader_and_phases_of(MfuCounter(1e9, 1e12, device=DEVICE)),
        "step and phases, on every one": phases_of(MfuCounter(1e9, 1e12, device=DEVICE, phases_every=1)),
    }
    peer = lightning_monitor()
    if peer is not None:
        tried["Lightning's ThroughputMonitor"] = lambda: [peer() for _ in range(STEPS)]
    took = by_turns(tried, ROUNDS)
    empty = statistics.median(took.pop("an empty loop"))
    micros = {name: 1e6 * (statistics.median(each) - empty) / STEPS for name, each in took.items()}
    for name, value in micros.items():
        share = value * 1e-6 / STEP_SECONDS
        print(f"\n{name:42} {value:7.2f} us a step, {100 * share:.3f} % of 5 ms", end="")
        benchmark.extra_info[name] = {"us": round(value, 2), "share of 5 ms": round(share, 6)}
    if peer is None:
        print("\nLightning's ThroughputMonitor: not there", end="")
    benchmark.pedantic(tried["step and phases, on every 10th"], rounds=5)


def training() -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], Tensor]]:
    """Return model, optimizer and loss of a small GPT, whose step takes some milliseconds."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True, norm_first=True)
    model = nn.Sequential(nn.Embedding(256, 128), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
                          nn.Linear(128, 256)).to(DEVICE)  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(0, 256, (2, 64), device=DEVICE)

    def loss() -> Tensor:
        return functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())

    return model, optimizer, loss


def test_a_real_step_with_each_counter(benchmark):
    """Measure the ratio of a training step with each counter to a bare step, in turns."""
    _, optimizer, loss = training()

    def plain() -> None:
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()
        if DEVICE == "cuda":
            torch.cuda.synchronize()

    counter = MfuCounter(1e9, 1e12, device=DEVICE)

    def counted() -> None:
        with counter.step(2) as step:
            with step.phase("forward"):
                value = loss()
            with step.phase("backward"):
                value.backward()
            with step.phase("update"):
                optimizer.step()
                optimizer.zero_grad()
        if DEVICE == "cuda":
            torch.cuda.synchronize()

    def dispatched() -> None:
        with FlopCounterMode(display=False):
            plain()

    model, own, own_loss = training()
    wrapped_counter = MfuCounter(1e9, 1e12, device=DEVICE)
    wrapped_counter.wrap(model)

    def wrapped() -> None:
        own_loss().backward()
        own.step()
        own.zero_grad()
        if DEVICE == "cuda":
            torch.cuda.synchronize()

    took = by_turns({"bare": plain, "MfuCounter.step": counted, "MfuCounter.wrap": wrapped,
                     "FlopCounterMode on every step": dispatched}, scaled(100, 3))  # fmt: skip
    bare = took.pop("bare")
    print(f"\nbare step: {1e3 * statistics.median(bare):.2f} ms", end="")
    for name, each in took.items():
        ratio = statistics.median(a / b for a, b in zip(each, bare, strict=True))
        print(f"\n{name:42} {ratio:6.3f}x the bare step", end="")
        benchmark.extra_info[name] = round(ratio, 4)
    benchmark.extra_info["bare step ms"] = round(1e3 * statistics.median(bare), 3)
    benchmark.pedantic(counted, rounds=5)


def test_counting_flops_once(benchmark):
    """Measure the time of `count_flops` and of FlopCounterMode, in bare steps.

    Training calls `count_flops` once for each shape of a batch.
    """
    model, _, loss = training()
    tokens = torch.randint(0, 256, (2, 64), device=DEVICE)

    def plain() -> None:
        loss().backward()

    def torchs() -> int:
        with FlopCounterMode(display=False) as mode:
            model(tokens).sum().backward()
        return mode.get_total_flops()

    took = by_turns(
        {"bare": plain, "count_flops": lambda: count_flops(model, tokens), "FlopCounterMode": torchs}, scaled(15, 3)
    )
    bare = statistics.median(took["bare"])
    for name in ("count_flops", "FlopCounterMode"):
        print(f"\n{name:42} {statistics.median(took[name]) / bare:6.2f} forwards and backwards", end="")
        benchmark.extra_info[name] = round(statistics.median(took[name]) / bare, 2)
    ours, theirs = count_flops(model, tokens), torchs()
    print(f"\nFLOPs: {ours.total:,} (dense {ours.dense:,}); FlopCounterMode {theirs:,}", end="")
    benchmark.extra_info["flops"] = {"count_flops": ours.total, "FlopCounterMode": theirs}
    benchmark.pedantic(lambda: count_flops(model, tokens), rounds=3)


def small_run() -> flatout.Run:
    """Return a training so small that a step takes only host time."""
    model = nn.Linear(4, 1).to(DEVICE)
    batches = [(torch.ones(8, 4, device=DEVICE), torch.ones(8, 1, device=DEVICE))] * 4
    return flatout.optimize(model, batches, torch.optim.SGD(model.parameters(), lr=1e-3), functional.mse_loss, budget=0)


def test_host_time_within_training(benchmark):
    """Measure the time that counting adds to a step of training, and that ``run.step`` adds to a plain loop.

    In a tight loop, the counter's code stays in the processor's caches. In training it does not, and neither does it
    here.
    """
    run, steps = small_run(), scaled(50, 5)
    model = copy.deepcopy(run.model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    job, batch = run._job, next(iter(run.loader))
    counter, unheard = MfuCounter(1e9, 1e12, device=DEVICE), contextlib.nullcontext()
    wrapped_run = small_run()
    wrapped_counter = MfuCounter(1e9, 1e12, device=DEVICE)
    wrapped_counter.wrap(wrapped_run.model)
    peer = lightning_monitor()

    def bare() -> None:
        for _ in range(steps):
            job.stepper.step(to_device(batch, job.spec.device), lambda name: unheard)

    def counted() -> None:
        for _ in range(steps):
            with counter.step(8) as step:
                job.stepper.step(to_device(batch, job.spec.device), step.phase)

    def wrapped() -> None:
        for _ in range(steps):
            wrapped_run._job.stepper.step(to_device(batch, job.spec.device), lambda name: unheard)

    def plain() -> None:
        x, y = to_device(batch, job.spec.device)
        for _ in range(steps):
            optimizer.zero_grad()
            functional.mse_loss(model(x), y).backward()
            optimizer.step()

    def whole() -> None:
        for _ in range(steps):
            run.step(batch)

    def watched() -> None:
        for _ in range(steps):
            job.stepper.step(to_device(batch, job.spec.device), lambda name: unheard)
            peer()

    tried = {
        "plain loop": plain,
        "bare": bare,
        "MfuCounter.step and phases": counted,
        "run.step": whole,
        "MfuCounter.wrap": wrapped,
    }
    if peer is not None:
        tried["Lightning's ThroughputMonitor"] = watched
    took = by_turns(tried, scaled(60 if DEVICE == "cuda" else 300, 3))
    loop, empty = took.pop("plain loop"), took.pop("bare")
    print(f"\nplain loop: {1e6 * statistics.median(loop) / steps:.0f} us", end="")
    for name, each in took.items():
        without = loop if name == "run.step" else empty
        added = statistics.median(b - a for a, b in zip(without, each, strict=True)) / steps
        print(f"\n{name:42} {1e6 * added:7.2f} us a step, {100 * added / STEP_SECONDS:.3f} % of 5 ms", end="")
        benchmark.extra_info[name] = {"us": round(1e6 * added, 2), "share of 5 ms": round(added / STEP_SECONDS, 6)}
    benchmark.pedantic(counted, rounds=5)
