"""Copies of host batches to a device on a side stream.

Fences replace ``record_stream``. Device tensors are allocated under the side stream. So the allocator may give a
tensor's memory to the next batch as soon as the user drops the tensor, while kernels that read it are still queued on
the user's stream. Therefore every copy waits for a fence, an event that is recorded on the user's stream when the copy
is requested. It comes after all work that used memory which is free at that time. Each other stream on which batches
were yielded (of an evaluation or of another thread) has such a fence, too. The side stream is private, so nothing
allocates from its pool without a fence.

Nothing may run on the side stream between an allocation and its fence. The native copier allocates before its thread
enqueues the fence. So it allocates bare storage, because in deterministic mode torch fills every new tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from flatout import native
from flatout.native import _host


class Copy(Protocol):
    """A batch's tensors on their way."""

    def release_sources(self) -> None:
        """Wait until whoever made the batch may overwrite it."""

    def tensors(self) -> list[Tensor]:
        """The tensors on the device; work that the caller enqueues from now on sees their values."""

    def run(self, work: Callable[[list[Tensor]], Any]) -> tuple[Any, torch.cuda.Event | None]:
        """Call ``work`` with the tensors, on the stream of their copies; the event is behind what it enqueues."""


class Copier(Protocol):
    """Starts copies, in order."""

    def start(self, sources: list[Tensor]) -> Copy:
        """Begin to copy ``sources``; an allocation that fails raises here and changes nothing."""

    def close(self) -> None:
        """Wait for copies under way and end the threads."""


def make_copier(device: torch.device, depth: int, ring: Any, *, fresh: bool) -> Copier:
    """The fastest copier that works here: native threads and CUDA streams, or torch alone.

    Args:
        device: where to.
        depth: batches ahead.
        ring: what :func:`make_ring` gave for ``device``.
        fresh: pinned batches are never written again by whoever made them, so they need no staging.
    """
    if ring is not None:
        return NativeCopier(device, depth, ring, fresh=fresh)
    return TorchCopier(device, fresh=fresh) if device.type == "cuda" else DirectCopier(device)


def make_ring(device: torch.device, depth: int) -> Any:
    """Pinned staging memory for :class:`NativeCopier`; ``None`` where that one does not work."""
    if device.type == "cuda" and native.BUILT_WITH_CUDA and _host.cuda_usable():
        return _host.Ring(device=_index_of(device), max_idle=depth + 2)
    return None


def _index_of(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


_side_streams: dict[int, torch.cuda.Stream] = {}


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Our stream on ``device``: one per process, because each stream keeps a memory pool of its own."""
    index = _index_of(device)
    if index not in _side_streams:
        device = torch.device("cuda", index)
        if native.BUILT_WITH_CUDA and _host.cuda_usable():
            torch.cuda.current_stream(device)  # torch makes the device's context before we use it
            _side_streams[index] = torch.cuda.ExternalStream(_host.create_stream(index), device=device)
        else:
            _side_streams[index] = torch.cuda.Stream(device)
    return _side_streams[index]


_consumers: dict[int, set[torch.cuda.Stream]] = {}
"""Streams that batches were handed out on, by device."""


def _consumer_of(side: torch.cuda.Stream) -> torch.cuda.Stream:
    """The current stream of the side stream's device, which has batches handed out on it."""
    stream = torch.cuda.current_stream(side.device)
    _consumers.setdefault(side.device.index, set()).add(stream)
    return stream


def _wait_for_consumers(side: torch.cuda.Stream) -> torch.cuda.Stream:
    """Have the side stream wait for all streams but the current one that have had batches; the current one."""
    current = torch.cuda.current_stream(side.device)
    for stream in _consumers.get(side.device.index, set()) - {current}:
        side.wait_stream(stream)
    return current


def _run_on(
    side: torch.cuda.Stream, work: Callable[[list[Tensor]], Any], tensors: list[Tensor]
) -> tuple[Any, torch.cuda.Event]:
    # The same fence as for copies: what `work` allocates may be memory that queued kernels still read.
    side.wait_stream(_wait_for_consumers(side))
    with torch.cuda.stream(side):
        result = work(tensors)
        done = torch.cuda.Event()
        done.record(side)
    return result, done


def _is_plain(tensor: Tensor) -> bool:
    """Whether ``tensor`` is bytes on the host that may be copied as they are."""
    return (
        type(tensor) is Tensor
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not (tensor.requires_grad or tensor.is_quantized or tensor.is_nested)
        and not (tensor.is_conj() or tensor.is_neg())
    )


def _dense(tensor: Tensor) -> Tensor:
    """``tensor``, or a copy of it without gaps, in the strides that ``.to`` would give it."""
    if tensor.is_contiguous():
        return tensor
    like = torch.empty_like(tensor)
    return tensor if like.stride() == tensor.stride() else like.copy_(tensor)


class NativeCopier:
    """Stages batches through the ring on a native thread, and copies them on the side stream."""

    def __init__(self, device: torch.device, depth: int, ring: Any, *, fresh: bool = False) -> None:
        self.device = device
        self._fresh = fresh
        self._on_cuda = device.type == "cuda"
        index = -1
        if self._on_cuda:
            self._side = _side_stream(device)
            index = self._side.device.index
        self._stager = _host.Stager(ring, threads=1, device=index, max_in_flight=depth + 1)

    def start(self, sources: list[Tensor]) -> Copy:
        """Begin to copy ``sources``; an allocation that fails raises here and changes nothing."""
        outputs: list[Tensor] = []
        staged: list[Tensor] = []
        transfers: list[tuple[int, int, int]] = []
        for source in sources:
            if not _is_plain(source):
                outputs.append(source.to(self.device))
                continue
            source = _dense(source)
            output = self._empty_like(source)
            outputs.append(output)
            if source.numel():
                staged.append(source)
                transfers.append((source.data_ptr(), output.data_ptr(), source.numel() * source.element_size()))
        if not transfers:
            return _Ready(outputs)
        if not self._on_cuda:
            return _NativeCopy(self._stager.copy(transfers, self._fresh, 0, 0, (staged, outputs)), outputs)
        fence = torch.cuda.Event()
        fence.record(_wait_for_consumers(self._side))
        # The stager holds the owner until the copy ends: the sources, and the outputs until `tensors` takes them.
        stream, owner = self._side.cuda_stream, (staged, outputs, fence)
        copied = self._stager.copy(transfers, self._fresh, stream, fence.cuda_event, owner)
        return _NativeCopy(copied, outputs, self._side)

    def _empty_like(self, source: Tensor) -> Tensor:
        """Allocate memory for a copy of a dense ``source``, without enqueuing any work."""
        if not self._on_cuda:
            return torch.empty_like(source)
        device = self._side.device
        with torch.cuda.stream(self._side):
            storage = torch.UntypedStorage(source.numel() * source.element_size(), device=device)
            return torch.empty(0, dtype=source.dtype, device=device).set_(storage, 0, source.shape, source.stride())

    def close(self) -> None:
        """Wait for copies under way and end the thread."""
        self._stager.close()


class _NativeCopy:
    def __init__(self, copied: Any, outputs: list[Tensor], side: torch.cuda.Stream | None = None) -> None:
        self._copied = copied
        self._outputs = outputs
        self._side = side

    def release_sources(self) -> None:
        self._copied.wait()

    def tensors(self) -> list[Tensor]:
        outputs = self._take()
        if self._side is not None:
            self._copied.block(_consumer_of(self._side).cuda_stream)
        return outputs

    def run(self, work: Callable[[list[Tensor]], Any]) -> tuple[Any, torch.cuda.Event | None]:
        outputs = self._take()
        return (work(outputs), None) if self._side is None else _run_on(self._side, work, outputs)

    def _take(self) -> list[Tensor]:
        """Take the outputs from the stager. Once a copy is enqueued, all later uses of its memory run after it."""
        self._copied.wait()
        outputs = self._outputs[:]
        self._outputs.clear()
        return outputs


class TorchCopier:
    """The same through torch alone, for a build without CUDA or a driver that is too old for ours."""

    def __init__(self, device: torch.device, *, fresh: bool = False) -> None:
        self.device = device
        self._fresh = fresh
        self._side = _side_stream(device)

    def start(self, sources: list[Tensor]) -> Copy:
        """Begin to copy ``sources``; an allocation that fails raises here and changes nothing."""
        consumer = _wait_for_consumers(self._side)
        self._side.wait_stream(consumer)
        outputs: list[Tensor] = []
        with torch.cuda.stream(self._side):
            for source in sources:
                if not _is_plain(source):
                    with torch.cuda.stream(consumer):
                        outputs.append(source.to(self.device))
                    continue
                # torch's host allocator keeps the pinned copy until the stream has passed it.
                direct = self._fresh and source.is_pinned()
                pinned = source if direct else torch.empty_like(source, pin_memory=True).copy_(source)
                outputs.append(pinned.to(self.device, non_blocking=True))
            done = torch.cuda.Event()
            done.record(self._side)
        return _TorchCopy(outputs, done, self._side)

    def close(self) -> None:
        """Nothing to end: torch's copies have no thread."""


class _TorchCopy:
    def __init__(self, outputs: list[Tensor], done: torch.cuda.Event, side: torch.cuda.Stream) -> None:
        self._outputs = outputs
        self._done = done
        self._side = side

    def release_sources(self) -> None:
        """Nothing to wait for: staging was done by the caller."""

    def tensors(self) -> list[Tensor]:
        _consumer_of(self._side).wait_event(self._done)
        return self._outputs

    def run(self, work: Callable[[list[Tensor]], Any]) -> tuple[Any, torch.cuda.Event | None]:
        return _run_on(self._side, work, self._outputs)


class DirectCopier:
    """``Tensor.to`` for devices that are neither CPU nor CUDA."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def start(self, sources: list[Tensor]) -> Copy:
        """Copy ``sources``."""
        return _Ready([source.to(self.device) for source in sources])

    def close(self) -> None:
        """Nothing to end."""


class _Ready:
    def __init__(self, outputs: list[Tensor]) -> None:
        self._outputs = outputs

    def release_sources(self) -> None:
        """Nothing to wait for."""

    def tensors(self) -> list[Tensor]:
        return self._outputs

    def run(self, work: Callable[[list[Tensor]], Any]) -> tuple[Any, torch.cuda.Event | None]:
        return work(self._outputs), None
