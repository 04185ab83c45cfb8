"""Comparison of the data path with its peers: tensors in memory, the start of an epoch, and resuming within an epoch.

    pytest benchmarks/data_path.py -s --full

In every case, all candidates take turns of whole epochs in one process, so that noise of the machine affects all
equally. Ratios are medians over rounds. The time begins at ``iter``, so an epoch includes the drawing of the
permutation. torchdata and SPDL take part if they are installed. They gather one batch at a time, as flatout does.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from support.scale import scaled
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

from flatout.data import InMemoryLoader, Prefetcher

ROUNDS = scaled(7, 2)
SECONDS = scaled(0.3, 0.05)  # minimum for one candidate in one round; epochs are repeated until then

CASES = {
    # name: (row shape, dtype, samples, batch size, goals: times the best DataLoader, times index_select)
    "f32_32": ((32,), torch.float32, 200_000, 1024, 30, 0.95),
    "u8_3x32x32": ((3, 32, 32), torch.uint8, 50_000, 256, 12, 0.95),
    "u8_3x224x224": ((3, 224, 224), torch.uint8, 3_000, 128, 1.65, 0.95),
}


class BareIndexSelect:
    """Loader in plain torch without a DataLoader: one permutation, and one index_select per tensor and batch."""

    def __init__(self, dataset: TensorDataset, batch_size: int) -> None:
        self.dataset = dataset
        self.batch_size = batch_size

    def __iter__(self) -> Iterator[list[torch.Tensor]]:
        order = torch.randperm(len(self.dataset))
        for start in range(0, len(self.dataset), self.batch_size):
            rows = order[start : start + self.batch_size]
            yield [tensor.index_select(0, rows) for tensor in self.dataset.tensors]


class OneThread:
    """Loader without torch's intra-op threads. Under load, their barriers can cost more than the threads gain."""

    def __init__(self, loader: Iterable) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            yield from self.loader
        finally:
            torch.set_num_threads(threads)


def gathered(dataset: TensorDataset, indices: list[int]) -> list[torch.Tensor]:
    rows = torch.tensor(indices)
    return [tensor.index_select(0, rows) for tensor in dataset.tensors]


class Nodes:
    """Loader of torchdata: two threads gather batches of indices."""

    def __init__(self, dataset: TensorDataset, batch_size: int) -> None:
        from torchdata.nodes import Loader, ParallelMapper, SamplerWrapper

        batches = SamplerWrapper(BatchSampler(RandomSampler(dataset), batch_size, drop_last=False))
        mapper = ParallelMapper(batches, lambda indices: gathered(dataset, indices), num_workers=2, method="thread")
        self.loader = Loader(mapper)

    def __iter__(self) -> Iterator[list[torch.Tensor]]:
        return iter(self.loader)


class Spdl:
    """Loader of SPDL: a pipeline of two threads, whose source is the batches of one permutation."""

    def __init__(self, dataset: TensorDataset, batch_size: int) -> None:
        self.dataset = dataset
        self.batch_size = batch_size

    def __iter__(self) -> Iterator[list[torch.Tensor]]:
        from spdl.pipeline import PipelineBuilder

        def gather(rows: torch.Tensor) -> list[torch.Tensor]:
            return [tensor.index_select(0, rows) for tensor in self.dataset.tensors]

        batches = torch.randperm(len(self.dataset)).split(self.batch_size)
        pipeline = PipelineBuilder().add_source(batches).pipe(gather, concurrency=2).add_sink(4).build(num_threads=2)
        with pipeline.auto_stop():
            yield from pipeline


def candidates(dataset: TensorDataset, batch_size: int) -> dict[str, Iterable]:
    workers = {"shuffle": True, "persistent_workers": True}
    plain = DataLoader(dataset, batch_size, shuffle=True)
    batches = BatchSampler(RandomSampler(dataset), batch_size, drop_last=False)
    peers: dict[str, Iterable] = {
        "flatout": InMemoryLoader(plain),
        "DataLoader nw=0": plain,
        "DataLoader nw=0, 1 thread": OneThread(plain),
        "DataLoader nw=1": DataLoader(dataset, batch_size, num_workers=1, **workers),
        "DataLoader nw=2": DataLoader(dataset, batch_size, num_workers=2, prefetch_factor=4, **workers),
        "rewritten: batches for samples": DataLoader(dataset, batch_size=None, sampler=batches),
        "index_select": BareIndexSelect(dataset, batch_size),
        "index_select, 1 thread": OneThread(BareIndexSelect(dataset, batch_size)),
    }
    if importlib.util.find_spec("torchdata"):
        peers["torchdata nodes"] = Nodes(dataset, batch_size)
    if importlib.util.find_spec("spdl"):
        peers["SPDL"] = Spdl(dataset, batch_size)
    return peers


def samples_per_second(loader: Iterable) -> float:
    """Return the rate over whole epochs that together take `SECONDS`, from ``iter`` on."""
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


@pytest.mark.parametrize("case", scaled(list(CASES), ["u8_3x32x32"]))
def test_epochs(benchmark, case):
    shape, dtype, samples, batch_size, *goals = CASES[case]
    data = torch.empty(samples, *shape, dtype=torch.uint8).random_()
    dataset = TensorDataset(data.to(dtype) if dtype.is_floating_point else data, torch.arange(samples))
    tried = candidates(dataset, batch_size)
    rates: dict[str, list[float]] = {name: [] for name in tried}
    for loader in tried.values():  # warm up: start workers, make buffers
        for _ in loader:
            pass
    for _ in range(ROUNDS):
        for name, loader in random.sample(list(tried.items()), len(tried)):  # no fixed order
            rates[name].append(samples_per_second(loader))
    dataloader, bare = best_of(rates, "DataLoader"), best_of(rates, "index_select")
    ratios = ratio(rates, dataloader), ratio(rates, bare)
    benchmark.extra_info.update(
        samples_per_second={name: round(statistics.median(each)) for name, each in rates.items()},
        best_dataloader=dataloader,
        ratio_to_best_dataloader=round(ratios[0], 2),
        ratio_to_index_select=round(ratios[1], 2),
        goals=goals,
        load=os.getloadavg(),
        torch=torch.__version__,
    )
    row_bytes = data[0].numel() * dtype.itemsize
    print(f"\n{case}, batch {batch_size}: {ratios[0]:.2f}x {dataloader} (goal {goals[0]}), ", end="")
    print(f"{ratios[1]:.2f}x {bare} (goal {goals[1]}); load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    for name, each in rates.items():
        rate = statistics.median(each)
        print(f"  {name:31} {rate:12,.0f} samples/s  {rate * row_bytes / 1e9:6.2f} GB/s")
    loader = tried["flatout"]
    benchmark.pedantic(lambda: sum(1 for _ in loader), rounds=3)  # one epoch


def interleaved(tried: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Return the median seconds of each function. The functions take turns.

    An untimed run precedes each timed run. After a peer's fork, the next write to each page of this process copies the
    page. The untimed run keeps this cost out of the times of the other candidates.
    """
    seconds: dict[str, list[float]] = {name: [] for name in tried}
    for _ in range(rounds):
        for name, run in tried.items():
            run()
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
            gc.collect()
    return {name: statistics.median(each) for name, each in seconds.items()}


def report(benchmark, title: str, medians: dict[str, float], ours: str, theirs: str, goal: str) -> None:
    factor = medians[theirs] / medians[ours]
    benchmark.extra_info.update(seconds=medians, ratio=round(factor, 2), goal=goal, load=os.getloadavg())
    print(f"\n{title}: {ours} takes 1/{factor:.0f} of {theirs} (goal: {goal})")
    for name, each in medians.items():
        print(f"  {name:31} {1e3 * each:10.3f} ms")


def images() -> TensorDataset:
    """Return 50,000 images of 3x32x32 bytes, in memory that has been written to."""
    return TensorDataset(torch.empty(50_000, 3, 32, 32, dtype=torch.uint8).random_(), torch.arange(50_000))


def test_first_batch(benchmark):
    """Measure the time from ``iter`` to the first batch, with the shutdown of everything that was started for it."""
    dataset = images()
    plain = DataLoader(dataset, 256, shuffle=True)
    forked = DataLoader(dataset, 256, shuffle=True, num_workers=2, multiprocessing_context="fork")
    tried = {"flatout": InMemoryLoader(plain), "DataLoader nw=0": plain, "DataLoader nw=2, forked": forked}
    medians = interleaved({name: lambda each=each: next(iter(each)) for name, each in tried.items()}, scaled(15, 2))
    report(benchmark, "first batch", medians, "flatout", "DataLoader nw=2, forked", "1/50")
    benchmark.pedantic(lambda: next(iter(tried["flatout"])), rounds=10)


def test_restart(benchmark):
    """Measure the time to the first batch of a later epoch, when persistent workers are running already."""
    dataset = images()
    workers = DataLoader(dataset, 5_000, shuffle=True, num_workers=2, persistent_workers=True)
    ours = InMemoryLoader(DataLoader(dataset, 5_000, shuffle=True))

    def restart(loader: Iterable) -> float:
        """Return the seconds to the first batch, and read the epoch to its end."""
        begin = time.perf_counter()
        batches = iter(loader)
        next(batches)
        seconds = time.perf_counter() - begin
        for _ in batches:
            pass
        return seconds

    seconds: dict[str, list[float]] = {"flatout": [], "persistent workers": []}
    for _ in range(scaled(8, 2)):
        seconds["flatout"].append(restart(ours))
        seconds["persistent workers"].append(restart(workers))
    medians = {name: statistics.median(each[1:]) for name, each in seconds.items()}
    report(benchmark, "first batch of a later epoch", medians, "flatout", "persistent workers", "1/10")
    benchmark.pedantic(lambda: restart(ours), rounds=3)


def test_resume(benchmark):
    """Measure the time to resume halfway through a million samples: load the state, and read the next batch."""
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    samples, batch_size = 1_000_000, 1000
    dataset = TensorDataset(torch.arange(samples))
    make: dict[str, Callable[[], Any]] = {
        "flatout, in memory": lambda: InMemoryLoader(DataLoader(dataset, batch_size, shuffle=True)),
        "flatout, DataLoader": lambda: Prefetcher(DataLoader(dataset, batch_size, shuffle=True), "cpu"),
        "StatefulDataLoader": lambda: stateful(dataset, batch_size, shuffle=True),
    }
    saved = {}
    for name, new in make.items():
        loader = new()
        for number, _ in enumerate(loader, 1):
            if number == samples // batch_size // 2:
                break
        saved[name] = loader.state_dict()

    def go_on(name: str) -> None:
        loader = make[name]()
        loader.load_state_dict(saved[name])
        next(iter(loader))

    medians = interleaved({name: lambda name=name: go_on(name) for name in make}, scaled(7, 2))
    report(benchmark, "going on half way", medians, "flatout, DataLoader", "StatefulDataLoader", "1/10")
    benchmark.pedantic(lambda: go_on("flatout, DataLoader"), rounds=3)
