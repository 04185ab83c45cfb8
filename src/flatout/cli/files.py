"""Files that commands write: ``--html FILE``, ``--json FILE`` and others, with one check and one message."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from flatout.cli.command import CommandError
from flatout.core.formatting import clean

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
    files: Mapping[str, Path], writers: Mapping[str, Callable[[Path], object]], tell: Callable[[str], object]
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
        tell(f"wrote {clean(str(path))}: {CONTENTS[option]}")
