"""Command ``flatout bench``: races of flatout against torch on this machine."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from flatout.cli.bench_cases import BENCHMARKS, Case
from flatout.cli.command import Command, CommandError, files_of, write
from flatout.core import formatting
from flatout.core.machine import environment_of
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
    tell = lambda line: console.print(line, markup=False, highlight=False, soft_wrap=True)  # noqa: E731
    write(files, {"json": lambda path: path.write_text(text, encoding="utf-8")}, tell)
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
