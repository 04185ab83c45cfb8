"""Comparison of flatout.data.tune with an exhaustive grid of workers and prefetch_factor, and a starved step.

    pytest benchmarks/tuner.py -s --full

There are three datasets: tensors that cost nothing, a transform that keeps a core busy, and a sleep as for a disk. Each
is loaded without a step, and with a step that leaves the cores idle, as on a GPU. All cells of the grid and the tuned
loader take turns in one process, and their workers persist through all rounds. A turn begins when the queues are in
their steady state.

Ratios are medians over rounds. The best of a dozen cells is also the luckiest one, so even an equal loader gets a ratio
below 1. The tests assert nothing, and print a goal beside each figure. The machine must be quiet. The load is printed.
"""

from __future__ import annotations

import itertools
import os
import statistics
import time
import warnings
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from support.scale import scaled
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import flatout
from flatout.core.machine import usable_cores
from flatout.data import Prefetcher, clone_loader, tune

ROUNDS = scaled(5, 2)
SECONDS = scaled(0.4, 0.1)  # duration of one cell in one round
CORES = usable_cores()


class Transformed(Dataset):
    """Samples that each take about two milliseconds of one core."""

    def __init__(self) -> None:
        self.image = np.random.default_rng(0).random((96, 96))

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> torch.Tensor:
        image = self.image
        for _ in range(12):
            image = np.roll(np.sqrt(np.abs(np.sin(image + index))), 1, axis=0)
        return torch.from_numpy(image.astype(np.float32))


class Waiting(Dataset):
    """Samples that wait, as for a disk or a network."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.seconds)
        return torch.full((16,), float(index))


CASES = {
    # name: (dataset, batch size, seconds of the step, additional numbers of workers in the grid)
    "cheap": (TensorDataset(torch.rand(100_000, 32), torch.arange(100_000)), 64, 0.0, ()),
    "cheap, step 2 ms": (TensorDataset(torch.rand(100_000, 32), torch.arange(100_000)), 64, 0.002, ()),
    "transform": (Transformed(), 8, 0.0, ()),
    "transform, step 20 ms": (Transformed(), 8, 0.02, ()),
    "sleep": (Waiting(0.005), 8, 0.0, (8, 16)),
    "sleep, step 10 ms": (Waiting(0.005), 8, 0.01, (6, 8, 16)),
}


class Cell:
    """One setting of a loader, which runs in turns with the others."""

    def __init__(self, loader: DataLoader, step_time: float) -> None:
        if loader.num_workers:
            loader = clone_loader(loader, persistent_workers=True)
        self.queue = loader.num_workers * (loader.prefetch_factor or 0)
        self.refill = 0.0
        self.rates: list[float] = []
        self._batches: Iterator = itertools.chain.from_iterable(itertools.repeat(loader))
        self._step_time = step_time

    def run(self, rest: float) -> None:
        """Measure batches/s for `SECONDS`, after an untimed part.

        The untimed part empties the queue. It lasts at least ``rest`` seconds, in which other queues fill.
        """
        begin = time.perf_counter()
        for i in itertools.count():
            if i >= self.queue and time.perf_counter() > begin + rest:
                break
            self._step()
        begin = time.perf_counter()
        for done in itertools.count():
            elapsed = time.perf_counter() - begin
            if elapsed > SECONDS and done >= self.queue:
                break
            self._step()
        self.rates.append(done / elapsed)
        self.refill = self.queue * elapsed / done

    def _step(self) -> None:
        next(self._batches)
        if self._step_time:
            time.sleep(self._step_time)


def ratio(ours: Cell, theirs: Cell) -> float:
    return statistics.median(a / b for a, b in zip(ours.rates, theirs.rates, strict=True))


def against(goal: str, met: bool) -> str:
    return f"(goal {goal}: {'met' if met else 'MISSED'})"


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("case", scaled(list(CASES), ["transform, step 20 ms"]))
def test_grid(benchmark: pytest.FixtureRequest, case: str) -> None:
    dataset, batch_size, step_time, more = CASES[case]
    load = os.getloadavg()[0]
    loader = DataLoader(dataset, batch_size, shuffle=True)
    begin = time.perf_counter()
    tuned = tune(loader, step_time)
    took = time.perf_counter() - begin
    cells = {(0, None): Cell(loader, step_time)}
    for workers in sorted({1, 2, CORES, 2 * CORES, *more}):
        for ahead in (2, 4):
            cells[workers, ahead] = Cell(clone_loader(loader, num_workers=workers, prefetch_factor=ahead), step_time)
    ours = Cell(tuned.loader, step_time)
    rest = 0.0
    for _ in range(ROUNDS):
        for cell in (*cells.values(), ours):
            cell.run(rest)
            rest = cell.refill
    medians = {key: statistics.median(cell.rates) for key, cell in cells.items()}
    best = max(medians, key=medians.__getitem__)
    to_best, to_none = ratio(ours, cells[best]), ratio(ours, cells[0, None])
    print(f"\n\n{case}: {CORES} cores, load {load:.1f} before; tuned in {took:.2f} s: {tuned.settings}")
    print(f"  {tuned.reason}")
    print(f"  {to_best:.3f} x the best of the grid {best} {against('0.95', to_best >= 0.95)}")
    print(f"  {to_none:.3f} x no workers {against('1, within noise 0.97', to_none >= 0.97)}")
    if case.startswith("cheap"):
        print(f"  {took:.2f} s {against('3 s', took <= 3.0)}")
    for (workers, ahead), rate in medians.items():
        print(f"  {workers:3d} workers, {ahead or '-'} ahead {rate:10.1f} batches/s")
    print(f"  {'tuned':>20} {statistics.median(ours.rates):10.1f} batches/s")
    benchmark.extra_info.update(  # type: ignore[attr-defined]
        tuned=tuned.settings,
        reason=tuned.reason,
        seconds=round(took, 2),
        ratio_to_best=round(to_best, 3),
        ratio_to_no_workers=round(to_none, 3),
        best=best,
        batches_per_second={f"{workers} x {ahead}": round(rate, 1) for (workers, ahead), rate in medians.items()},
        cores=CORES,
        load=load,
        torch=torch.__version__,
    )
    benchmark.pedantic(ours.run, args=(0.0,), rounds=1)  # type: ignore[attr-defined]


LOADING, COMPUTING = scaled((0.5, 0.1), (0.025, 0.005))
"""Seconds to load a batch, and to compute it."""


class Starved(Dataset):
    """Samples that each take ``LOADING`` seconds to load."""

    def __len__(self) -> int:
        return 2000

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        time.sleep(LOADING)
        return torch.ones(8), 0


def slow_step(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    time.sleep(COMPUTING)
    return model(batch[0]).square().mean()


def test_starved_step(benchmark: pytest.FixtureRequest) -> None:
    """Measure the stall before and after `optimize`, with batches that load five times as long as they compute."""
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    torch.manual_seed(0)
    model, loader = nn.Linear(8, 1), DataLoader(Starved())
    waiting, begin = Prefetcher(loader, "cpu"), time.perf_counter()
    for batch in itertools.islice(waiting, 10):
        slow_step(model, batch)
    before = waiting.stall_seconds / (time.perf_counter() - begin)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    others = ("compile", "precision", "in_memory", "fused_optimizer")
    begin = time.perf_counter()
    forbidden = dict.fromkeys(others, False)
    run = flatout.optimize(model, loader, optimizer, compute_loss=slow_step, techniques=forbidden)
    took = time.perf_counter() - begin
    row = next(row for row in run.report.rows if row.technique == "workers")
    batches = iter(run.loader)
    # The rolling figures cover the last 100 batches, without the start of the workers.
    for batch in itertools.islice(batches, 101):
        run.step(batch)
    after = run.stats.stall_fraction
    assert after is not None
    print(f"\n\nstarved step: stall {before:.1%} {against('83 %', 0.8 < before < 0.86)}")
    print(f"  {row.status}: {row.chosen}, in {took:.0f} s; {row.why}")
    print(f"  then stall {after:.1%} {against('under 5 %', after < 0.05)}")
    benchmark.extra_info.update(  # type: ignore[attr-defined]
        stall_before=round(before, 4),
        stall_after=round(after, 4),
        chosen=row.chosen,
        why=row.why,
        seconds=round(took, 1),
        cores=CORES,
        load=os.getloadavg()[0],
        torch=torch.__version__,
    )
    benchmark.pedantic(lambda: run.step(next(batches)), rounds=5)  # type: ignore[attr-defined]
