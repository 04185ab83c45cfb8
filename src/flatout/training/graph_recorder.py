"""Recorders of device work for replay, such as CUDA graphs."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch

from flatout.core.errors import Unsuitable
from flatout.core.random_state import RandomState
from flatout.core.torch_state import share_with, sync_debug_mode

Result = TypeVar("Result")


class Recorder(Protocol):
    """Recorder of a step's device work, for replay."""

    def aside(self, work: Callable[[], Result]) -> Result:
        """Run the work on the recording stream, in order with work that is queued before and after it."""

    def strictly(self, work: Callable[[], Result]) -> Result:
        """Run ``aside``, and raise an error if a recording of the work would fail or compute something else."""

    def record(self, work: Callable[[], Result]) -> tuple[Callable[[], None], Result]:
        """Record the work without running it.

        Returns:
            A function that replays the work, and the work's result, whose tensors each replay overwrites.
        """

    def wait(self) -> None:
        """Wait until no recording is running, before all recordings are freed."""

    def give_back(self) -> None:
        """Return the memory of freed recordings to the device, if no new recording follows soon."""


_side_streams: dict[int, torch.cuda.Stream] = {}


class CudaRecorder:
    """Recorder of CUDA graphs, on one side stream per device.

    Warm-up and capture run on the same stream, because the autograd nodes that accumulate gradients stay on their first
    stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None

    def aside(self, work: Callable[[], Result]) -> Result:
        """Run the work on the side stream, and share its result with the current stream."""
        current, side = torch.cuda.current_stream(self._device), self._stream()
        side.wait_stream(current)
        try:
            with torch.cuda.stream(side):
                result = work()
        finally:
            current.wait_stream(side)
        share_with(current, result)
        return result

    def strictly(self, work: Callable[[], Result]) -> Result:
        """Reject work that waits for the device, and work that draws random numbers on the host.

        torch does not clean up after a failed capture, so its memory stays reserved (pytorch #190308). Therefore known
        causes of failure are detected without a capture.
        """
        generators = RandomState.capture()
        try:
            with sync_debug_mode("error"):
                result = self.aside(work)
        except RuntimeError as error:
            if "synchronizing CUDA operation" in str(error):
                raise Unsuitable("a step waits for the device (.item(), say), which a replay cannot") from error
            raise
        drawn = generators.moved()
        if drawn not in (None, "a CUDA generator"):  # torch advances that generator with each replay
            raise Unsuitable(f"a step draws random numbers from {drawn}, which a replay would repeat")
        return result

    def record(self, work: Callable[[], Result]) -> tuple[Callable[[], None], Result]:
        """Record a CUDA graph.

        All graphs of a recorder share memory, because no graph's results are needed after the next replay.
        """
        failures: list[BaseException] = []
        results: list[Result] = []
        fresh = self._pool is None
        if fresh:
            self._pool = torch.cuda.graph_pool_handle()
        graph, side = torch.cuda.CUDAGraph(), self._stream()
        collecting = gc.isenabled()
        gc.disable()  # a finalizer that frees pinned memory, for example, would break the capture
        # A graph gets its own workspaces, in its own memory. torch caches workspaces per stream, and would share the
        # workspaces of a graph with other work.
        torch._C._cuda_clearCublasWorkspaces()
        try:
            # "thread_local" allows CUDA calls of a loader's threads. The outer stream context restores the stream if
            # torch's own exit fails.
            with (
                torch.cuda.stream(side),
                torch.cuda.graph(graph, pool=self._pool, stream=side, capture_error_mode="thread_local"),
            ):
                try:
                    results.append(work())
                except BaseException as error:
                    failures.append(error)
                    raise
        except BaseException as error:
            with contextlib.suppress(RuntimeError):
                graph.reset()
            self._mend()
            if fresh:
                self._pool = None
            raise (failures[0] if failures else error) from None
        finally:
            torch._C._cuda_clearCublasWorkspaces()
            if collecting:
                gc.enable()
        return graph.replay, results[0]

    def _mend(self) -> None:
        """Clean up after a failed capture.

        Otherwise torch's allocator still routes allocations to the capture. torch's random generator raises "Offset
        increment outside graph capture" until another capture succeeds.
        """
        index = self._stream().device.index
        with contextlib.suppress(RuntimeError, AttributeError):
            torch._C._cuda_endAllocateToPool(index, self._pool)  # raises if torch has ended the allocation already
            torch._C._cuda_releasePool(index, self._pool)
        with contextlib.suppress(RuntimeError):
            nothing = torch.zeros((), device=self._device)
            with (
                torch.cuda.stream(self._stream()),
                torch.cuda.graph(torch.cuda.CUDAGraph(), stream=self._stream(), capture_error_mode="thread_local"),
            ):
                nothing.add_(1)

    def wait(self) -> None:
        """Wait for replays, and give later graphs a new memory pool."""
        torch.cuda.synchronize(self._device)
        self._pool = None  # a pool whose graphs are all freed cannot be used again

    def give_back(self) -> None:
        """Return the graphs' memory to the device. The allocator would otherwise keep it for graphs."""
        torch.cuda.empty_cache()

    def _stream(self) -> torch.cuda.Stream:
        index = torch.cuda.current_device() if self._device.index is None else self._device.index
        if index not in _side_streams:
            _side_streams[index] = torch.cuda.Stream(index)
        return _side_streams[index]
