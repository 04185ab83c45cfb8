"""Errors of the CUDA runtime on request."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

MEMORY_ALLOCATION, ILLEGAL_ADDRESS, LAUNCH_OUT_OF_RESOURCES = 2, 700, 701
"""Numbers of cudaError_t."""


@dataclass
class Fault:
    """State of a requested error.

    Attributes:
        has_occurred: True if the error has occurred. The end of the block sets this value.
    """

    has_occurred: bool = False


@contextmanager
def failing(function: str, nth: int, error: int, *, times: int = 1, is_sticky: bool = False) -> Iterator[Fault]:
    """Make ``times`` calls of a function of the runtime return an error, from the ``nth`` call from now on.

    A sticky error stays until the end of the block. All later calls then return this error, as after an illegal access.
    """
    runtime = ctypes.CDLL(None)
    runtime.emulated_cuda_fail(function.encode(), nth, times, error, is_sticky)
    fault = Fault()
    try:
        yield fault
    finally:
        fault.has_occurred = runtime.emulated_cuda_heal() == 0
