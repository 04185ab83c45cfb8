"""Size of the benchmarks: small for a first look, full with ``--full``."""

from __future__ import annotations

import os
from typing import TypeVar

T = TypeVar("T")

_VARIABLE = "FLATOUT_BENCHMARKS_FULL"
"""Environment variable that tells the size to processes that a benchmark starts."""

full = os.environ.get(_VARIABLE) == "1"
"""True with ``--full``."""


def choose(is_full: bool) -> None:
    """Set the size, also for new processes. conftest.py calls this before pytest imports the benchmarks."""
    global full
    full = is_full
    os.environ[_VARIABLE] = str(int(is_full))


def scaled(at_full_size: T, at_small_size: T) -> T:
    """Return the value for the size of this run."""
    return at_full_size if full else at_small_size
