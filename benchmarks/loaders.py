"""Random augmentation in worker processes: the speedup, and the effect on accuracy.

    pytest benchmarks/loaders.py -s --full

Two loops begin with ``num_workers=0``. The first loop trains on images, with torchvision's RandomCrop,
RandomHorizontalFlip and Normalize. Without torchvision, it uses the same transforms in plain torch. flatout decides
about workers once. Then the original loop and the loop with two workers train with five seeds, and the accuracies are
compared.

The second loop waits 0.125 s for each of the four samples of a batch, and draws a random number for each sample. A step
takes 0.1 s. The share of time that steps wait is measured before and after tuning. The tests assert only the samples,
and print a goal beside each figure.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from support.scale import scaled
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

import flatout
from flatout.techniques import REGISTRY, Measured

SEEDS = range(scaled(5, 2))
EPOCHS = scaled(10, 2)
TUNING_SECONDS = scaled(20.0, 2.0)
STEP_SECONDS, SAMPLE_SECONDS = scaled((0.1, 0.125), (0.01, 0.0125))
BATCH = 4
STEPS = scaled(40, 8)
HELD_OUT = 360
WITHOUT_OTHERS = {t.name: False for t in REGISTRY if isinstance(t, Measured) and t.name != "workers"}
"""Argument ``techniques`` that forbids all measured techniques except the workers."""


# -- images ----------------------------------------------------------------------------------------------------


class CropFlipNormalize:
    """RandomCrop with padding, RandomHorizontalFlip and Normalize of a uint8 image [3, H, W], in plain torch."""

    def __call__(self, image: Tensor) -> Tensor:
        size = image.shape[-1]
        top, left = torch.randint(0, 9, (2,)).tolist()
        image = functional.pad(image, (4, 4, 4, 4))[:, top : top + size, left : left + size]
        if torch.rand(()) < 0.5:
            image = image.flip(-1)
        return (image.float() / 255 - 0.3) / 0.38


def augmentation() -> Callable[[Tensor], Tensor]:
    """Return torchvision's transforms, or the same transforms in plain torch."""
    if importlib.util.find_spec("torchvision") is None:
        return CropFlipNormalize()
    from torchvision.transforms import v2

    return v2.Compose(
        [
            v2.RandomCrop(32, padding=4),
            v2.RandomHorizontalFlip(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize([0.3] * 3, [0.38] * 3),
        ]
    )


class Images(Dataset[tuple[Tensor, int, int]]):
    """Digits of scikit-learn as images of 3x32x32 bytes, with label and index. A read augments the image."""

    def __init__(self, images: Tensor, labels: list[int]) -> None:
        self.images, self.labels = images, labels
        self.transform = augmentation()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int, int]:
        return self.transform(self.images[index]), self.labels[index], index


def digits() -> tuple[Tensor, list[int]]:
    data = pytest.importorskip("sklearn.datasets").load_digits()
    images = torch.from_numpy(data.images / 16.0 * 255)[:, None].expand(-1, 3, -1, -1)
    return functional.interpolate(images, size=32, mode="bilinear").to(torch.uint8), data.target.tolist()


def convnet() -> nn.Module:
    layers: list[nn.Module] = []
    for channels, wider in ((3, 16), (16, 32), (32, 64)):
        layers += [nn.Conv2d(channels, wider, 3, 2, 1), nn.BatchNorm2d(wider), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1), nn.Linear(64, 10))


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    images, labels, _ = batch
    return functional.cross_entropy(model(images), labels)


def epochs_of_steps(loader: Iterable[Any], step: Callable[[Any], object]) -> list[list[int]]:
    """Train, and return the indices of the samples of each epoch, in order."""
    orders: list[list[int]] = []
    for _ in range(EPOCHS):
        orders.append([])
        for batch in loader:
            step(batch)
            orders[-1] += batch[-1].tolist()
    return orders


def accuracy(model: nn.Module, images: Tensor, labels: list[int]) -> float:
    model.eval()
    with torch.no_grad():
        found = model((images.float() / 255 - 0.3) / 0.38).argmax(1)
    return float((found == torch.tensor(labels)).float().mean())


def train(seed: int, workers: int | None, budget: float = 0.0) -> dict[str, Any]:
    """Train one model.

    Args:
        seed: seed of all generators.
        workers: None for the original loop, a number of workers to force, or -1 if flatout decides.
        budget: budget of the tuning, in seconds.
    """
    images, labels = digits()
    seed_all(seed)
    model = convnet()
    opt = torch.optim.Adam(model.parameters(), 3e-3)
    loader: Iterable[Any] = DataLoader(Images(images[HELD_OUT:], labels[HELD_OUT:]), batch_size=64, shuffle=True)

    def step(batch: Any) -> object:
        opt.zero_grad()
        cross_entropy(model, batch).backward()
        return opt.step()

    found: dict[str, Any] = {}
    if workers is not None:
        techniques = WITHOUT_OTHERS | ({} if workers < 0 else {"workers": workers})
        options: dict[str, Any] = {"techniques": techniques, "budget": budget, "expected_steps": 100_000}
        run = flatout.optimize(model, loader, opt, compute_loss=cross_entropy, **options)
        row = run.report.row("workers")
        found = {"status": row.status, "chosen": row.chosen, "why": row.why}
        found["tuning_seconds"] = run.report.summary.tuning_seconds
        loader, step = run.loader, run.step
    begun = time.perf_counter()
    orders = epochs_of_steps(loader, step)
    found["epoch_seconds"] = (time.perf_counter() - begun) / EPOCHS
    return found | {"accuracy": accuracy(model, images[:HELD_OUT], labels[:HELD_OUT]), "orders": orders}


def test_images(benchmark: Any) -> None:
    """Check that each sample comes once per epoch, and that the first epoch keeps its order."""
    own = [train(seed, None) for seed in SEEDS]
    ours = [train(seed, 2) for seed in SEEDS]
    decided = train(SEEDS[0], -1, TUNING_SECONDS)
    for mine, theirs in zip([*ours, decided], [*own, own[0]], strict=True):
        assert mine["orders"][0] == theirs["orders"][0]
        assert all(sorted(order) == list(range(1797 - HELD_OUT)) for order in mine["orders"])
    by = [mine["accuracy"] - theirs["accuracy"] for mine, theirs in zip(ours, own, strict=True)]
    error = statistics.stdev(by) / len(by) ** 0.5
    gain = statistics.median(t["epoch_seconds"] / m["epoch_seconds"] for m, t in zip(ours, own, strict=True))
    benchmark.extra_info.update(
        accuracies=[[each["accuracy"] for each in runs] for runs in (own, ours)],
        difference=[statistics.mean(by), error],
        gain_of_two_workers=gain,
        decided={name: decided[name] for name in ("status", "chosen", "why", "tuning_seconds")},
        transforms=type(augmentation()).__module__,
        load=os.getloadavg(),
        torch=torch.__version__,
    )
    print(f"\nimages: accuracy {statistics.mean(by):+.4f} ± {error:.4f} (goal: 0 within twice the error), ", end="")
    print(f"two workers {gain:.2f} times as fast; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    for seed, mine, theirs in zip(SEEDS, ours, own, strict=True):
        print(f"  seed {seed}: {theirs['accuracy']:.4f} -> {mine['accuracy']:.4f}")
    print(f"  {decided['status']} {decided['chosen']} in {decided['tuning_seconds']:.1f} s: {decided['why']}")
    benchmark.pedantic(lambda: None)


# -- a slow disk -----------------------------------------------------------------------------------------------


class Sleeping(Dataset[tuple[Tensor, float]]):
    """Samples that wait, and that each draw a random number."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> tuple[Tensor, float]:
        time.sleep(SAMPLE_SECONDS)
        return torch.full((8,), float(index)), random.random()


def slow_step(model: nn.Module, batch: Any) -> Tensor:
    time.sleep(STEP_SECONDS)
    return model(batch[0]).mean()


def stall_of(loader: Iterable[Any], step: Callable[[Any], object], steps: int) -> tuple[float, list[Any]]:
    """Return the share of time that steps wait for batches, and the batches. The first four steps do not count."""
    waited, taken = 0.0, []
    with contextlib.closing(_endless(loader)) as batches:
        for batch in islice(batches, 4):
            step(batch)
            taken.append(batch)
        begun = time.perf_counter()
        for _ in range(steps):
            asked = time.perf_counter()
            batch = next(batches)
            waited += time.perf_counter() - asked
            step(batch)
            taken.append(batch)
        return waited / (time.perf_counter() - begun), taken


def _endless(loader: Iterable[Any]) -> Iterator[Any]:
    while True:
        yield from loader


def test_a_slow_disk(benchmark: Any) -> None:
    """Measure the stall with samples that wait. Waiting occupies no core, so the goal is a stall near 0."""
    seed_all(0)
    model = nn.Linear(8, 1)
    opt = torch.optim.SGD(model.parameters(), 0.01)
    before, _ = stall_of(DataLoader(Sleeping(), BATCH), lambda batch: slow_step(model, batch), STEPS // 4)
    loader = DataLoader(Sleeping(), BATCH)
    begun = time.perf_counter()
    run = flatout.optimize(model, loader, opt, compute_loss=slow_step, budget=TUNING_SECONDS, expected_steps=10_000)
    seconds = time.perf_counter() - begun
    after, taken = stall_of(run.loader, run.step, STEPS)
    assert [number for batch in taken for number in batch[0][:, 0].tolist()] == list(range(len(taken) * BATCH))
    drawn = [number for batch in taken for number in batch[1].tolist()]
    assert len(set(drawn)) == len(drawn)
    row = run.report.row("workers")
    benchmark.extra_info.update(
        stall=[before, after],
        tuning_seconds=seconds,
        goals={"stall": 0.05, "tuning_seconds": TUNING_SECONDS},
        workers={"status": row.status, "chosen": row.chosen, "why": row.why},
        load=os.getloadavg(),
        torch=torch.__version__,
    )
    print(f"\na slow disk: stall {before:.0%} -> {after:.1%}, tuned in {seconds:.1f} s (goal {TUNING_SECONDS:.0f} s)")
    print(f"  {row.status} {row.chosen}: {row.why}; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    benchmark.pedantic(lambda: None)
