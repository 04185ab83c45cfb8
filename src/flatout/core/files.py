"""Checks of paths that the user gives."""

from __future__ import annotations

from pathlib import Path


def is_special(path: str | Path) -> bool:
    """Return True if ``path`` exists and is not a regular file.

    To open a FIFO can block, and to read a device can take forever.
    """
    path = Path(path)
    return path.exists() and not path.is_file()
