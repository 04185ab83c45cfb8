"""Command ``flatout compare``: comparison of the speeds of two runs, with the changes between the runs."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from rich.console import Console

from flatout.cli.command import Command, CommandError, files_of, write
from flatout.report.comparison import Comparison, compare

DESCRIPTION = """\
Compares the speeds of two runs: whether they surely differ, in which part of a
batch, and what changed between the runs (code, data, versions, machine,
techniques). Reads two reports of run.report.to_json, two of flatout run, or
two profiles of flatout profile --json."""

EPILOG = """\
examples:
  flatout compare old.json new.json
  flatout compare old.json new.json --fail-below 0.95   for CI
  flatout compare old.json new.json --json result.json

The exit status is 0, whether the runs differ or not. It is 1 if --fail-below
is given and b is surely slower, and 2 if an input cannot be used."""

UNUSABLE = 2
"""Exit status for inputs that cannot be compared."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``flatout compare``."""
    parser.add_argument("a", type=Path, help="JSON file of the first run")
    parser.add_argument("b", type=Path, help="JSON file of the second run")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result as JSON")
    parser.add_argument(
        "--fail-below",
        type=_ratio,
        metavar="RATIO",
        help="exit with 1 if the 95 %% interval of b's speed lies below RATIO times a's speed",
    )


def run(args: argparse.Namespace) -> int:
    """Run ``flatout compare``."""
    files, comparison = files_of(args), _compared(args.a, args.b)
    Console(highlight=False).print(comparison)
    write(files, {"json": comparison.to_json})
    return int(args.fail_below is not None and comparison.is_slower_than(args.fail_below))


def _compared(a: Path, b: Path) -> Comparison:
    try:
        return compare(a, b)
    except OSError as error:
        raise CommandError(f"cannot read {error.filename}: {error.strerror}", UNUSABLE) from error
    except ValueError as error:
        raise CommandError(str(error), UNUSABLE) from error


def _ratio(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be > 0, got {text}")
    return value


_ratio.__name__ = "number"  # argparse: "invalid number value: 'x'"

COMMAND = Command(
    name="compare",
    help="whether two runs differ in speed, where, and what changed between them",
    description=DESCRIPTION,
    epilog=EPILOG,
    add_arguments=add_arguments,
    run=run,
)
