"""What records the work of a device, to be done again: CUDA graphs."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch

from flatout.core.errors import Unsuitable
from flatout.core.random_state import RandomState

Result = TypeVar("Result")


class Recorder(Protocol):
    """Records what a step does to the device, to be done again."""

    def aside(self, work: Callable[[], Result]) -> Result:
        """Do the work where recordings are made, in order with what is queued before and behind it."""

    def strictly(self, work: Callable[[], Result]) -> Result:
        """The same, and raise where a recording of it could not be made or would do something else."""

    def record(self, work: Callable[[], Result]) -> tuple[Callable[[], None], Result]:
        """Record the work without doing it.

        Returns:
            What does it, as often as wanted, and what the work returned: tensors that each time are written anew.
        """

    def wait(self) -> None:
        """Called before all recordings are let go of: none is under way any more."""

    def give_back(self) -> None:
        """Called after that, when none is to follow soon: give memory back to the device."""


_side_streams: dict[int, torch.cuda.Stream] = {}


class CudaRecorder:
    """Records CUDA graphs, on a side stream that all of a device share.

    Warm-up and capture run on one and the same stream: the autograd nodes that accumulate gradients then belong to it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None

    def aside(self, work: Callable[[], Result]) -> Result:
        """On the side stream. What is allocated there is safe to free anywhere: only fenced work allocates there."""
        current, side = torch.cuda.current_stream(self._device), self._stream()
        side.wait_stream(current)
        try:
            with torch.cuda.stream(side):
                return work()
        finally:
            current.wait_stream(side)

    def strictly(self, work: Callable[[], Result]) -> Result:
        """Refuses work that waits for the device, and work that draws random numbers on the host.

        torch leaves a capture that failed half undone (its memory stays reserved: pytorch #190308), so what is known
        to fail is found out without one.
        """
        generators = RandomState.capture()
        mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            result = self.aside(work)
        except RuntimeError as error:
            if "synchronizing CUDA operation" in str(error):
                raise Unsuitable("a step waits for the device (.item(), say), which a replay cannot") from error
            raise
        finally:
            torch.cuda.set_sync_debug_mode(mode)
        drawn = generators.moved()
        if drawn not in (None, "a CUDA generator"):  # torch moves that one along with the replays
            raise Unsuitable(f"a step draws random numbers from {drawn}, which a replay would repeat")
        return result

    def record(self, work: Callable[[], Result]) -> tuple[Callable[[], None], Result]:
        """A CUDA graph. All of this recorder's share memory: nothing in one is wanted once another has run."""
        failures: list[BaseException] = []
        results: list[Result] = []
        fresh = self._pool is None
        if fresh:
            self._pool = torch.cuda.graph_pool_handle()
        graph, side = torch.cuda.CUDAGraph(), self._stream()
        collecting = gc.isenabled()
        gc.disable()  # a finalizer that frees pinned memory, say, would break the capture
        # A graph gets workspaces of its own, in its own memory, and they are forgotten with it: torch keeps them per
        # stream, frees them when somebody clears them, and would hand a graph's to others.
        torch._C._cuda_clearCublasWorkspaces()
        try:
            # "thread_local": what a loader's threads do meanwhile is allowed. The outer stream context restores the
            # stream when torch's own exit fails half way.
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
        """Undo what torch leaves behind of a capture that failed.

        Its allocator goes on as if the capture were under way, and its random generator refuses to draw ("Offset
        increment outside graph capture"), until a capture with it has ended well.
        """
        index = self._stream().device.index
        with contextlib.suppress(RuntimeError, AttributeError):
            torch._C._cuda_endAllocateToPool(index, self._pool)  # raises where torch has done so itself
            torch._C._cuda_releasePool(index, self._pool)
        with contextlib.suppress(RuntimeError):
            nothing = torch.zeros((), device=self._device)
            with (
                torch.cuda.stream(self._stream()),
                torch.cuda.graph(torch.cuda.CUDAGraph(), stream=self._stream(), capture_error_mode="thread_local"),
            ):
                nothing.add_(1)

    def wait(self) -> None:
        """Waits for replays under way. What shares their memory has to be recorded before they are gone."""
        torch.cuda.synchronize(self._device)
        self._pool = None  # one that no graph uses any more cannot be used again

    def give_back(self) -> None:
        """The allocator would keep the graphs' memory, and give none of it to anybody else."""
        torch.cuda.empty_cache()

    def _stream(self) -> torch.cuda.Stream:
        index = torch.cuda.current_device() if self._device.index is None else self._device.index
        if index not in _side_streams:
            _side_streams[index] = torch.cuda.Stream(index)
        return _side_streams[index]
