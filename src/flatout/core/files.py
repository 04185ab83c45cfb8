"""Checks of paths that the user gives."""

from __future__ import annotations

from pathlib import Path


def is_special(path: str | Path) -> bool:
    """Return whether ``path`` exists and is not a regular file: opening a FIFO blocks, a device may have no end."""
    path = Path(path)
    return path.exists() and not path.is_file()
