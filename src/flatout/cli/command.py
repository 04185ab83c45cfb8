"""What a subcommand is."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass


class CommandError(Exception):
    """Something a user can put right; shown as one line, without a traceback.

    Args:
        message: the line.
        status: exit status of the command.
    """

    def __init__(self, message: str, status: int = 1) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Command:
    """A subcommand of ``flatout``.

    Attributes:
        name: what the user types.
        help: one line for ``flatout --help``.
        description: what ``flatout NAME --help`` begins with.
        epilog: what it ends with.
        add_arguments: declares the arguments.
        run: does the work and returns the exit status.
        runs_program: True if exceptions of ``run`` are those of the user's program, and pass as they are.
    """

    name: str
    help: str
    description: str
    epilog: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    runs_program: bool = False
