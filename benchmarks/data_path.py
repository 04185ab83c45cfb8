"""Shuffled tensors in memory: InMemoryLoader beside DataLoader's best setting and torch's bare index_select.

    python -m pytest benchmarks/data_path.py --benchmark-json=benchmarks/results/data_path.json -s

Every case interleaves its candidates in one process, whole epochs by turns, so that a noisy machine hits all
alike; the ratios are medians over rounds. Time counts from ``iter``: drawing the permutation is part of an
epoch.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterable, Iterator

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from flatout.data import InMemoryLoader

ROUNDS = 5
SECONDS = 0.3  # of one candidate in one round, at least: epochs are repeated until then

CASES = {
    # name: (row shape, dtype, samples, batch size)
    "f32_32": ((32,), torch.float32, 200_000, 1024),
    "u8_3x32x32": ((3, 32, 32), torch.uint8, 50_000, 256),
    "u8_3x224x224": ((3, 224, 224), torch.uint8, 3_000, 128),
}


class BareIndexSelect:
    """What torch can do without a DataLoader: one permutation, one index_select per tensor and batch."""

    def __init__(self, dataset: TensorDataset, batch_size: int) -> None:
        self.dataset = dataset
        self.batch_size = batch_size

    def __iter__(self) -> Iterator[list[torch.Tensor]]:
        order = torch.randperm(len(self.dataset))
        for start in range(0, len(self.dataset), self.batch_size):
            rows = order[start : start + self.batch_size]
            yield [tensor.index_select(0, rows) for tensor in self.dataset.tensors]


class OneThread:
    """`loader` with torch's own threads off: under load their barriers can cost more than they bring."""

    def __init__(self, loader: Iterable) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            yield from self.loader
        finally:
            torch.set_num_threads(threads)


def candidates(dataset: TensorDataset, batch_size: int) -> dict[str, Iterable]:
    workers = {"shuffle": True, "persistent_workers": True}
    plain = DataLoader(dataset, batch_size, shuffle=True)
    return {
        "flatout": InMemoryLoader(plain),
        "DataLoader nw=0": plain,
        "DataLoader nw=0, 1 thread": OneThread(plain),
        "DataLoader nw=1": DataLoader(dataset, batch_size, num_workers=1, **workers),
        "DataLoader nw=2": DataLoader(dataset, batch_size, num_workers=2, prefetch_factor=4, **workers),
        "index_select": BareIndexSelect(dataset, batch_size),
        "index_select, 1 thread": OneThread(BareIndexSelect(dataset, batch_size)),
    }


def samples_per_second(loader: Iterable) -> float:
    """Rate over whole epochs that together take `SECONDS`, from ``iter`` on."""
    seen, start = 0, time.perf_counter()
    while True:
        for batch in loader:
            seen += batch[1].shape[0]
        elapsed = time.perf_counter() - start
        if elapsed > SECONDS:
            return seen / elapsed


def best_of(rates: dict[str, list[float]], prefix: str) -> str:
    return max((name for name in rates if name.startswith(prefix)), key=lambda name: statistics.median(rates[name]))


def ratio(rates: dict[str, list[float]], name: str) -> float:
    return statistics.median(ours / theirs for ours, theirs in zip(rates["flatout"], rates[name], strict=True))


@pytest.mark.parametrize("case", CASES)
def test_data_path(benchmark, case):
    shape, dtype, samples, batch_size = CASES[case]
    data = torch.empty(samples, *shape, dtype=torch.uint8).random_()
    dataset = TensorDataset(data.to(dtype) if dtype.is_floating_point else data, torch.arange(samples))
    tried = candidates(dataset, batch_size)
    rates: dict[str, list[float]] = {name: [] for name in tried}
    for loader in tried.values():  # warm up: workers started, buffers made
        next(iter(loader))
    for _ in range(ROUNDS):
        for name, loader in tried.items():
            rates[name].append(samples_per_second(loader))
    dataloader, bare = best_of(rates, "DataLoader"), best_of(rates, "index_select")
    benchmark.extra_info.update(
        samples_per_second={name: round(statistics.median(each)) for name, each in rates.items()},
        best_dataloader=dataloader,
        ratio_to_best_dataloader=round(ratio(rates, dataloader), 2),
        ratio_to_index_select=round(ratio(rates, bare), 2),
        cores=os.cpu_count(),
        load=os.getloadavg(),
        torch=torch.__version__,
    )
    row_bytes = data[0].numel() * dtype.itemsize
    print(f"\n{case}, batch {batch_size}: {ratio(rates, dataloader):.2f}x {dataloader}, ", end="")
    print(f"{ratio(rates, bare):.2f}x {bare}; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    for name, each in rates.items():
        rate = statistics.median(each)
        print(f"  {name:26} {rate:12,.0f} samples/s  {rate * row_bytes / 1e9:6.2f} GB/s")
    loader = tried["flatout"]
    benchmark.pedantic(lambda: sum(1 for _ in loader), rounds=3)  # one epoch
