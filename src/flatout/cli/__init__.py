"""Command ``flatout``. Each subcommand has one file, and one line in ``COMMANDS``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch

import flatout
from flatout.cli import advise, bench, compare, demo, doctor, monitor, profile, run
from flatout.cli.command import Command, CommandError
from flatout.core.formatting import clean

COMMANDS: tuple[Command, ...] = (
    run.COMMAND,
    advise.COMMAND,
    profile.COMMAND,
    compare.COMMAND,
    monitor.COMMAND,
    demo.COMMAND,
    bench.COMMAND,
    doctor.COMMAND,
)

DESCRIPTION = """\
Makes PyTorch training loops run flat out: every technique is measured on your
model and your data, what pays is kept, what does not is undone, and both are
reported."""

EPILOG = """\
examples:
  flatout run train.py --epochs 3   any training script, unchanged and faster
  flatout advise train.py           what would help, and a diff of the script
  flatout profile train.py          where its time goes
  flatout doctor                    what flatout lacks on this machine
  flatout COMMAND --help            options and examples of a command

environment:
  FLATOUT_BUDGET     seconds of tuning, if the code sets none
  FLATOUT_CACHE      folder of plans; 'off' keeps none
  FLATOUT_PROGRESS   0 shows no progress; 1 shows it in logs, too
  FLATOUT_LOG        info shows each decision on stderr; debug also each pair
  NO_COLOR           no colors, if it is not empty"""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    parser = argparse.ArgumentParser(
        prog="flatout",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    version = f"flatout {flatout.__version__} (torch {torch.__version__}, Python {sys.version.split()[0]})"
    parser.add_argument("--version", action="version", version=version)
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        sub = subparsers.add_parser(
            command.name,
            help=command.help,
            description=command.description,
            epilog=command.epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_arguments(sub)
        sub.set_defaults(command=command)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: arguments without the program's name; None takes the arguments of the process.

    Returns:
        The exit status of the subcommand. A ``CommandError`` prints one line on standard error, and gives its own
        status, 1 by default. An interrupt gives 130.

    Raises:
        SystemExit: argparse cannot read the arguments (status 2), or printed the help or the version (status 0).
        KeyboardInterrupt: ``flatout run`` was interrupted.
    """
    args = build_parser().parse_args(argv)
    try:
        return args.command.run(args)
    except CommandError as error:
        print(f"flatout: {clean(str(error))}", file=sys.stderr)
        return error.status
    except KeyboardInterrupt:
        if args.command.runs_program:
            raise
        print("flatout: interrupted", file=sys.stderr)
        return 130
