"""Cases of ``flatout bench``. Each benchmark is one function, and one line in ``BENCHMARKS``."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import flatout
import flatout.amp
import flatout.optim
from flatout.core.snapshot import Snapshot
from flatout.data import InMemoryLoader

STEPS = 10
"""Steps of a training in one call, which switches the backend flags of the training once."""

NEVER = 2**31 - 1
"""Steps until a loss scale grows."""

EXPECTED_STEPS = 50_000
"""Length of the training for which the tuning decides."""


@dataclass(frozen=True)
class Case:
    """Two ways to do the same work.

    Attributes:
        work: the work of one call.
        peer: name of the way without flatout.
        before: does the work without flatout.
        after: does the work with flatout.
        note: remark on flatout's side, such as the techniques that are in use.
    """

    work: str
    peer: str
    before: Callable[[], object]
    after: Callable[[], object]
    note: str = ""


class WithOwnFlags:
    """Function with separate backend flags and random numbers, beginning with those of this moment."""

    def __init__(self, function: Callable[[], object]) -> None:
        self._function = function
        self._state = Snapshot.capture([])

    def __call__(self) -> None:
        """Call the function with its flags."""
        self._state.restore()
        self._function()
        self._state = Snapshot.capture([])


def update(device: torch.device, budget: float) -> Iterator[Case]:
    """Yield unscale, check for infinities, clip and AdamW of 100 tensors."""
    count = 100_000_000 if device.type == "cuda" else 16_000_000

    def parameters() -> list[nn.Parameter]:
        generator = torch.Generator(device).manual_seed(0)
        made = []
        for _ in range(100):
            values = torch.randn(2, count // 100, device=device, generator=generator)
            made.append(nn.Parameter(values[0]))
            made[-1].grad = values[1]
        return made

    ours, theirs = parameters(), parameters()
    optimizer = torch.optim.AdamW(theirs, fused=True)
    # The scale stays 1, so that the gradients keep their size from call to call.
    scaler = torch.amp.GradScaler(device.type, init_scale=1.0, growth_interval=NEVER)
    native = flatout.optim.AdamW(ours)
    native_scaler = flatout.amp.GradScaler(device.type, init_scale=1.0, growth_interval=NEVER)
    for each in (scaler, native_scaler):
        each.scale(torch.zeros((), device=device))  # creates the tensor of the scale

    def before() -> None:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(theirs, 1.0, foreach=True)
        scaler.step(optimizer)
        scaler.update()

    def after() -> None:
        native_scaler.step(native, max_grad_norm=1.0)
        native_scaler.update()

    work = f"unscale + clip + AdamW, {count // 1_000_000} M parameters"
    yield Case(work, "torch, fused", before, after)


def data(device: torch.device, budget: float) -> Iterator[Case]:
    """Yield an epoch of a shuffled dataset in memory, against a loader without and with workers."""
    images = torch.randint(256, (50_000, 3, 32, 32), dtype=torch.uint8)
    dataset = TensorDataset(images, torch.arange(50_000))
    plain = DataLoader(dataset, batch_size=256, shuffle=True)
    workers = DataLoader(
        dataset, batch_size=256, shuffle=True, num_workers=2, persistent_workers=True, prefetch_factor=4
    )
    ours = InMemoryLoader(plain)

    def epoch(loader: Any) -> Callable[[], object]:
        return lambda: sum(1 for _ in loader)

    work = "epoch of 50,000 images of 3×32×32 bytes"
    yield Case(work, "DataLoader", epoch(plain), epoch(ours))
    yield Case(work, "DataLoader, 2 workers", epoch(workers), epoch(ours))


def step(device: torch.device, budget: float) -> Iterator[Case]:
    """Yield steps of a perceptron (1024-2048-1024, batch 512, Adam) on a batch that is on the device."""

    def training() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 1024)).to(device)
        return model, torch.optim.Adam(model.parameters(), lr=1e-3)

    x, y = torch.randn(2, 4096, 1024)
    model, optimizer = training()
    inputs, targets = x[:512].to(device), y[:512].to(device)

    def plain_step() -> None:
        optimizer.zero_grad()
        functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()

    before = WithOwnFlags(_repeated(plain_step))
    tuned, its_optimizer = training()
    loader = DataLoader(TensorDataset(x, y), batch_size=512, shuffle=True)
    run = flatout.optimize(
        tuned, loader, its_optimizer, functional.mse_loss, expected_steps=EXPECTED_STEPS, budget=budget, plan=None
    )
    batch = next(iter(run.loader))
    after = WithOwnFlags(_repeated(lambda: run.step(batch)))
    yield Case(f"{STEPS} steps of a perceptron", "plain torch", before, after, _in_use(run.report))


def _repeated(step: Callable[[], object]) -> Callable[[], object]:
    def run() -> None:
        for _ in itertools.repeat(None, STEPS):
            step()

    return run


def _in_use(report: Any) -> str:
    kept = [row.title for row in report.rows if row.status == "kept"]
    return f"in use: {', '.join(kept)}" if kept else "nothing measured is in use"


BENCHMARKS: dict[str, Callable[[torch.device, float], Iterator[Case]]] = {
    "update": update,
    "data": data,
    "step": step,
}
