"""torch's OpenMP threads, left asleep where they would be in the way."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

import torch

# Symbols are looked for in what torch is linked with, too: the OpenMP that it uses itself, whatever its file's name.
_torch = ctypes.PyDLL(torch._C.__file__)
_HAS_OPENMP = hasattr(_torch, "omp_set_num_threads")


@contextmanager
def serial() -> Iterator[None]:
    """Has torch's operations on this thread, and on no other, run on this thread alone.

    Behind a parallel operation OpenMP's threads await the next one spinning, for milliseconds (libgomp: GOMP_SPINCOUNT
    and OMP_WAIT_POLICY): on the cores that threads of ours need. ``torch.set_num_threads`` would reach further, to
    other threads and into MKL.
    """
    if not _HAS_OPENMP:
        yield
        return
    threads = torch.get_num_threads()  # which, in a thread where nothing has asked before, tells OpenMP torch's number
    _torch.omp_set_num_threads(1)
    try:
        yield
    finally:
        _torch.omp_set_num_threads(threads)
