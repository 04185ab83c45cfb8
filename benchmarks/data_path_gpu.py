"""Data path on a CUDA GPU: copies to the device, a ResNet-50 with data in memory, and data on the device.

    pytest benchmarks/data_path_gpu.py -s --full

This benchmark has run only beside other work, so no figure comes from it. Goals:

- Copies reach 0.95 of the rate of copies from pinned memory alone.
- Steps of a ResNet-50 wait for at most 1 % of the time. They reach 0.99 of the pace with one batch on the device.
- Images on the device arrive at 100 times the rate of a DataLoader.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable

import pytest
import torch
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from flatout.data import InMemoryLoader, Normalize, Prefetcher

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU: none found")

DEVICE = torch.device("cuda")
ROUNDS = 5
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def seconds(work: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def by_turns(tried: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Return the median seconds of each function. The functions take turns."""
    took: dict[str, list[float]] = {name: [] for name in tried}
    for work in tried.values():
        work()
    for _ in range(ROUNDS):
        for name, work in tried.items():
            took[name].append(seconds(work))
    return {name: statistics.median(each) for name, each in took.items()}


def drain(loader: Iterable) -> int:
    return sum(len(batch[0]) for batch in loader)


def images(count: int, side: int) -> TensorDataset:
    data = torch.empty(count, 3, side, side, dtype=torch.uint8).random_()
    return TensorDataset(data, torch.randint(0, 1000, (count,)))


def test_copies_to_the_device(benchmark):
    """Copy batches of 256 images of 3x224x224 bytes, and compare with the same bytes from one pinned tensor."""
    batch_size, batches = 256, 24
    dataset = images(batch_size * batches, 224)
    loader = DataLoader(dataset, batch_size, shuffle=True)
    prefetcher = Prefetcher(InMemoryLoader(loader, threads=8), DEVICE, depth=3)
    pinned = torch.empty(batch_size, 3, 224, 224, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(pinned, device=DEVICE)

    def raw() -> None:
        for _ in range(batches):
            target.copy_(pinned, non_blocking=True)

    def torchs_own() -> None:
        workers = DataLoader(dataset, batch_size, shuffle=True, num_workers=8, pin_memory=True)
        for batch, _ in workers:
            batch.to(DEVICE, non_blocking=True)

    tried: dict[str, Callable[[], object]] = {"flatout": lambda: drain(prefetcher), "pinned copies alone": raw}
    medians = by_turns(tried)
    medians["DataLoader, 8 workers, pinned"] = seconds(torchs_own)
    gigabytes = batches * pinned.nbytes / 1e9
    ratio = medians["pinned copies alone"] / medians["flatout"]
    benchmark.extra_info.update(
        gigabytes_per_second={name: gigabytes / each for name, each in medians.items()},
        ratio_to_pinned_copies=ratio,
        goal=0.95,
        device=torch.cuda.get_device_name(),
    )
    print(
        f"\ncopies to the device: {medians['pinned copies alone'] / medians['flatout']:.2f}x pinned copies (goal 0.95)"
    )
    for name, each in medians.items():
        print(f"  {name:31} {gigabytes / each:6.1f} GB/s")
    benchmark.pedantic(lambda: drain(prefetcher), rounds=3)


def test_resnet50_from_memory(benchmark):
    """Train in bf16 and channels_last, from bytes in memory and from one repeated batch."""
    resnet50 = pytest.importorskip("torchvision.models").resnet50
    model = resnet50().to(DEVICE, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9, fused=True)
    loader = InMemoryLoader(DataLoader(images(256 * 20, 224), 256, shuffle=True), threads=8)
    normalize = Normalize(MEAN, STD, dtype=torch.bfloat16)
    prefetcher = Prefetcher(loader, DEVICE, depth=3, transform=normalize)
    kept = next(iter(prefetcher))

    def step(batch) -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = functional.cross_entropy(model(batch[0]), batch[1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def train(batches: Iterable) -> None:
        for batch in batches:
            step(batch)

    tried: dict[str, Callable[[], object]] = {
        "from memory": lambda: train(prefetcher),
        "one batch": lambda: train([kept] * len(loader)),
    }
    medians = by_turns(tried)
    # The host runs ahead of the device, so only the total time shows how long the device waits.
    stall = 1 - medians["one batch"] / medians["from memory"]
    benchmark.extra_info.update(seconds=medians, stall=stall, goal=0.01, device=torch.cuda.get_device_name())
    rate = len(loader) * 256 / medians["from memory"]
    print(f"\nResNet-50 from memory: {rate:,.0f} images/s, stall {stall:.1%} (goal 1 %)")
    benchmark.pedantic(lambda: train(prefetcher), rounds=1)


def test_data_on_the_device(benchmark):
    """Read 50,000 images of 3x32x32 bytes in batches of 256."""
    dataset = images(50_000, 32)
    plain = DataLoader(dataset, 256, shuffle=True)
    resident = InMemoryLoader(plain, device=DEVICE)

    def torchs_own() -> None:
        for batch, _ in plain:
            batch.to(DEVICE)

    medians = by_turns({"flatout": lambda: drain(resident), "DataLoader": torchs_own})
    ratio = medians["DataLoader"] / medians["flatout"]
    benchmark.extra_info.update(seconds=medians, ratio=ratio, goal=100, device=torch.cuda.get_device_name())
    print(f"\ndata on the device: {ratio:.0f}x a DataLoader (goal 100), {50_000 / medians['flatout']:,.0f} images/s")
    benchmark.pedantic(lambda: drain(resident), rounds=3)
