"""Named ranges in profilers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from torch.autograd import profiler

from flatout.native import _host


class nvtx_range:
    """Named range, used as ``with flatout.mfu.nvtx_range("augment"): ...``.

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


@contextmanager
def ranges_shown_as(make_range: Callable[[str], AbstractContextManager[object]]) -> Iterator[None]:
    """Open ranges of ``make_range`` for the steps and phases of every counter inside the block.

    Profilers do not get these ranges.
    """
    global _make_range
    _make_range = make_range
    _host.show_ranges(_LISTENING, _observed)
    try:
        yield
    finally:
        _make_range = nvtx_range
        _host.show_ranges(vars(profiler), nvtx_range)


_LISTENING = {"_is_profiler_enabled": True}
_make_range: Callable[[str], AbstractContextManager[object]] = nvtx_range


def _observed(name: str) -> AbstractContextManager[object]:
    return _make_range(name)  # looked up in each call, because the native module keeps this function forever


_host.show_ranges(vars(profiler), nvtx_range)
