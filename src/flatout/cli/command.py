"""Data class of a subcommand, and the error that subcommands raise."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass


class CommandError(Exception):
    """Error that the user can correct. The command line shows one line, without a traceback.

    Args:
        message: line for the user.
        status: exit status of the command.
    """

    def __init__(self, message: str, status: int = 1) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Command:
    """Subcommand of ``flatout``.

    Attributes:
        name: name on the command line.
        help: one line for ``flatout --help``.
        description: first text of ``flatout NAME --help``.
        epilog: last text of ``flatout NAME --help``.
        add_arguments: declares the arguments.
        run: does the work and returns the exit status.
        runs_program: True if a ``KeyboardInterrupt`` of ``run`` propagates, as in the user's program without flatout.
    """

    name: str
    help: str
    description: str
    epilog: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    runs_program: bool = False
