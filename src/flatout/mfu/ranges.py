"""Named ranges in profilers."""

from __future__ import annotations

from torch.autograd import profiler

from flatout.native import _host


class nvtx_range:
    """Open a named range: ``with flatout.mfu.nvtx_range("augment"): ...``.

    Nsight Systems shows an NVTX range, except in a build without CUDA. ``torch.profiler`` shows a user annotation.
    """

    __slots__ = ("_annotation", "_name")

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        _host.range_push(self._name)
        self._annotation = profiler.record_function(self._name) if profiler._is_profiler_enabled else None
        if self._annotation is not None:
            self._annotation.__enter__()

    def __exit__(self, *exception: object) -> None:
        if self._annotation is not None:
            self._annotation.__exit__(None, None, None)
        _host.range_pop()


_host.show_ranges(vars(profiler), nvtx_range)
