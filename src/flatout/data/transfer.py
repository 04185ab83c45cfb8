"""Copies of host batches to a device on a side stream.

The device memory of a batch is allocated on its *home* stream. The home stream is the current stream when the copy is
requested. With a transform, it is the side stream, because the transform reads and allocates there.

The copy waits for a fence, an event that is recorded on the home stream after the allocation. So the copy runs after
earlier work on the same memory. It also runs after work that the allocation enqueues, such as the fill of deterministic
mode.

The stream that takes the batch waits for the copy. So later work on this stream can reuse the memory safely. If this
stream is not the home stream, ``record_stream`` is called, too.

A batch that is dropped keeps its memory until the side stream has finished the copy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from flatout import native
from flatout.core.batches import map_tensors, tensors_of
from flatout.core.machine import copy_threads
from flatout.core.torch_state import share_with
from flatout.native import _host


class Copy(Protocol):
    """Batch that is being copied to the device."""

    def release_sources(self) -> None:
        """Wait until the loader may overwrite the batch."""

    def apply(self, transform: Callable[[Any], Any]) -> None:
        """Replace the batch by ``transform(batch)``, which runs on the stream of the copies."""

    def take(self) -> Any:
        """Return the batch. Work that is queued later on the current stream runs after the copies."""


class Copier(Protocol):
    """Starts copies, in order."""

    def start(self, batch: Any) -> Copy:
        """Begin to copy the tensors of ``batch``. An allocation that fails raises here and changes nothing."""

    def close(self) -> None:
        """Wait for copies under way and end the threads."""


def make_copier(device: torch.device, depth: int, ring: Any, *, fresh: bool, transforms: bool) -> Copier:
    """Return the fastest copier for a device: native threads and CUDA streams, or torch alone.

    Args:
        device: device of the copies.
        depth: batches ahead.
        ring: the result of :func:`make_ring` for ``device``.
        fresh: True if the loader never overwrites a pinned batch. Pinned batches then need no staging.
        transforms: True if ``apply`` is called for each copy.
    """
    if ring is not None:
        return NativeCopier(device, depth, ring, fresh=fresh, transforms=transforms)
    return TorchCopier(device, fresh=fresh, transforms=transforms) if device.type == "cuda" else DirectCopier(device)


def make_ring(device: torch.device) -> Any:
    """Return pinned staging memory for :class:`NativeCopier`, or None if the class does not work on the device."""
    if device.type == "cuda" and native.has_cuda_runtime():
        return _host.Ring(device=_index_of(device))
    return None


def _index_of(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


_side_streams: dict[int, torch.cuda.Stream] = {}


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return flatout's stream on ``device``, one per process, because the allocator has a separate pool per stream.

    The stream has the highest priority, so that a transform does not wait for the blocks of a running step.
    """
    index = _index_of(device)
    if index not in _side_streams:
        device = torch.device("cuda", index)
        if native.has_cuda_runtime():
            torch.cuda.current_stream(device)  # torch makes the device's context before flatout uses it
            _side_streams[index] = torch.cuda.ExternalStream(_host.create_stream(index), device=device)
        else:
            _side_streams[index] = torch.cuda.Stream(device, priority=-100)  # torch clamps it to the highest
    return _side_streams[index]


def _is_plain(tensor: Tensor) -> bool:
    """Return True if ``tensor`` is a host tensor whose bytes can be copied without conversion."""
    return (
        type(tensor) is Tensor
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not (tensor.requires_grad or tensor.is_quantized or tensor.is_nested)
        and not (tensor.is_conj() or tensor.is_neg())
    )


def _dense(tensor: Tensor) -> Tensor:
    """Return ``tensor`` if it is dense, else a dense copy with the strides that ``.to`` would give it."""
    if tensor.is_contiguous():
        return tensor
    like = torch.empty_like(tensor)
    return tensor if like.stride() == tensor.stride() else like.copy_(tensor)


def _allocate(batch: Any, device: torch.device) -> tuple[list[Tensor], list[tuple[Tensor, Tensor]]]:
    """Return a device tensor for each tensor of a batch, and the (source, output) pairs that still need a copy."""
    outputs: list[Tensor] = []
    pairs: list[tuple[Tensor, Tensor]] = []
    for source in tensors_of(batch):
        if not _is_plain(source):
            outputs.append(source.to(device))
            continue
        source = _dense(source)
        outputs.append(torch.empty_like(source, device=device))
        if source.numel():
            pairs.append((source, outputs[-1]))
    return outputs, pairs


class _Copy:
    """Batch that is being copied to a device without streams.

    Args:
        batch: the batch with the source tensors.
        outputs: the device tensors, in the order of the sources. Rebuilding the batch empties the list.
        copied: the native copy, or None.
    """

    def __init__(self, batch: Any, outputs: list[Tensor], copied: Any = None) -> None:
        self._batch = batch
        self._outputs = outputs
        self._copied = copied
        self._is_rebuilt = False

    def release_sources(self) -> None:
        if self._copied is not None:
            self._copied.wait()

    def apply(self, transform: Callable[[Any], Any]) -> None:
        self._batch = transform(self.take())

    def take(self) -> Any:
        if not self._is_rebuilt:
            self.release_sources()
            outputs, self._is_rebuilt = iter(self._outputs[:]), True
            self._outputs.clear()
            self._batch = map_tensors(lambda _: next(outputs), self._batch)
        return self._batch


class _CudaCopy(_Copy):
    """Batch in memory of the stream ``home``. Subclasses copy on another stream."""

    def __init__(self, batch: Any, outputs: list[Tensor], home: torch.cuda.Stream, copied: Any = None) -> None:
        super().__init__(batch, outputs, copied)
        self._home = home
        self._applied: torch.cuda.Event | None = None

    def apply(self, transform: Callable[[Any], Any]) -> None:
        # Objects may hide tensors from `record_stream`. Their memory may be allocated again within `transform`.
        self._home.wait_stream(torch.cuda.current_stream(self._home.device))
        share_with(self._home, self._batch)  # other streams have allocated tensors that the loader made on the device
        with torch.cuda.stream(self._home):
            super().apply(transform)
        self._applied = self._home.record_event()

    def take(self) -> Any:
        batch, current = super().take(), torch.cuda.current_stream(self._home.device)
        if self._applied is None:
            self._order(current)
        else:
            current.wait_event(self._applied)
        if current != self._home:
            share_with(current, batch)
        return batch

    def _order(self, stream: torch.cuda.Stream) -> None:
        """Make later work on ``stream`` wait for the copies."""
        if stream != self._home:
            stream.wait_stream(self._home)


def _home(side: torch.cuda.Stream, transforms: bool) -> torch.cuda.Stream:
    """Return the home stream of the next batch, ordered after the work of the current stream."""
    current = torch.cuda.current_stream(side.device)
    if not transforms:
        return current
    side.wait_stream(current)
    return side


class NativeCopier:
    """Stages batches through the ring on native threads, and copies them on the side stream."""

    def __init__(
        self, device: torch.device, depth: int, ring: Any, *, fresh: bool = False, transforms: bool = False
    ) -> None:
        self._device = device
        self._fresh = fresh
        self._transforms = transforms
        self._side = _side_stream(device) if device.type == "cuda" else None
        index = -1 if self._side is None else self._side.device.index
        helpers = copy_threads() - 1  # one thread stages more slowly than the bus transfers
        self._stager = _host.Stager(ring, device=index, max_in_flight=depth + 1, helpers=helpers)

    def start(self, batch: Any) -> Copy:
        """Begin to copy the tensors of ``batch``. An allocation that fails raises here and changes nothing."""
        if self._side is None:
            outputs, pairs = _allocate(batch, self._device)
            return _Copy(batch, outputs, self._copy(pairs, outputs))
        home, fence = _home(self._side, self._transforms), torch.cuda.Event()
        with torch.cuda.stream(home):
            outputs, pairs = _allocate(batch, home.device)
        if not pairs:
            return _CudaCopy(batch, outputs, home)
        fence.record(home)
        copied = self._copy(pairs, (outputs, fence), self._side.cuda_stream, fence.cuda_event)
        return _NativeCopy(batch, outputs, home, copied)

    def _copy(self, pairs: list[tuple[Tensor, Tensor]], owned: Any, stream: int = 0, fence: int = 0) -> Any:
        """Start a native copy. The stager keeps the sources and ``owned`` alive until the device ends the copy."""
        transfers = [(source.data_ptr(), output.data_ptr(), source.nbytes) for source, output in pairs]
        return self._stager.copy(transfers, self._fresh, stream, fence, ([source for source, _ in pairs], owned))

    def close(self) -> None:
        """Wait for copies under way and end the threads."""
        self._stager.close()


class _NativeCopy(_CudaCopy):
    """Copy by the stager. The stager keeps the memory of a dropped batch until the copy ends."""

    def _order(self, stream: torch.cuda.Stream) -> None:
        self._copied.block(stream.cuda_stream)


class TorchCopier:
    """Copies with torch alone, if flatout was built without CUDA or the driver is too old for its kernels."""

    def __init__(self, device: torch.device, *, fresh: bool = False, transforms: bool = False) -> None:
        self._fresh = fresh
        self._transforms = transforms
        self._side = _side_stream(device)

    def start(self, batch: Any) -> Copy:
        """Begin to copy the tensors of ``batch``. An allocation that fails raises here and changes nothing."""
        home = _home(self._side, self._transforms)
        with torch.cuda.stream(home):
            outputs, pairs = _allocate(batch, home.device)
        staged = [(self._pinned(source), output) for source, output in pairs]
        self._side.wait_stream(home)
        with torch.cuda.stream(self._side):
            for source, output in staged:  # torch's host allocator keeps the source until the copy ends
                output.copy_(source, non_blocking=True)
        return _TorchCopy(batch, outputs, home, self._side.record_event(), self._side)

    def _pinned(self, source: Tensor) -> Tensor:
        direct = self._fresh and source.is_pinned()
        return source if direct else torch.empty_like(source, pin_memory=True).copy_(source)

    def close(self) -> None:
        """Do nothing, because torch's copies have no thread."""


class _TorchCopy(_CudaCopy):
    def __init__(
        self,
        batch: Any,
        outputs: list[Tensor],
        home: torch.cuda.Stream,
        done: torch.cuda.Event,
        side: torch.cuda.Stream,
    ) -> None:
        super().__init__(batch, outputs, home)
        self._done = done
        self._side = side

    def _order(self, stream: torch.cuda.Stream) -> None:
        stream.wait_event(self._done)

    def __del__(self) -> None:
        """Keep the memory of a batch that was not taken, until its copy ends."""
        if self._side != self._home:
            share_with(self._side, self._outputs)


class DirectCopier:
    """``Tensor.to`` for devices that are neither CPU nor CUDA."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def start(self, batch: Any) -> Copy:
        """Copy the tensors of ``batch``."""
        return _Copy(batch, [source.to(self._device) for source in tensors_of(batch)])

    def close(self) -> None:
        """Do nothing."""
