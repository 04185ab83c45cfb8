"""Suppression of messages of torch's profiler on standard error that do not concern the user's code."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator

import torch

_LEVEL = "KINETO_LOG_LEVEL"
_SILENT = "99"
_TORCHS_LEVEL = "TORCH_CPP_LOG_LEVEL"
_ERROR = 2


@contextlib.contextmanager
def quiet_kineto() -> Iterator[None]:
    """Silence Kineto, torch's profiler library, unless the user has set its log level or there is a GPU.

    Kineto reads its log level once per process, when the first profiler starts.
    """
    if _LEVEL in os.environ or torch.cuda.is_available():
        yield
        return
    os.environ[_LEVEL] = _SILENT
    try:
        yield
    finally:
        del os.environ[_LEVEL]


@contextlib.contextmanager
def quiet_allocator() -> Iterator[None]:
    """Silence torch's allocator during a memory profile.

    The allocator logs every thousandth block that is older than the profile. The messages go to standard error through
    torch's C++ logger, so Python's warning filters do not apply. Inside the block, the logger's level is ``ERROR``,
    unless the user has set a level. ``TORCH_WARN`` is not affected, because it issues Python warnings.
    """
    level = None if _TORCHS_LEVEL in os.environ else _log_level()
    if level is None:
        yield
        return
    before, level.value = level.value, _ERROR
    try:
        yield
    finally:
        level.value = before


def _log_level() -> ctypes.c_int | None:
    """Return the level of torch's C++ logger, or None if this build does not export the level."""
    try:
        return ctypes.c_int.in_dll(ctypes.CDLL(torch._C.__file__), "FLAGS_caffe2_log_level")
    except (OSError, ValueError):
        return None
