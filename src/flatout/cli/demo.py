"""Command ``flatout demo``: two jobs on real data, trained with a plain loop and through flatout."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from rich.console import Console

from flatout.cli.command import Command, CommandError
from flatout.cli.demo_jobs.runner import JOBS, run_demo
from flatout.cli.files import files_of, write

DESCRIPTION = """\
Trains two models on real data that needs no download, each twice: as people
first write it, and through flatout.optimize, with the same hyper-parameters,
seed and number of epochs. Shows speed, held-out quality and the report.

  digits   scikit-learn's handwritten digits, a small convolutional network
  gpt      CPython's own reference text, a byte-level GPT"""

EPILOG = """\
examples:
  flatout demo                            both jobs; a few minutes on a laptop
  flatout demo --job digits --quick       a first look
  flatout demo --html demo.html           and a page to keep

On a machine with a GPU the same jobs run larger, there."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``flatout demo``."""
    parser.add_argument("--job", choices=[*JOBS, "all"], default="all", help="which job (default: all)")
    parser.add_argument("--epochs", type=_at_least(1, int), metavar="N", help="epochs of each training")
    parser.add_argument(
        "--budget",
        type=_at_least(0, float),
        metavar="SECONDS",
        help="time per job for measuring (default: 45, with --quick 5; 0 applies rules only)",
    )
    parser.add_argument("--quick", action="store_true", help="very small models and little data: a smoke test")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures and reports as JSON")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write one self-contained page with charts")


def run(args: argparse.Namespace) -> int:
    """Run ``flatout demo``."""
    files = files_of(args)
    names = list(JOBS) if args.job == "all" else [args.job]
    budget = args.budget if args.budget is not None else 5.0 if args.quick else 45.0
    console = Console()
    try:
        result = run_demo(
            names,
            console=console,
            quick=args.quick,
            epochs=args.epochs,
            budget=budget,
            command=_command(args, names, budget),
        )
    except ImportError as error:
        raise CommandError(str(error)) from error
    writers = {
        "html": lambda path: path.write_text(result.to_html(), encoding="utf-8"),
        "json": lambda path: path.write_text(result.to_json(), encoding="utf-8"),
    }
    write(files, writers, lambda line: console.print(line, markup=False, highlight=False, soft_wrap=True))
    return 0


def _command(args: argparse.Namespace, names: list[str], budget: float) -> str:
    """Return the command that repeats the measurements."""
    parts = ["flatout", "demo"]
    parts += ["--job", names[0]] if len(names) == 1 else []
    parts += ["--epochs", str(args.epochs)] if args.epochs else []
    parts += ["--quick"] if args.quick else []
    return shlex.join([*parts, "--budget", f"{budget:g}"])


def _at_least(least: int, kind: type):  # type: ignore[no-untyped-def]
    def number(text: str) -> float:
        value = kind(text)
        if not least <= value < float("inf"):
            raise argparse.ArgumentTypeError(f"must be at least {least}, got {text}")
        return value

    number.__name__ = {int: "whole number", float: "number"}[kind]  # argparse: "invalid whole number value: 'x'"
    return number


COMMAND = Command(
    name="demo",
    help="train two jobs as first written and through flatout, and compare",
    description=DESCRIPTION,
    epilog=EPILOG,
    add_arguments=add_arguments,
    run=run,
)
