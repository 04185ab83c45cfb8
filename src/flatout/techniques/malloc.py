"""Neighbour: memory that a step frees stays with the process, for the next step."""

from __future__ import annotations

import ctypes
import os
import platform
from typing import TYPE_CHECKING, Any

from flatout.core.process_flags import process_flag
from flatout.techniques.base import NotApplicable, Rule
from flatout.techniques.candidate import Candidate

if TYPE_CHECKING:
    from flatout.training.job import Job


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


@process_flag
class MallocSetting:
    """The setting as it is now."""

    def __init__(self) -> None:
        self._keeps = keeps()

    def restore(self) -> None:
        """Put it back."""
        keep(self._keeps)


class MallocCandidate(Candidate):
    """Has the process keep the memory that it frees, and give it back again."""

    label = "kept"
    value = True

    def _turn_on(self) -> None:
        keep(True)

    def _turn_off(self) -> None:
        keep(False)


class Malloc(Rule):
    """Keeps the memory that a step on the CPU frees, for the tensors of the next one.

    glibc's malloc gives blocks of megabytes and the end of its heap back to the kernel when they are freed; the kernel
    hands them out again page by page, each cleared and mapped when it is first touched. 4,000 page faults in a step of
    40 ms of a perceptron cost an eighth of it, 1,300 in one of 26 ms of a small GPT as much, on two cores of an EPYC.

    A rule, and not a trial: how much a step faults depends on what the heap has been through, so that the steps of a
    trial after one with memory kept would not be as they were before. Blocks below 32 MiB come from the heap, as they
    do by themselves in a process that has once freed one of that size; and the heap does not shrink any more.

    When it helps: tensors of up to 32 MiB. When it hurts: the process keeps the most memory that it has ever used, for
    other processes to miss. A process whose environment tunes malloc already (MALLOC_TRIM_THRESHOLD_, say) is left
    alone. Source: PyTorch's performance tuning guide, "Switch memory allocator" (jemalloc and TCMalloc keep memory as
    well, but have to be there when Python starts); the glibc manual, "Malloc Tunable Parameters".
    """

    name = "malloc"
    title = "memory kept by malloc"
    rationale = "a step takes the memory that the last one freed: the kernel need not clear and map new pages for it"

    def check(self, job: Job) -> None:
        """A step on the CPU, and glibc's malloc as it came."""
        if job.spec.device.type != "cpu":
            raise NotApplicable("training runs on the GPU, whose memory torch keeps anyway")
        reason = why_not()
        if reason:
            raise NotApplicable(reason)

    def candidate(self, job: Job) -> Candidate:
        """Return the setting of the process."""
        return MallocCandidate()
