"""torch's profiler without the messages of its library about a GPU that is not there."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch

_LEVEL = "KINETO_LOG_LEVEL"
_SILENT = "99"


@contextlib.contextmanager
def quiet_kineto() -> Iterator[None]:
    """Wherever a profiler starts first: the library reads the level then, once in a process."""
    if _LEVEL in os.environ or torch.cuda.is_available():
        yield
        return
    os.environ[_LEVEL] = _SILENT
    try:
        yield
    finally:
        del os.environ[_LEVEL]
