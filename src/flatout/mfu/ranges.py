"""Named ranges that profilers show."""

from __future__ import annotations

from contextlib import AbstractContextManager

from flatout import _host


def range(name: str) -> AbstractContextManager[None]:
    """An NVTX range for Nsight Systems and the like: ``with flatout.mfu.range("augment"): ...``.

    Without a profiler attached it costs next to nothing; a build without CUDA has no NVTX and does nothing.
    """
    return _host.Range(name)
