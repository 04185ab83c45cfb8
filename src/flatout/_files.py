"""Paths that a user gives."""

from __future__ import annotations

from pathlib import Path


def is_special(path: str | Path) -> bool:
    """Whether something other than a regular file is there: opening a FIFO waits, and a device may never end."""
    path = Path(path)
    return path.exists() and not path.is_file()
