"""Record of calls of the CUDA runtime and of operations on the emulated devices."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

EMULATED = "EMULATED_CUDA_BUILD" in os.environ
"""True if this process has emulated devices."""

needs_emulated_devices = pytest.mark.skipif(not EMULATED, reason="needs emulated devices: make test-emulated")


@dataclass(frozen=True)
class Record:
    """Calls of the CUDA runtime by the calling thread, and operations of the devices, in order.

    Attributes:
        calls: names of functions.
        operations: such as ``kernel step_kernel`` or ``copy to host``.
    """

    calls: list[str]
    operations: list[str]


def recorded(run: Callable[[], object]) -> Record:
    """Run a function, wait for the devices, and return the record. The record does not contain the last wait."""
    torch.cuda.synchronize()
    runtime = ctypes.CDLL(None)
    runtime.emulated_cuda_record.restype = ctypes.c_size_t
    runtime.emulated_cuda_begin_record()
    run()
    calls = _lines(runtime)
    torch.cuda.synchronize()
    lines = _lines(runtime)
    return Record(
        [line.removeprefix("call ") for line in calls if line.startswith("call ")],
        [line.split(": ", 1)[1] for line in lines if line.startswith("stream ")],
    )


def _lines(runtime: ctypes.CDLL) -> list[str]:
    text = ctypes.create_string_buffer(runtime.emulated_cuda_record(None, 0))
    runtime.emulated_cuda_record(text, ctypes.c_size_t(len(text)))
    return text.raw.decode().splitlines()
