"""The checkpoints of one training, by step: the newest that can be read, and no more than are wanted."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

from flatout.training.checkpoint import file

_NAME = re.compile(r"step-(\d+)\.pt")
_DAMAGED = re.compile(r"step-(\d+)\.pt\.damaged")
_KEEP_DAMAGED = 2


class Folder:
    """A folder of checkpoints that one training at a time writes to.

    Args:
        path: is made where it is missing; what a crash left half written in it is removed.
        keep: checkpoints to keep, >= 1.

    Raises:
        ValueError: ``keep`` < 1.
    """

    def __init__(self, path: str | Path, keep: int) -> None:
        if keep < 1:
            raise ValueError(f"keep must be >= 1, got {keep}")
        self._path = Path(path)
        self._keep = keep
        self._path.mkdir(parents=True, exist_ok=True)
        for left in self._path.glob(".step-*.tmp"):
            left.unlink(missing_ok=True)

    def path_of(self, step: int) -> Path:
        """Where the checkpoint behind a step lies."""
        return self._path / f"step-{step:010d}.pt"

    def newest(self) -> Any:
        """The newest state that can be read; None where there has been no checkpoint yet.

        Damaged files that are newer are told of by a warning, and set aside under the name ``*.damaged``.

        Raises:
            CorruptCheckpointError: every file is damaged. They stay as they are.
        """
        path, state, damaged = _newest_that_is_whole(self._path)
        for each, error in damaged.items():
            each.replace(each.with_suffix(".pt.damaged"))
            warnings.warn(f"{error}: set aside, and {path} is used", RuntimeWarning, stacklevel=5)
        return state

    def prune(self) -> None:
        """Remove all but the newest, and all but the newest two of those that were set aside to be looked into."""
        for path in newest_first(self._path)[self._keep :] + newest_first(self._path, _DAMAGED)[_KEEP_DAMAGED:]:
            path.unlink(missing_ok=True)


def newest_in(folder: str | Path) -> Any:
    """As ``Folder.newest``, for who only reads: nothing is changed, and the folder need not be there."""
    return _newest_that_is_whole(Path(folder))[1]


def _newest_that_is_whole(folder: Path) -> tuple[Path | None, Any, dict[Path, Exception]]:
    """The file, what it holds, and what is wrong with those that are newer."""
    damaged: dict[Path, Exception] = {}
    for path in newest_first(folder):
        try:
            return path, file.read(path), damaged
        except (file.CorruptCheckpointError, OSError) as error:
            damaged[path] = error
    if damaged:
        reasons = "; ".join(map(str, damaged.values()))
        raise file.CorruptCheckpointError(f"no checkpoint in {folder} can be read: {reasons}")
    return None, None, damaged


def newest_first(folder: Path, name: re.Pattern[str] = _NAME) -> list[Path]:
    """The checkpoints in a folder, that need not be there, from the last step to the first."""
    there = folder.iterdir() if folder.is_dir() else ()
    found = [(int(match[1]), path) for path in there if (match := name.fullmatch(path.name))]
    return [path for _, path in sorted(found, reverse=True)]
