"""Data class of a subcommand, and the error that subcommands raise."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from flatout.core.formatting import clean
from flatout.core.main_program import MainFile, MainModule, MainProgram


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


CONTENTS = {
    "html": "a page with charts, for a browser",
    "json": "all figures",
    "diff": "changes to the script, for patch -p1 or git apply",
    "trace": "a timeline, for https://ui.perfetto.dev",
}
"""Content of a file, by option."""


def files_of(args: argparse.Namespace, options: Iterable[str] = CONTENTS) -> dict[str, Path]:
    """Return the absolute paths of the files that the options name, by option.

    Raises:
        CommandError: a file cannot be written.
    """
    return {option: checked(option, path) for option in options if (path := getattr(args, option, None)) is not None}


def checked(option: str, path: Path) -> Path:
    """Return the absolute path of an option's file.

    Raises:
        CommandError: ``path`` is a folder, or is in a folder that does not exist.
    """
    if path.is_dir() or not path.absolute().parent.is_dir():
        fault = "is a folder" if path.is_dir() else "is in a folder that does not exist"
        raise CommandError(f"--{option} must be a file that can be written; {path} {fault}")
    return path.absolute()


def write(
    files: Mapping[str, Path], writers: Mapping[str, Callable[[Path], object]], tell: Callable[[str], object] = print
) -> None:
    """Write each file, and show its path and content.

    Args:
        files: result of ``files_of``.
        writers: functions that write to a path, by option.
        tell: shows a line of text.

    Raises:
        CommandError: a file cannot be written.
    """
    for option, path in files.items():
        try:
            writers[option](path)
        except OSError as error:
            raise CommandError(f"cannot write {path}: {error.strerror}") from error
        except ValueError as error:  # a profile without a profiled step has no trace
            raise CommandError(f"cannot write {path}: {error}") from error
        tell(wrote(option, path))


def wrote(option: str, path: Path) -> str:
    """Return the line about a written file."""
    return f"wrote {clean(str(path))}: {CONTENTS[option]}"
