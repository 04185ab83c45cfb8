"""Setting ``FLATOUT_PROGRESS``: 0 shows no progress, and 1 shows progress in logs, too."""

from __future__ import annotations

import os

from rich.console import Console

VARIABLE = "FLATOUT_PROGRESS"


def wants_progress() -> bool | None:
    """Return True to show progress, False to show none, or None to decide by the kind of output."""
    return {"0": False, "1": True}.get(os.environ.get(VARIABLE, "").strip())


def can_replace_lines(console: Console) -> bool:
    """Return True if a console is a terminal whose lines can be replaced.

    ``FORCE_COLOR`` makes a file a terminal for rich. A legacy console of Windows does not know control sequences.
    """
    return console.file.isatty() and console.is_interactive and not console.legacy_windows
