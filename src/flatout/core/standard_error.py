"""Lines for the user on stderr, which leave stdout to the script, and the setting ``FLATOUT_PROGRESS``."""

from __future__ import annotations

import os
import sys

from rich.console import Console

from flatout.core.formatting import clean


def say(text: str) -> None:
    """Write a line on stderr, if it is open."""
    try:
        print(f"flatout: {clean(text)}", file=sys.stderr, flush=True)
    except (OSError, ValueError, AttributeError):
        return


VARIABLE = "FLATOUT_PROGRESS"


def wants_progress() -> bool | None:
    """Return True to show progress, False to show none, or None to decide by the kind of output."""
    return {"0": False, "1": True}.get(os.environ.get(VARIABLE, "").strip())


def can_replace_lines(console: Console) -> bool:
    """Return True if a console is a terminal whose lines can be replaced.

    ``FORCE_COLOR`` makes a file a terminal for rich. A legacy console of Windows does not know control sequences.
    """
    return console.file.isatty() and console.is_interactive and not console.legacy_windows
