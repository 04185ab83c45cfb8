"""Setting ``FLATOUT_PROGRESS``: 0 shows no progress, 1 shows it in logs, too."""

from __future__ import annotations

import os

VARIABLE = "FLATOUT_PROGRESS"


def wants_progress() -> bool | None:
    """Return whether the user wants progress to be shown; None if this depends on where output goes."""
    return {"0": False, "1": True}.get(os.environ.get(VARIABLE, "").strip())
