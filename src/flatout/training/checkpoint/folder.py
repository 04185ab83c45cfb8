"""Folder with the latest checkpoints of one training, named by step."""

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
    """Folder of checkpoints. Only one training at a time may write to the folder.

    Args:
        path: the folder, which is created if missing. Partial files of a crash are removed.
        keep: number of checkpoints to keep, >= 1.

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
        """Return the path of the checkpoint after ``step`` steps."""
        return self._path / f"step-{step:010d}.pt"

    def newest(self) -> Any:
        """Return the newest state that is readable, or None if there is no checkpoint yet.

        A newer damaged file gives a warning, and is renamed to ``*.damaged``.

        Raises:
            CorruptCheckpointError: every file is damaged. The files are not changed.
        """
        path, state, damaged = _newest_that_is_whole(self._path)
        for each, error in damaged.items():
            each.replace(each.with_suffix(".pt.damaged"))
            warnings.warn(f"{error}: set aside, and {path} is used", RuntimeWarning, stacklevel=5)
        return state

    def prune(self) -> None:
        """Remove all but the newest ``keep`` checkpoints and the newest two damaged files."""
        for path in newest_first(self._path)[self._keep :] + newest_first(self._path, _DAMAGED)[_KEEP_DAMAGED:]:
            path.unlink(missing_ok=True)


def newest_in(folder: str | Path) -> Any:
    """Return ``Folder.newest`` without changing any file. The folder may be missing."""
    return _newest_that_is_whole(Path(folder))[1]


def _newest_that_is_whole(folder: Path) -> tuple[Path | None, Any, dict[Path, Exception]]:
    """Return the newest intact file, its state, and the errors of newer files."""
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
    """Return the checkpoints in a folder, the latest step first. The folder may be missing."""
    there = folder.iterdir() if folder.is_dir() else ()
    found = [(int(match[1]), path) for path in there if (match := name.fullmatch(path.name))]
    return [path for _, path in sorted(found, reverse=True)]
