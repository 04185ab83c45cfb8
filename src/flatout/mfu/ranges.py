"""Named ranges that profilers show."""

from __future__ import annotations

from flatout import _host


class range:
    """An NVTX range for Nsight Systems and the like: ``with flatout.mfu.range("augment"): ...``.

    Without a profiler attached it costs less than a microsecond; a build without CUDA has no NVTX and does
    nothing.
    """

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        _host.range_push(self._name)

    def __exit__(self, *exception: object) -> None:
        _host.range_pop()
