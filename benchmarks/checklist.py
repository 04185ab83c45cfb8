"""Examples of the checklist's literature, with synchronized clocks: a perceptron, a loader, and TorchScript.

    pytest benchmarks/checklist.py -s --full

The perceptron (1024-2048-1024, batch 512, Adam) is that of the notebook "Maximizing GPU Utilization in PyTorch". The
notebook times 1,000 steps in float32 and with AMP by a clock that does not wait for the GPU, the first of them without
a warm-up. Here, the loops take turns, and each turn ends when the device is done. flatout trains the same model.

The loader reads images, each of which takes 2 ms of a core, with each number of workers, with and without pinned
memory. TorchScript runs the forward and the training step of the perceptron and of a deep narrow net, in which Python
takes most of the time.

The case study in four steps is in benchmarks/case_study.py.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from support.intervals import gain
from support.loops import DEVICE, LONG, kept_by, steps_of
from support.scale import scaled
from support.turns import Lane, closing, take_turns
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import flatout
from flatout.core.machine import usable_cores

STEPS = scaled(1000, 20)
"""Steps of the perceptron in the notebook."""

ROUNDS = scaled(10, 2)
BUDGET = scaled(60.0, 3.0)

Step = Callable[[], object]


def perceptron() -> tuple[nn.Module, torch.optim.Optimizer, Tensor, Tensor]:
    """Return model, optimizer, inputs and targets of the notebook."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 1024)).to(DEVICE)
    x, y = torch.randn(2, 512, 1024, device=DEVICE)
    return model, torch.optim.Adam(model.parameters()), x, y


def in_float32() -> Iterator[int]:
    """Train as in the notebook's first loop."""
    model, optimizer, x, y = perceptron()
    while True:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        yield len(x)


def with_amp() -> Iterator[int]:
    """Train as in the notebook's second loop, with the classes of ``torch.amp``. A CPU computes in bfloat16."""
    model, optimizer, x, y = perceptron()
    scaler = torch.amp.GradScaler(DEVICE.type, enabled=DEVICE.type == "cuda")
    while True:
        optimizer.zero_grad()
        with torch.amp.autocast(DEVICE.type):
            loss = nn.functional.mse_loss(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        yield len(x)


def test_perceptron(benchmark: Any) -> None:
    """Time 1,000 steps in float32, with AMP, and with flatout."""
    lanes = [Lane("float32", in_float32()), Lane("AMP", with_amp())]
    model, optimizer, x, y = perceptron()
    run = flatout.optimize(model, [(x, y)] * 100, optimizer, nn.functional.mse_loss, expected_steps=LONG, budget=BUDGET)
    lanes.append(Lane("flatout", steps_of(run)))
    with closing(lanes):
        rates = take_turns(lanes, ROUNDS, scaled(2.0, 0.1))
        benchmark.pedantic(lambda: lanes[-1].turn(0.1), rounds=1)
    seconds = {name: STEPS * len(x) / statistics.median(each) for name, each in rates.items()}
    ratios = {f"{name} / float32": gain(rates, name, "float32") for name in ("AMP", "flatout")}
    print(f"\n{STEPS} steps of the perceptron: " + ", ".join(f"{name} {s:.2f} s" for name, s in seconds.items()))
    for name, each in ratios.items():
        print(f"  {name:20} {each.ratio:.2f}x ({each.low:.2f} to {each.high:.2f})")
    print(f"  flatout keeps {kept_by(run)}")
    benchmark.extra_info |= {
        f"seconds of {STEPS} steps": seconds,
        "times as fast": {name: [each.ratio, each.low, each.high] for name, each in ratios.items()},
        "kept": kept_by(run),
    }
    run.undo()


class Decoded(Dataset[Tensor]):
    """Images that each take about 2 ms of a core."""

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> Tensor:
        end = time.perf_counter() + 2e-3
        image = torch.full((3, 64, 64), float(index))
        while time.perf_counter() < end:
            image = image.mul(0.5).add(1.0)
        return image


def test_loader(benchmark: Any) -> None:
    """Time batches of 16 images by number of workers, with and without pinned memory."""
    counts = sorted({0, 1, 2, usable_cores(), 2 * usable_cores()})
    rates: dict[str, float] = {}
    for pinned in (False, True) if DEVICE.type == "cuda" else (False,):
        for workers in counts:
            loader = DataLoader(Decoded(), 16, num_workers=workers, pin_memory=pinned)
            name = f"{workers} workers{', pinned' if pinned else ''}"
            rates[name] = batches_per_second(loader, scaled(3.0, 0.3))
    benchmark.pedantic(lambda: None)
    print(f"\nbatches of 16 images that take 2 ms each, on {usable_cores()} cores")
    for name, rate in rates.items():
        print(f"  {name:20} {rate:8.1f} batches/s, {rate / rates['0 workers']:.2f}x")
    benchmark.extra_info |= {"batches per second": rates, "cores": usable_cores()}


def batches_per_second(loader: DataLoader[Tensor], seconds: float) -> float:
    """Return the rate after the first four batches, which include the start of the workers."""
    batches = iter(loader)
    for _ in range(4):
        next(batches).to(DEVICE, non_blocking=True)
    begun, count = time.perf_counter(), 0
    while time.perf_counter() < begun + seconds:
        next(batches).to(DEVICE, non_blocking=True)
        count += 1
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return count / (time.perf_counter() - begun)


def deep_and_narrow() -> nn.Module:
    """Return 64 small layers, in which Python takes most of the time."""
    layers = [layer for _ in range(64) for layer in (nn.Linear(32, 32), nn.ReLU())]
    return nn.Sequential(*layers)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, int]]] = {
    "perceptron": (lambda: perceptron()[0], (512, 1024)),
    "deep and narrow": (deep_and_narrow, (32, 32)),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("name", MODELS)
def test_torchscript(name: str, benchmark: Any) -> None:
    """Time the forward and a training step, eager and as TorchScript, after the warm-up of its profiling executor."""
    make, shape = MODELS[name]
    torch.manual_seed(0)
    eager = make().to(DEVICE)
    scripted = torch.jit.script(eager)
    x = torch.randn(shape, device=DEVICE)
    torch.testing.assert_close(scripted(x), eager(x))

    def forward(model: nn.Module) -> Iterator[int]:
        while True:
            with torch.no_grad():
                model(x)
            yield len(x)

    def training(model: nn.Module) -> Iterator[int]:
        while True:
            model.zero_grad()
            model(x).square().mean().backward()
            yield len(x)

    figures = {}
    for kind in (forward, training):
        lanes = [Lane("eager", kind(eager)), Lane("TorchScript", kind(scripted))]
        with closing(lanes):
            rates = take_turns(lanes, ROUNDS, scaled(0.5, 0.05))
        figures[kind.__name__] = gain(rates, "TorchScript", "eager")
    benchmark.pedantic(partial(scripted, x), rounds=3)
    print(f"\nTorchScript / eager, {name}")
    for kind_name, each in figures.items():
        print(f"  {kind_name:20} {each.ratio:.2f}x ({each.low:.2f} to {each.high:.2f})")
    benchmark.extra_info["times as fast"] = {
        kind_name: [each.ratio, each.low, each.high] for kind_name, each in figures.items()
    }
