"""Additional technique: freed memory stays with the process, for the next step."""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from flatout.core.saved import Saved
from flatout.core.snapshot import process_flag
from flatout.techniques.base import NotApplicable, Rule
from flatout.techniques.candidate import Candidate, ChangeCandidate

if TYPE_CHECKING:
    from flatout.training.job import Job


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # <malloc.h>: M_TRIM_THRESHOLD and M_MMAP_THRESHOLD
_LOWEST, _HIGHEST = 128 * 1024, 32 * 1024 * 1024  # range in which glibc adapts its M_MMAP_THRESHOLD

_keeps = False
_threshold = 0  # measured when memory is first kept


def why_not() -> str:
    """Return the reason why the settings cannot be changed and restored here; empty if they can."""
    if platform.libc_ver()[0] != "glibc":
        return "the C library here is not glibc, whose malloc has these settings"
    tuned = [name for name in os.environ if name.startswith(("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD"))]
    return f"malloc is tuned for this process already: {tuned[0]} is set" if tuned else ""


def keeps() -> bool:
    """Return True if freed memory is kept."""
    return _keeps


def keep(on: bool) -> None:
    """Keep freed memory in the process, or return all of it and restore the earlier thresholds.

    glibc adapts its thresholds to the program's frees until the thresholds are set. It does not report adapted values,
    so allocations measure them.
    """
    global _keeps, _threshold
    if on == _keeps:
        return
    libc = ctypes.CDLL(None)
    if on:
        _threshold = _threshold or _mmap_threshold(libc)
        libc.mallopt(_MMAP_THRESHOLD, _HIGHEST)  # smaller blocks come from the heap
        libc.mallopt(_TRIM_THRESHOLD, -1)  # the end of the heap is never returned
    else:
        libc.mallopt(_MMAP_THRESHOLD, _threshold)
        libc.mallopt(_TRIM_THRESHOLD, 2 * _threshold)
        libc.malloc_trim(0)
    _keeps = on


class _Statistics(ctypes.Structure):
    """``struct mallinfo``: hblks is the number of blocks that are mapped one by one."""

    _fields_ = [*((name, ctypes.c_int) for name in ("arena", "ordblks", "smblks", "hblks")), ("rest", 6 * ctypes.c_int)]


def _mmap_threshold(libc: Any) -> int:
    """Return the size in bytes from which malloc maps a block separately, within 6 %.

    Freeing such a block raises the threshold.
    """
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


@process_flag
def malloc_setting() -> Saved:
    """Return the part for the setting."""
    return Saved(keeps, keep)


def _kept() -> Callable[[], None]:
    keep(True)
    return partial(keep, False)


class Malloc(Rule):
    """Keeps the memory that a step on the CPU frees, for the tensors of the next one.

    glibc's malloc returns freed blocks of megabytes and the free end of its heap to the kernel. The kernel hands this
    memory out again page by page, and clears and maps each page at its first use. On two cores of an EPYC, page faults
    took an eighth of the step: 4,000 faults in 40 ms for a perceptron, 1,300 in 26 ms for a small GPT.

    Why no trial: page faults depend on the history of the heap, so a trial with memory kept would change later steps
    without it. Blocks below 32 MiB come from the heap, as in any process that has once freed a block of this size. The
    heap no longer shrinks.

    When it helps: tensors of up to 32 MiB. When it hurts: the process keeps its peak memory, which other processes may
    need. A process whose environment already tunes malloc, for example by MALLOC_TRIM_THRESHOLD_, is left alone.

    Sources: PyTorch's performance tuning guide, "Switch memory allocator" (jemalloc and TCMalloc also keep memory, but
    must be loaded when Python starts); the glibc manual, "Malloc Tunable Parameters".
    """

    name = "malloc"
    title = "memory kept by malloc"
    expected = "up to 12 %"
    rationale = "a step takes the memory that the last one freed: the kernel need not clear and map new pages for it"

    def check(self, job: Job) -> None:
        """Require a step on the CPU, and glibc's malloc with its defaults."""
        if job.spec.device.type != "cpu":
            raise NotApplicable("training runs on the GPU, whose memory torch keeps anyway")
        reason = why_not()
        if reason:
            raise NotApplicable(reason)

    def candidate(self, job: Job) -> Candidate:
        """Return the candidate for the process-wide setting."""
        return ChangeCandidate("kept", True, _kept)
