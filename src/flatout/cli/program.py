"""Arguments of commands that run a training script: ``train.py ARGS`` or ``-m package.train ARGS``."""

from __future__ import annotations

import argparse
from pathlib import Path

from flatout.cli.command import CommandError
from flatout.core.main_program import MainFile, MainModule, MainProgram


def add_program(parser: argparse.ArgumentParser) -> None:
    """Declare the script and its arguments, after all options of the command."""
    parser.add_argument("-m", dest="is_module", action="store_true", help="the script is the name of a module")
    parser.add_argument("script", help="the training script")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="its arguments")


def program_of(args: argparse.Namespace) -> MainProgram:
    """Return the program to run.

    Raises:
        CommandError: the script does not exist.
    """
    if args.is_module:
        return MainModule(args.script, args.args)
    if not Path(args.script).exists():
        raise CommandError(f"there is no script {args.script}")
    return MainFile(args.script, args.args)
