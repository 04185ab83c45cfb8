"""Memory events of torch's profiler, and suppression of its messages on standard error."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import torch
from torch.autograd import DeviceType

_LEVEL = "KINETO_LOG_LEVEL"
_SILENT = "99"
_TORCHS_LEVEL = "TORCH_CPP_LOG_LEVEL"
_ERROR = 2


def allocated_peak(profiled: Any, within: str, device: torch.device) -> int:
    """Return the largest sum of bytes that was allocated on a device during a part of a profile.

    Args:
        profiled: finished ``torch.autograd.profiler.profile`` with ``profile_memory=True``.
        within: name of ranges. The part lasts from the start of the first one to the end of the last one.
        device: device of the memory.
    """
    events = profiled.kineto_results.events()
    marks = [event for event in events if event.name() == within and event.device_type() == DeviceType.CPU]
    start, end = min(mark.start_ns() for mark in marks), max(mark.end_ns() for mark in marks)
    wanted = DeviceType.CUDA if device.type == "cuda" else DeviceType.CPU
    sizes = [
        (event.start_ns(), event.nbytes())
        for event in events
        if event.name() == "[memory]"
        and start <= event.start_ns() <= end
        and event.device_type() == wanted
        and device.index in (None, event.device_index())
    ]
    return max(accumulate(size for _, size in sorted(sizes)), default=0)


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
