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
from support.turns import Lane, Rates, closing, take_turns
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import flatout
from flatout.core.machine import usable_cores

STEPS = scaled(1000, 20)
"""Steps of the perceptron in the notebook."""

FEATURES, HIDDEN, BATCH = scaled((1024, 2048, 512), (64, 128, 32))
"""Sizes of the perceptron, and samples of its batch."""

ON_GPU = DEVICE.type == "cuda"
ROUNDS = scaled(4 if ON_GPU else 10, 2)
TURN = scaled(1.0 if ON_GPU else 2.0, 0.1)
BUDGET = scaled(45.0 if ON_GPU else 60.0, 3.0)

Step = Callable[[], object]


def perceptron() -> tuple[nn.Module, torch.optim.Optimizer, Tensor, Tensor]:
    """Return model, optimizer, inputs and targets of the notebook."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, FEATURES)).to(DEVICE)
    x, y = torch.randn(2, BATCH, FEATURES, device=DEVICE)
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


def test_perceptron(benchmark: Any, keep: Callable[[dict[str, Any]], None]) -> None:
    """Time 1,000 steps in float32, with AMP, and with flatout."""
    model, optimizer, x, y = perceptron()
    key = f"seconds of {STEPS} steps"

    def seconds_of(rates: Rates) -> dict[str, float]:
        return {name: STEPS * len(x) / statistics.median(each) for name, each in rates.items()}

    def tell(rates: Rates) -> None:
        seconds = seconds_of(rates)
        keep({key: seconds})
        print(f"  {STEPS} steps: " + ", ".join(f"{name} {s:.3g} s" for name, s in seconds.items()), flush=True)

    print()
    lanes = [Lane("float32", in_float32()), Lane("AMP", with_amp())]
    first = {lane.name: [lane.turn(TURN)] for lane in lanes}
    tell(first)
    run = flatout.optimize(model, [(x, y)] * 100, optimizer, nn.functional.mse_loss, expected_steps=LONG, budget=BUDGET)
    lanes.append(Lane("flatout", steps_of(run)))
    keep({"kept": kept_by(run)})
    tell(first | {"flatout": [lanes[-1].turn(TURN)]})
    with closing(lanes):
        rates = take_turns(lanes, ROUNDS, TURN, tell)
        benchmark.pedantic(lambda: lanes[-1].turn(0.1), rounds=1)
    ratios = {f"{name} / float32": gain(rates, name, "float32") for name in ("AMP", "flatout")}
    for name, each in ratios.items():
        print(f"  {name:20} {each.ratio:.2f}x ({each.low:.2f} to {each.high:.2f})")
    print(f"  flatout keeps {kept_by(run)}")
    keep({"times as fast": {name: [each.ratio, each.low, each.high] for name, each in ratios.items()}})
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
    for pinned in (False, True) if ON_GPU else (False,):
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
    if ON_GPU:
        torch.cuda.synchronize()
    return count / (time.perf_counter() - begun)


def deep_and_narrow() -> nn.Module:
    """Return 64 small layers, in which Python takes most of the time."""
    layers = [layer for _ in range(64) for layer in (nn.Linear(32, 32), nn.ReLU())]
    return nn.Sequential(*layers)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, int]]] = {
    "perceptron": (lambda: perceptron()[0], (BATCH, FEATURES)),
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
