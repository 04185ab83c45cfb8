"""Context that keeps torch's operations on one thread, so that OpenMP's threads sleep."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

import torch

# The lookup includes libraries that torch is linked with. So it finds torch's own OpenMP under any file name.
_torch = ctypes.PyDLL(torch._C.__file__)
_HAS_OPENMP = hasattr(_torch, "omp_set_num_threads")


@contextmanager
def serial() -> Iterator[None]:
    """Run the calling thread's torch operations on this thread alone. Operations of other threads stay parallel.

    After a parallel operation, OpenMP's threads spin for milliseconds while they wait for the next operation. In
    libgomp, GOMP_SPINCOUNT and OMP_WAIT_POLICY set the duration. Spinning threads would occupy cores that flatout's
    threads need. ``torch.set_num_threads`` would also change other threads and MKL.
    """
    if not _HAS_OPENMP:
        yield
        return
    threads = torch.get_num_threads()  # the first call in a thread also sets OpenMP's number
    _torch.omp_set_num_threads(1)
    try:
        yield
    finally:
        _torch.omp_set_num_threads(threads)
