"""State of torch: compilation, memory of streams, sync debugging, OpenMP."""

from __future__ import annotations

import contextlib
import ctypes
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch

from flatout.core.batches import tensors_within

uncompiled = torch._disable_dynamo
"""The decorator ``torch.compiler.disable``, except that ``torch._dynamo`` is imported at the first call.

The import takes longer than that of all of flatout. The methods of torch's optimizers have this decorator, too.
"""


def share_with(stream: torch.cuda.Stream, batch: Any) -> None:
    """Record ``stream`` as a user of a batch's CUDA memory, as ``Tensor.record_stream`` does for one tensor.

    After a tensor is freed, the allocator reuses its memory only when ``stream`` has run all work queued until then.

    Args:
        stream: the stream that uses the memory, other than the one that allocated it.
        batch: any nesting of tensors, and of objects with tensors as attributes.
    """
    for tensor in tensors_within(batch):
        if tensor.is_cuda:
            with contextlib.suppress(NotImplementedError):  # raised by sparse and quantized tensors
                tensor.record_stream(stream)


@contextmanager
def sync_debug_mode(mode: Literal["warn", "error"]) -> Iterator[None]:
    """Let torch warn or raise inside the block when a call waits for the GPU.

    torch warns once that the mode does not find all such calls. This warning is not shown.
    """
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


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


COLD_COMPILE_SECONDS = 30.0
"""Seconds of the first forward and backward of small models with an empty cache, on two cores: 28 to 35 s."""

_own = 0


def compiled_frames() -> int:
    """Return the number of frames that Dynamo has compiled in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return 0 if dynamo is None else dynamo.counters["frames"]["total"]


def count_as_own(frames: int) -> None:
    """Count frames as compiled by flatout, so that ``script_compiles`` leaves them out."""
    global _own
    _own += frames


def script_compiles() -> bool:
    """Return True if code of the script is compiled, for example its model, its loss or its step."""
    return compiled_frames() > _own


def recompilation_seconds() -> float:
    """Return the estimated seconds to compile the existing code again, by the time of its first compilation."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    spent = 0.0 if dynamo is None else dynamo.calculate_time_spent().get("total_wall_time", 0.0)
    return max(COLD_COMPILE_SECONDS, spent)
