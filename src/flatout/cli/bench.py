"""Command ``flatout bench``: races of flatout against torch on this machine."""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import flatout
import flatout.amp
import flatout.optim
from flatout.cli.command import Command, CommandError, files_of, write
from flatout.core import formatting
from flatout.core.machine import environment_of
from flatout.core.snapshot import Snapshot
from flatout.data import InMemoryLoader
from flatout.testing import PairedRace

DESCRIPTION = """\
Races flatout against torch on this machine. Both sides take turns, so that a
machine that slows down slows both. Each ratio has its 95 % interval.

  update   unscale, clip and AdamW, against torch's fused AdamW
  data     an epoch from memory, against DataLoader without and with workers
  step     a perceptron's step after optimize, against plain torch

flatout demo compares whole trainings."""

EPILOG = """\
examples:
  flatout bench                      all three; a few minutes
  flatout bench update data          two of them
  flatout bench step --json step.json"""

TITLES = ("benchmark", "work", "against", "its time", "flatout", "speed")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``flatout bench``."""
    parser.add_argument("names", nargs="*", metavar="BENCHMARK", help=f"{', '.join(BENCHMARKS)} (default: all)")
    parser.add_argument("--seconds", type=_positive, default=10.0, help="time limit of each race (default: 10)")
    parser.add_argument("--budget", type=_positive, default=30.0, help="time limit of each tuning (default: 30)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures as JSON")


def run(args: argparse.Namespace) -> int:
    """Run ``flatout bench``."""
    files = files_of(args)
    unknown = [name for name in args.names if name not in BENCHMARKS]
    if unknown:
        raise CommandError(f"BENCHMARK must be one of {', '.join(BENCHMARKS)}, got {unknown[0]}", 2)
    console = Console()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    results = []
    for name in args.names or BENCHMARKS:
        with console.status(f"{name} …"):
            results += list(_measured(name, device, args))
    environment = environment_of(device)
    console.print(_table(results))
    console.print(formatting.clean(", ".join(f"{key} {value}" for key, value in environment.items())), style="dim")
    text = json.dumps({"environment": environment, "results": results}, indent=1) + "\n"
    write(files, {"json": lambda path: path.write_text(text, encoding="utf-8")})
    return 0


def _measured(name: str, device: torch.device, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for case in BENCHMARKS[name](device, args.budget):
        race = PairedRace(case.before, case.after, seconds=args.seconds)
        gain = race.measure()
        before, after = (statistics.median(side) for side in zip(*race.block_seconds, strict=True))
        yield {
            "benchmark": name,
            **_texts(case),
            "seconds": {"against": before, "flatout": after},
            "speed": gain.ratio,
            "interval": gain.interval,
            "pairs": race.pairs,
        }


def _texts(case: Case) -> dict[str, str]:
    return {"work": case.work, "against": case.peer, "note": case.note}


def _table(results: list[dict[str, Any]]) -> Table:
    table = Table(*TITLES, box=None, pad_edge=False, header_style="bold")
    for each in results:
        seconds, interval = each["seconds"], each["interval"]
        ends = f" ({interval[0]:.2f} to {interval[1]:.2f})" if interval else ""
        times = (f"{1e3 * seconds[side]:,.1f} ms" for side in ("against", "flatout"))
        table.add_row(each["benchmark"], each["work"], each["against"], *times, f"{each['speed']:.2f}×{ends}")
        if each["note"]:
            table.add_row("", f"[dim]{each['note']}[/dim]")
    return table


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be > 0, got {text}")
    return value


_positive.__name__ = "number"  # argparse: "invalid number value: 'x'"

COMMAND = Command(
    name="bench",
    help="race flatout against torch on this machine: update, data, step",
    description=DESCRIPTION,
    epilog=EPILOG,
    add_arguments=add_arguments,
    run=run,
)


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
