"""Sweep of each measured technique: a job in its favor, and a job where it does nothing or hurts.

    pytest benchmarks/techniques.py -s --full

Each technique is forced alone (``techniques={name: value}``, and ``False`` for all others). Its loop takes turns with
the loop without any technique, in one process. Both loops have the rules. Jobs are made for a contrast: layers that
are wide or narrow, samples that are cheap or costly, sequences that are short or long. Techniques that do not apply to
this machine are skipped, with the reason that ``optimize`` gives.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from support.intervals import gain
from support.loops import DEVICE, tuned
from support.scale import scaled
from support.training_jobs import Job
from support.turns import Lane, closing, take_turns
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from flatout.core.snapshot import Snapshot
from flatout.techniques import REGISTRY, Measured

ROUNDS = scaled(10, 2)
TURN = scaled(0.5, 0.05)
WIDE = 1024 if DEVICE.type == "cpu" else 8192


def perceptron(width: int, depth: int, batch: int) -> Job:
    """Return a perceptron with ``depth`` layers of ``width`` features, on rows that are cheap to load."""
    x, y = torch.randn(2, 16 * batch, width, generator=torch.Generator().manual_seed(0))

    def model() -> nn.Module:
        layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())]
        return nn.Sequential(*layers[:-1])

    name = f"{depth} layers of {width}, batch {batch}"
    return Job(name, TensorDataset(x, y), batch, model, loss_fn=nn.functional.mse_loss)


def convolutions(channels: int, side: int, batch: int = 16) -> Job:
    """Return a net of three convolutions for images."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(8 * batch, 3, side, side, generator=generator)
    labels = torch.randint(10, (8 * batch,), generator=generator)

    def model() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
            nn.Linear(channels, 10),
        )  # fmt: skip

    return Job(f"{channels} channels, {side}×{side} pixels", TensorDataset(images, labels), batch, model)


class Attention(nn.Module):
    """Layer of attention for sequences, with a score for each of ten classes."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Map [N, T, width] to [N, 10]."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.out(attended.transpose(1, 2).flatten(2).mean(1))


def attention(tokens: int, batch: int) -> Job:
    """Return a layer of attention on sequences of ``tokens`` tokens."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4 * batch, tokens, 64, generator=generator)
    labels = torch.randint(10, (4 * batch,), generator=generator)
    return Job(
        f"{tokens} tokens, batch {batch}", TensorDataset(x, labels), batch, lambda: Attention(64, 4), attends=True
    )


class Pointwise(nn.Module):
    """Chain of operations that each read and write the whole tensor."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Map [N, width] to [N, width]."""
        for _ in range(16):
            x = torch.sin(x * self.scale) + 0.5 * torch.tanh(x)
        return x


def pointwise() -> Job:
    """Return a chain of pointwise operations."""
    x, y = torch.randn(2, 4096, 1024, generator=torch.Generator().manual_seed(0))
    return Job(
        "chain of pointwise operations",
        TensorDataset(x, y),
        512,
        lambda: Pointwise(1024),
        loss_fn=nn.functional.mse_loss,
    )


class Costly(Dataset[tuple[Tensor, int]]):
    """Samples that each take 2 ms of a core."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        end, x = time.perf_counter() + 2e-3, torch.full((64,), index / 4096)
        while time.perf_counter() < end:
            x = x.mul(0.5).add(0.1)
        return x, index % 10


def costly_samples() -> Job:
    """Return a small perceptron on samples that are costly to load."""
    model = lambda: nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))  # noqa: E731
    return Job("samples of 2 ms, batch 16", Costly(), 16, model)


@dataclass(frozen=True)
class Sweep:
    """Two jobs of a technique.

    Attributes:
        value: value to force.
        helps: makes the job in favor of the technique.
        other: makes the job where the technique does nothing or hurts.
    """

    value: Any
    helps: Callable[[], Job]
    other: Callable[[], Job]


class Residual(nn.Module):
    """Block of two layers, which activation checkpointing can compute again."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Map [N, width] to [N, width]."""
        return x + self.layers(x)


def residual(width: int, batch: int) -> Job:
    """Return a net of 12 equal blocks."""
    x, y = torch.randn(2, 4 * batch, width, generator=torch.Generator().manual_seed(0))
    model = lambda: nn.Sequential(*[Residual(width) for _ in range(12)])  # noqa: E731
    name = f"12 blocks of {width}, batch {batch}"
    return Job(name, TensorDataset(x, y), batch, model, loss_fn=nn.functional.mse_loss)


NARROW = partial(perceptron, 32, 4, 32)
BROAD = partial(perceptron, WIDE, 3, 512)
MANY = partial(perceptron, 32, 100, 32)

SWEEPS = {
    "precision": Sweep("bf16", BROAD, NARROW),
    "channels_last": Sweep(True, partial(convolutions, 64, 64), partial(convolutions, 4, 8)),
    "fused_optimizer": Sweep(True, MANY, partial(convolutions, 32, 64)),
    "in_memory": Sweep(True, NARROW, partial(convolutions, 64, 64)),
    "workers": Sweep(2, costly_samples, NARROW),
    "compile": Sweep("default", pointwise, BROAD),
    "torchscript": Sweep("script", MANY, BROAD),
    "cpu_threads": Sweep(1, NARROW, BROAD),
    "sdpa_backend": Sweep("math", partial(attention, 8, 16), partial(attention, 1024, 4)),
    "activation_checkpointing": Sweep(True, partial(residual, 128, 2048), partial(residual, 128, 16)),
    "cudnn_benchmark": Sweep(True, partial(convolutions, 64, 64), NARROW),
    "tf32": Sweep(True, BROAD, NARROW),
    "cuda_graph": Sweep(True, MANY, BROAD),
}
NAMES = [technique.name for technique in REGISTRY if isinstance(technique, Measured)]


def forced(job: Job, technique: str | None, value: Any = True) -> Lane:
    """Return the loop of a job with one technique alone, or with none."""
    techniques = dict.fromkeys(NAMES, False) | ({} if technique is None else {technique: value})
    if technique == "cuda_graph":
        techniques["fused_optimizer"] = True
    _, steps = tuned(job, techniques=techniques, budget=0)
    return Lane(technique or "none", steps)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore:This DataLoader will create")
@pytest.mark.parametrize("name", SWEEPS if scaled(True, False) else ["fused_optimizer", "workers"])
def test_technique(name: str, benchmark: Any) -> None:
    """Time the technique against no technique on both of its jobs."""
    sweep, figures = SWEEPS[name], {}
    for kind, make in (("helps", sweep.helps), ("other", sweep.other)):
        job, plain = make(), Snapshot.capture([])
        try:
            lane = forced(job, name, sweep.value)
        except ValueError as reason:
            plain.restore()
            figures[kind] = {"job": job.name, "not applicable": str(reason)}
            continue
        plain.restore()
        lanes = [lane, forced(job, None)]
        with closing(lanes):
            rates = take_turns(lanes, ROUNDS, TURN)
        found = gain(rates, name, "none")
        figures[kind] = {"job": job.name, "times as fast": [found.ratio, found.low, found.high]}
    if all("not applicable" in each for each in figures.values()):
        pytest.skip(figures["helps"]["not applicable"])
    benchmark.pedantic(lambda: None)
    print(f"\n{name} ({sweep.value})")
    for each in figures.values():
        ratio, low, high = each.get("times as fast", (0.0, 0.0, 0.0))
        text = f"{ratio:.2f}x ({low:.2f} to {high:.2f})" if ratio else f"does not apply: {each['not applicable']}"
        print(f"  {each['job']:32} {text}")
    benchmark.extra_info |= {"value": str(sweep.value), **figures}
