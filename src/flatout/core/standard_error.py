"""Lines for the user on stderr, which leave stdout to the script."""

from __future__ import annotations

import sys

from flatout.core.formatting import clean


def say(text: str) -> None:
    """Write a line on stderr, if it is open."""
    try:
        print(f"flatout: {clean(text)}", file=sys.stderr, flush=True)
    except (OSError, ValueError, AttributeError):
        return
