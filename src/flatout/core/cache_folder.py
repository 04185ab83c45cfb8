"""Folder of the user's cache. Other processes and other users cannot disturb its reads and writes."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from pathlib import Path

VARIABLE = "FLATOUT_CACHE"
OFF = "off"
"""Value of ``FLATOUT_CACHE`` that turns the cache off."""

LARGEST = 1 << 20
"""Size of the largest file that is read, in bytes."""


def cache_folder() -> Path | None:
    """Return ``FLATOUT_CACHE``, or else ``$XDG_CACHE_HOME/flatout``, or else ``~/.cache/flatout``.

    Returns:
        The folder. None if ``FLATOUT_CACHE=off``, or if the user has no home directory.
    """
    wanted = os.environ.get(VARIABLE)
    if wanted == OFF:
        return None
    try:
        if wanted:
            return Path(wanted).expanduser()
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flatout"
    except RuntimeError:  # no HOME, and no entry in the list of users
        return None


def read_own(path: Path) -> str | None:
    """Return the text of a regular file of this user, or None for anything else, such as a symbolic link."""
    try:
        # O_NONBLOCK: opening a FIFO does not wait for a writer.
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), encoding="utf-8") as file:
            found = os.fstat(file.fileno())
            is_own = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()
            return file.read() if is_own and found.st_size <= LARGEST else None
    except (OSError, ValueError):
        return None


def make_folder(folder: Path) -> None:
    """Make a folder and its missing parents, each for this user alone. Ignore errors of the file system."""
    with contextlib.suppress(OSError):
        if not folder.is_dir():
            make_folder(folder.parent)
            folder.mkdir(mode=0o700, exist_ok=True)


def write_own(path: Path, text: str) -> None:
    """Write a file that only this user can read. A reader sees the old text or the new text, never a mixture.

    Errors of the file system are ignored, so the text may not be written.
    """
    make_folder(path.parent)
    with contextlib.suppress(OSError):
        descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with open(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise


def is_special(path: str | Path) -> bool:
    """Return True if ``path`` exists and is not a regular file.

    To open a FIFO can block, and to read a device can take forever.
    """
    path = Path(path)
    return path.exists() and not path.is_file()
