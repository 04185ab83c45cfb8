"""Command ``flatout advise``: causes that slow a training script down, and gains of the remedies."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from rich.console import Console

from flatout.advise.advice import Advice
from flatout.advise.session import AdviceSession
from flatout.cli.command import Command, add_program, files_of, program_of, write
from flatout.cli.run import add_choices, options_of

DESCRIPTION = """\
Runs some steps of a training script, and ends it. Shows the four boxes of the
checklist, what slows the script down by file and line, what would help by how
much, and a diff of the script. No file of the script is changed."""

EPILOG = """\
examples:
  flatout advise train.py --epochs 3          flatout's options come first
  flatout advise -m package.train --lr 0.1    a module, as for python -m
  flatout advise --seconds 20 train.py        with less time for trials
  flatout advise --json advice.json train.py  and all figures as JSON
  flatout advise --diff my.diff train.py      and the diff, for `git apply`

The script is ended by SystemExit(0) right after an optimizer step, so that its
`finally` blocks and `atexit` functions run. This happens when all techniques
are tried and an epoch has passed, or after --seconds. The exit status is 0, or
that of a script that ends earlier. A script that catches the end three times
trains to its own end."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``flatout advise``."""
    parser.add_argument(
        "--seconds", type=_seconds, default=60.0, metavar="N", help="time after the first update (default: 60)"
    )
    add_choices(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures as JSON")
    parser.add_argument("--diff", type=Path, metavar="FILE", help="write the diff, also if it is empty")
    add_program(parser)
    parser.set_defaults(plan="none", deterministic=False, dry_run=True)


def run(args: argparse.Namespace) -> int:
    """Run ``flatout advise``."""
    program, files = program_of(args), files_of(args)  # before the script changes the folder
    folder = Path.cwd() if args.is_module else Path(args.script).resolve().parent
    start = Path.cwd()
    seen, ended = AdviceSession(options_of(args), args.seconds).run(program)
    if isinstance(ended.error, KeyboardInterrupt):
        raise ended.error
    if ended.error is not None:
        sys.excepthook(type(ended.error), ended.error, ended.error.__traceback__)
    os.chdir(start)
    advice = Advice.of(seen, folder)
    Console().print(advice)
    if advice.diff:
        print(f"\nA diff, to be applied by `patch -p1` or `git apply` in {folder}:\n\n{advice.diff}", end="")
    write(files, {"json": advice.to_json, "diff": advice.to_diff})
    return ended.status


def _seconds(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"must be above 0, got {text}")
    return value


_seconds.__name__ = "number"  # argparse: "invalid number value: 'x'"

COMMAND = Command(
    name="advise",
    help="what slows a training script down, by file and line, and what would help",
    description=DESCRIPTION,
    epilog=EPILOG,
    add_arguments=add_arguments,
    run=run,
)
