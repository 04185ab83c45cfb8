"""Data path on a CUDA GPU: copies to the device, a ResNet-50 with data in memory, and data on the device.

    pytest benchmarks/data_path_gpu.py -s --full

Loaders take turns inside one long epoch of each, so the start of an epoch is not timed. This benchmark has run only
beside other work, so no figure comes from it. Goals:

- Copies reach 0.95 of the rate of copies from pinned memory alone.
- Steps of a ResNet-50 wait for at most 1 % of the time. They reach 0.99 of the pace with one batch on the device.
- Images on the device arrive at 100 times the rate of a DataLoader.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from support.goals import Goal
from support.gpu_jobs import Convolutional, resnet
from support.scale import scaled
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from flatout.data import InMemoryLoader, Normalize, Prefetcher

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU: none found")

DEVICE = torch.device("cuda")
ROUNDS = scaled(5, 2)
BATCH = scaled(256, 4)
SIDE = scaled(224, 32)
KEPT = 24
"""Batches in memory. An epoch draws from them more than once."""

COPIES = scaled(200, 3)
"""Batches that a turn copies."""

DATALOADER_COPIES = scaled(40, 3)
"""Batches that a turn of a DataLoader copies. It is slower."""

STEPS = scaled(20, 2)
"""Steps of a turn that trains."""

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

Keep = Callable[[dict[str, Any]], None]


def seconds(work: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def by_turns(tried: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Return the median seconds of each function. The functions take turns, after a turn that is not timed."""
    took: dict[str, list[float]] = {name: [] for name in tried}
    for work in tried.values():
        work()
    for _ in range(ROUNDS):
        for name, work in tried.items():
            took[name].append(seconds(work))
    return {name: statistics.median(each) for name, each in took.items()}


def images(count: int, side: int) -> TensorDataset:
    """Return random images in host memory, which the device draws in a moment."""
    data = torch.randint(256, (count, 3, side, side), dtype=torch.uint8, device=DEVICE)
    return TensorDataset(data.cpu(), torch.randint(0, 1000, (count,)))


def loader_of(dataset: TensorDataset, batches: int, **options: Any) -> DataLoader[Any]:
    """Return a loader of random images whose epoch has ``batches`` batches for each turn, and some more."""
    draws = RandomSampler(dataset, replacement=True, num_samples=BATCH * batches * (ROUNDS + 2))
    return DataLoader(dataset, BATCH, sampler=draws, **options)


def take(batches: Iterator[Any], count: int) -> int:
    return sum(len(batch[0]) for batch in itertools.islice(batches, count))


def test_copies_to_the_device(benchmark: Any, keep: Keep) -> None:
    """Copy batches of images in bytes, and compare with the same bytes from one pinned tensor."""
    dataset = images(BATCH * KEPT, SIDE)
    ours = iter(Prefetcher(InMemoryLoader(loader_of(dataset, COPIES), threads=8), DEVICE, depth=3))
    workers = scaled(8, 2)
    theirs = iter(loader_of(dataset, DATALOADER_COPIES, num_workers=workers, pin_memory=True))
    pinned = torch.empty(BATCH, 3, SIDE, SIDE, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(pinned, device=DEVICE)

    def raw() -> None:
        for _ in range(COPIES):
            target.copy_(pinned, non_blocking=True)

    def torchs_own() -> None:
        for batch, _ in itertools.islice(theirs, DATALOADER_COPIES):
            batch.to(DEVICE, non_blocking=True)

    loader = f"DataLoader, {workers} workers, pinned"
    tried = {"flatout": lambda: take(ours, COPIES), "pinned copies alone": raw, loader: torchs_own}
    medians = by_turns(tried)
    counts = dict.fromkeys(tried, COPIES) | {loader: DATALOADER_COPIES}
    rates = {name: counts[name] * pinned.nbytes / 1e9 / each for name, each in medians.items()}
    share = rates["flatout"] / rates["pinned copies alone"]
    print(f"\ncopies to the device, in batches of {pinned.nbytes / 1e6:.1f} MB")
    for name, rate in rates.items():
        print(f"  {name:31} {rate:6.1f} GB/s")
    print(f"  {Goal('share of pinned copies', share, 0.95)}")
    keep({"gigabytes_per_second": rates, "ratio_to_pinned_copies": share, "goal": 0.95})
    benchmark.pedantic(raw, rounds=3)


def test_resnet50_from_memory(benchmark: Any, keep: Keep) -> None:
    """Train in bf16 and channels_last, from bytes in memory and from one repeated batch."""
    net = resnet(scaled(Convolutional((3, 4, 6, 3), 64, SIDE, BATCH), Convolutional((1, 1, 1, 1), 8, SIDE, BATCH)))
    model = net.to(DEVICE, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9, fused=True)
    loader = InMemoryLoader(loader_of(images(BATCH * KEPT, SIDE), STEPS), threads=8)
    normalize = Normalize(MEAN, STD, dtype=torch.bfloat16)
    batches = iter(Prefetcher(loader, DEVICE, depth=3, transform=normalize))
    kept = next(batches)

    def step(batch: Any) -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = functional.cross_entropy(model(batch[0]), batch[1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def train(batches: Iterable[Any]) -> None:
        for batch in batches:
            step(batch)

    medians = by_turns(
        {
            "from memory": lambda: train(itertools.islice(batches, STEPS)),
            "one batch": lambda: train([kept] * STEPS),
        }
    )
    # The host runs ahead of the device, so only the total time shows how long the device waits.
    stall = 1 - medians["one batch"] / medians["from memory"]
    rate = STEPS * BATCH / medians["from memory"]
    print(f"\nResNet-50 from memory: {rate:,.0f} images/s")
    print(f"  {Goal('pace of one batch on the device', 1 - stall, 0.99, percent=True)}")
    keep({"images_per_second": rate, "seconds": medians, "stall": stall, "goal": 0.01})
    benchmark.pedantic(lambda: step(kept), rounds=3)


def test_data_on_the_device(benchmark: Any, keep: Keep) -> None:
    """Read 50,000 images of 3x32x32 bytes in batches of 256."""
    dataset = images(scaled(50_000, 500), 32)
    plain = DataLoader(dataset, 256, shuffle=True)
    resident = InMemoryLoader(plain, device=DEVICE)

    def drain(batches: Iterable[tuple[Tensor, Tensor]]) -> int:
        return sum(len(batch.to(DEVICE)) for batch, _ in batches)

    medians = by_turns({"flatout": lambda: drain(resident), "DataLoader": lambda: drain(plain)})
    ratio = medians["DataLoader"] / medians["flatout"]
    print(f"\ndata on the device: {len(dataset) / medians['flatout']:,.0f} images/s")
    print(f"  {Goal('times a DataLoader', ratio, 100)}")
    keep({"seconds": medians, "ratio": ratio, "goal": 100})
    benchmark.pedantic(lambda: drain(resident), rounds=3)
