"""Whether glibc's malloc gives freed memory back to the kernel, as it does by itself, or keeps it for the process."""

from __future__ import annotations

import ctypes
import os
import platform
from typing import Any

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # <malloc.h>: M_TRIM_THRESHOLD and M_MMAP_THRESHOLD
_LOWEST, _HIGHEST = 128 * 1024, 32 * 1024 * 1024  # between which glibc moves its M_MMAP_THRESHOLD by itself

_keeps = False
_threshold = 0  # found when memory was first kept


def why_not() -> str:
    """What keeps the settings from being changed here and put back; empty when nothing does."""
    if platform.libc_ver()[0] != "glibc":
        return "the C library here is not glibc, whose malloc has these settings"
    tuned = [name for name in os.environ if name.startswith(("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD"))]
    return f"malloc is tuned for this process already: {tuned[0]} is set" if tuned else ""


def keeps() -> bool:
    """Whether freed memory is kept."""
    return _keeps


def keep(on: bool) -> None:
    """Have the process keep the memory that it frees, or give it back as before, what was kept included.

    glibc moves its thresholds with what a program frees, until somebody sets them: "as before" are those that it had
    come to. It does not tell them, so they are found by asking for memory.
    """
    global _keeps, _threshold
    if on == _keeps:
        return
    libc = ctypes.CDLL(None)
    if on:
        _threshold = _threshold or _mmap_threshold(libc)
        libc.mallopt(_MMAP_THRESHOLD, _HIGHEST)  # smaller blocks come from the heap
        libc.mallopt(_TRIM_THRESHOLD, -1)  # whose end is never given back
    else:
        libc.mallopt(_MMAP_THRESHOLD, _threshold)
        libc.mallopt(_TRIM_THRESHOLD, 2 * _threshold)
        libc.malloc_trim(0)
    _keeps = on


class _Statistics(ctypes.Structure):
    """``struct mallinfo``: hblks is the number of blocks that are mapped one by one."""

    _fields_ = [*((name, ctypes.c_int) for name in ("arena", "ordblks", "smblks", "hblks")), ("rest", 6 * ctypes.c_int)]


def _mmap_threshold(libc: Any) -> int:
    """Bytes from which malloc maps a block by itself, within 6 %; that free raises it to the size of such a block."""
    libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = (
        ctypes.c_void_p,
        [ctypes.c_size_t],
        [ctypes.c_void_p],
    )
    libc.mallinfo.restype = _Statistics
    size = _LOWEST
    while size < _HIGHEST:
        mapped = libc.mallinfo().hblks
        block = libc.malloc(size)
        is_mapped = libc.mallinfo().hblks > mapped
        libc.free(block)
        if is_mapped:
            return size
        size += size // 16
    return _HIGHEST


class MallocSetting:
    """The setting as it is now."""

    def __init__(self) -> None:
        self._keeps = keeps()

    def restore(self) -> None:
        """Put it back."""
        keep(self._keeps)
