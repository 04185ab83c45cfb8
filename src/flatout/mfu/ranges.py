"""Named ranges that profilers show."""

from __future__ import annotations

import torch
from torch.autograd.profiler import record_function

from flatout import _host

_NVTX_TOOL = _host.nvtx_listens()


def profiler_listens() -> bool:
    """Whether anybody would see a range now."""
    return _NVTX_TOOL or torch.autograd._profiler_enabled()


class range:
    """A range for profilers: ``with flatout.mfu.range("augment"): ...``.

    Nsight Systems and the like see it as an NVTX range (a build without CUDA has none), ``torch.profiler`` as a user
    annotation. With neither listening it costs less than a microsecond.
    """

    __slots__ = ("_annotation", "_name")

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        _host.range_push(self._name)
        self._annotation = record_function(self._name) if torch.autograd._profiler_enabled() else None
        if self._annotation is not None:
            self._annotation.__enter__()

    def __exit__(self, *exception: object) -> None:
        if self._annotation is not None:
            self._annotation.__exit__(None, None, None)
        _host.range_pop()
