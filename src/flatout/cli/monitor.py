"""Command ``flatout monitor``: samples of GPUs, host and processes, live or as JSON lines."""

from __future__ import annotations

import argparse
import os
import queue
import signal
import sys
from collections import deque
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console
from rich.live import Live

from flatout.cli.command import Command, CommandError
from flatout.cli.files import checked
from flatout.monitor import JsonLines, Sample, Sampler
from flatout.monitor.host import exists
from flatout.monitor.sampler import KEPT
from flatout.monitor.view import View

DESCRIPTION = """\
Shows once a second how busy GPUs, tensor cores, memory, CPU and loader workers
are, what slows the clocks down, and which processes use the CPU. Watches from
outside: the training process needs no change."""

EPILOG = """\
examples:
  flatout monitor                              the whole machine
  flatout monitor --pid 4711                   one training run with its workers
  flatout monitor --pid 4711 --json run.jsonl  and a line per sample to keep
  flatout monitor --once                       one look, for scripts

Ctrl-C ends it. Needs nvidia-ml-py and psutil: pip install 'flatout[monitor]'."""

_FIRST_INTERVAL = 0.2  # seconds between the two samples of --once, because rates require two samples


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``flatout monitor``."""
    parser.add_argument("--pid", type=int, help="watch this process and its workers (default: the whole machine)")
    parser.add_argument(
        "--interval", type=_seconds, default=1.0, metavar="SECONDS", help="from sample to sample (default: 1)"
    )
    parser.add_argument("--json", metavar="FILE", help="add a JSON line per sample to a file; - is standard output")
    parser.add_argument(
        "--dcgm", action="store_true", help="ask DCGM about tensor cores before Hopper; profilers fail meanwhile"
    )
    parser.add_argument("--once", action="store_true", help="take one sample and end")


def run(args: argparse.Namespace) -> int:
    """Run ``flatout monitor``."""
    if args.pid is not None and not exists(args.pid):
        raise CommandError(f"--pid must be a process that runs; there is none with number {args.pid}")
    arrived: queue.SimpleQueue[Sample] = queue.SimpleQueue()
    try:
        with ExitStack() as stack:
            lines = stack.enter_context(_open(args.json)) if args.json else None
            sampler = Sampler(
                arrived.put,
                interval=min(args.interval, _FIRST_INTERVAL) if args.once else args.interval,
                pid="all" if args.pid is None else args.pid,
                dcgm=args.dcgm,
            )
            stack.enter_context(sampler)
            show = _Screen(live=not args.once) if args.json != "-" else None
            if show is not None:
                stack.enter_context(show)
            return _follow(arrived, lines, show, once=args.once)
    except BrokenPipeError:  # the reader of the output has closed the pipe, which is no error of this command
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        raise CommandError(f"cannot write {args.json or 'the view'}: {error.strerror}") from error


def _follow(arrived: queue.SimpleQueue[Sample], lines: JsonLines | None, show: _Screen | None, *, once: bool) -> int:
    """Write and show samples until the watched process ends. Return the exit status.

    With ``once``, write and show only the second sample, which has rates.
    """
    if once:
        first = arrived.get()
        sample = first if first.pid_ended else arrived.get()
    while True:
        sample = sample if once else arrived.get()
        if lines is not None:
            lines(sample)
        if show is not None:
            show(sample)
        if once or sample.pid_ended:
            return 0


class _Output(Console):
    """Console on standard output. A closed pipe raises ``BrokenPipeError``, as for JSON lines."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


class _Screen:
    """Screen that shows each sample. A terminal redraws the view. Other outputs get the views one below the other."""

    def __init__(self, *, live: bool) -> None:
        self._samples: deque[Sample] = deque(maxlen=KEPT)
        self._console = _Output()
        wanted = live and self._console.is_terminal and not self._console.is_dumb_terminal
        self._live = Live(console=self._console, auto_refresh=False, vertical_overflow="crop") if wanted else None

    def __enter__(self) -> _Screen:
        if self._live is not None:
            self._before = signal.signal(signal.SIGTERM, _exit)
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.stop()
            signal.signal(signal.SIGTERM, self._before)

    def __call__(self, sample: Sample) -> None:
        self._samples.append(sample)
        view = View(tuple(self._samples))
        if self._live is not None:
            self._live.update(view, refresh=True)
        else:
            self._console.print(view)


def _exit(number: int, frame: object) -> None:
    """End the command by ``SystemExit`` after a signal, so that the terminal shows its cursor again."""
    raise SystemExit(128 + number)


def _open(file: str) -> JsonLines:
    if file == "-":
        return JsonLines(sys.stdout)
    return JsonLines(checked("json", Path(file)))


def _seconds(text: str) -> float:
    value = float(text)
    if not 0.05 <= value <= 3600:
        raise argparse.ArgumentTypeError(f"must be from 0.05 to 3600, got {text}")
    return value


_seconds.__name__ = "number"  # argparse: "invalid number value: 'x'"

COMMAND = Command(
    name="monitor",
    help="show live what GPUs, host and processes do",
    description=DESCRIPTION,
    epilog=EPILOG,
    add_arguments=add_arguments,
    run=run,
)
