"""Named ranges that profilers show."""

from __future__ import annotations

from torch.autograd import profiler

from flatout.native import _host


class nvtx_range:
    """A range for profilers: ``with flatout.mfu.nvtx_range("augment"): ...``.

    Nsight Systems and the like see it as an NVTX range (a build without CUDA has none), ``torch.profiler`` as a user
    annotation. With neither listening it costs less than a microsecond.
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
