"""Lines on stderr, which leave stdout to the script: for the user, and the log of decisions.

``FLATOUT_PROGRESS`` and ``FLATOUT_LOG`` choose them.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import TYPE_CHECKING

from flatout.core.formatting import clean

if TYPE_CHECKING:
    from rich.console import Console

trials = logging.getLogger("flatout.trials")
"""Logger of the noise floors, pairs, intervals and failures of trials."""


def say(text: str) -> None:
    """Write a line on stderr, if it is open."""
    try:
        print(f"flatout: {clean(text)}", file=sys.stderr, flush=True)
    except (OSError, ValueError, AttributeError):
        return


def show_log() -> None:
    """Show flatout's log on stderr, from the level that ``FLATOUT_LOG`` names. Without the variable, show nothing.

    ``info`` shows each decision with its interval and time. ``debug`` also shows each noise floor, pair and verdict.
    """
    log, wanted = logging.getLogger("flatout"), os.environ.get(LOG_VARIABLE, "").strip()
    log.addHandler(logging.NullHandler())  # without a handler, Python would print a library's warnings
    trials.disabled = not wanted  # so that the log of a script, at any level, has no records of trials
    if not wanted:
        return
    level = logging.getLevelName(wanted.upper())
    if not isinstance(level, int):
        say(f"{LOG_VARIABLE} must be debug, info, warning or error, got {wanted!r}: there is no log")
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
    log.addHandler(handler)
    log.setLevel(level)


VARIABLE = "FLATOUT_PROGRESS"
LOG_VARIABLE = "FLATOUT_LOG"


def wants_progress() -> bool | None:
    """Return True to show progress, False to show none, or None to decide by the kind of output."""
    return {"0": False, "1": True}.get(os.environ.get(VARIABLE, "").strip())


def can_replace_lines(console: Console) -> bool:
    """Return True if a console is a terminal whose lines can be replaced.

    ``FORCE_COLOR`` makes a file a terminal for rich. A legacy console of Windows does not know control sequences.
    """
    return console.file.isatty() and console.is_interactive and not console.legacy_windows
