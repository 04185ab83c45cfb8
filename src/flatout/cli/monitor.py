"""Command ``flatout monitor``: live table of the GPUs, and JSON lines."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from contextlib import ExitStack
from pathlib import Path

from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from flatout.cli.command import Command, CommandError, checked, wrote
from flatout.core.formatting import size_of, visible
from flatout.monitor import JsonLines, Sample, Sampler
from flatout.monitor.sampler import Writer

DESCRIPTION = """\
Shows utilization, memory, power, clocks and temperature of each GPU, once a
second. On Hopper and later, also shows the activity of the tensor cores."""

EPILOG = """\
examples:
  flatout monitor                           a live table of the GPUs
  flatout monitor --once                    one table, for scripts
  flatout monitor --json run.jsonl          the table, and a line per sample
  flatout monitor --json - --interval 0.1   lines alone, on standard output

CUDA_VISIBLE_DEVICES selects the GPUs. Ctrl-C ends the command. The command
requires an NVIDIA GPU and nvidia-ml-py: pip install 'flatout[monitor]'."""

_FIRST_INTERVAL = 0.2  # seconds between the two samples of --once, because activity requires two samples


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``flatout monitor``."""
    parser.add_argument(
        "--interval", type=float, default=1.0, metavar="SECONDS", help="from sample to sample (default: 1)"
    )
    parser.add_argument("--json", metavar="FILE", help="add a JSON line per sample to a file; - is standard output")
    parser.add_argument("--once", action="store_true", help="take one sample and end")


def run(args: argparse.Namespace) -> int:
    """Run ``flatout monitor`` until Ctrl-C or SIGTERM."""
    try:
        sampler = Sampler(interval=args.interval)
    except ValueError as error:
        raise CommandError(f"--{error}") from error
    try:
        with ExitStack() as stack:
            stack.callback(sampler.close)
            # Without a handler, SIGTERM would leave the terminal without a cursor.
            stack.callback(signal.signal, signal.SIGTERM, signal.signal(signal.SIGTERM, signal.default_int_handler))
            sample = sampler.take()
            if sample.no_gpu is not None:
                raise CommandError(f"flatout monitor requires an NVIDIA GPU: {sample.no_gpu}")
            writers = _writers(args.json, stack)
            if args.once:
                time.sleep(_FIRST_INTERVAL)
                sample = sampler.take()
            while True:
                for write in writers:
                    write(sample)
                if args.once:
                    return 0
                time.sleep(args.interval)
                sample = sampler.take()
    except BrokenPipeError:  # the reader of the output has closed the pipe, which is no error of this command
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        raise CommandError(f"cannot write {args.json or 'the table'}: {error.strerror}") from error


def _writers(file: str | None, stack: ExitStack) -> list[Writer]:
    """Return the functions that show and write a sample. ``stack`` closes them."""
    if file == "-":
        return [JsonLines(sys.stdout)]
    path = None if file is None else checked("json", Path(file))
    if path is not None:
        stack.push(lambda kind, *_: print(wrote("json", path)) if kind in (None, KeyboardInterrupt) else None)
    console = Console()
    writers: list[Writer] = [lambda sample: console.print(table(sample))]
    if console.is_terminal and not console.is_dumb_terminal:
        live = stack.enter_context(Live(console=console, auto_refresh=False))
        writers = [lambda sample: live.update(table(sample), refresh=True)]
    if path is not None:
        writers.append(stack.enter_context(JsonLines(path)))
    return writers


def table(sample: Sample) -> Table:
    """Return a table with one row per GPU. A value that could not be read is a dash."""
    reasons = [f"tensor cores: {gpu.gpm}" for gpu in sample.gpus if gpu.tensor_active_percent is None]
    caption = "\n".join(dict.fromkeys([sample.no_gpu] if sample.no_gpu else reasons))
    found = Table(box=box.SIMPLE_HEAD, caption=Text(visible(caption)), caption_justify="left", padding=(0, 1, 0, 0))
    for name in ("GPU", "util", "tensor", "memory", "power", "SM clock", "temp", "clocks lowered by"):
        found.add_column(name, overflow="fold")
    for gpu in sample.gpus:
        number = f"GPU {gpu.index}" if gpu.cuda_index is None else f"cuda:{gpu.cuda_index}"
        memory = gpu.memory_used_bytes, gpu.memory_total_bytes
        cells = (
            f"{number} {gpu.name or gpu.uuid or ''}",
            _figure(gpu.util_percent, "%"),
            _figure(gpu.tensor_active_percent, "%"),
            " of ".join(size_of(size) for size in memory if size is not None) or "-",
            _figure(gpu.power_watts, "W", gpu.power_limit_watts),
            _figure(gpu.sm_clock_mhz, "MHz"),
            _figure(gpu.temperature_celsius, "C"),
            gpu.missing.get("handle") or ", ".join(gpu.throttle or ()),
        )
        found.add_row(*(Text(visible(cell)) for cell in cells))
    return found


def _figure(value: float | None, unit: str, limit: float | None = None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}{'' if limit is None else f' of {limit:.0f}'} {unit}"


COMMAND = Command(
    name="monitor",
    help="show live what the GPUs do",
    description=DESCRIPTION,
    epilog=EPILOG,
    add_arguments=add_arguments,
    run=run,
)
