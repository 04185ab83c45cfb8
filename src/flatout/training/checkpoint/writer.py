"""Writer of states to files, in the background if requested, from copies in host memory."""

from __future__ import annotations

import collections
import copy
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flatout.training.checkpoint import file


class Writer:
    """Writer of checkpoints in a thread, one at a time. At exit, the process waits for the last write."""

    def __init__(self) -> None:
        self._copies = HostCopies()
        self._thread: ThreadPoolExecutor | None = None
        self._under_way: Future[None] | None = None

    def write(
        self, path: str | Path, state: Any, *, asynchronous: bool = False, then: Callable[[], object] | None = None
    ) -> None:
        """Write the current state, after the previous write is complete.

        Args:
            path: the file.
            state: see :func:`flatout.training.checkpoint.file.write`.
            asynchronous: True to copy the state into host memory, and to write the copy while training continues.
            then: called by the writing thread when the state is on disk.

        Raises:
            TypeError: the state holds an object that cannot be written.
            OSError: this write failed, or the previous asynchronous write failed. In the second case this write is
                complete, or has started if ``asynchronous``.
        """
        failed = self._failure()
        if not asynchronous:
            _write(path, mapped(state, lambda tensor: tensor.detach()), then)
        else:
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, "flatout-checkpoint")
            self._under_way = self._thread.submit(self._write_copy, path, self._copies.copy(state), then)
        if failed is not None:
            raise failed

    def wait(self) -> None:
        """Wait until the last state is on disk, and raise the error of its write."""
        failed = self._failure()
        if failed is not None:
            raise failed

    def _failure(self) -> BaseException | None:
        """Wait for the write, and return its error. If the wait is interrupted, the next call waits again."""
        if self._under_way is None:
            return None
        failed = self._under_way.exception()
        self._under_way = None
        return failed

    def _write_copy(self, path: str | Path, copy: Any, then: Callable[[], object] | None) -> None:
        try:
            self._copies.wait()
            _write(path, copy, then)
        except Exception as error:  # the next call raises the error, but there may be no next call
            warnings.warn(f"the checkpoint {path} was not written: {error}", RuntimeWarning, stacklevel=1)
            raise


def _write(path: str | Path, state: Any, then: Callable[[], object] | None) -> None:
    file.write(path, state)
    if then is not None:
        then()


_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_DICTS = (dict, collections.OrderedDict, collections.Counter)


def mapped(state: Any, tensor: Callable[[Tensor], Tensor]) -> Any:
    """Return a copy of a state with other tensors and new containers.

    Args:
        state: tensors, numbers, strings, and lists, tuples and dicts of these.
        tensor: function that maps a tensor, and is called once per tensor, so that tied weights stay tied.

    Raises:
        TypeError: the state holds an object that ``torch.load`` rejects, or a distributed tensor. The message names the
            place of the object.
    """
    known: dict[Any, Tensor] = {}

    def visit(value: Any, where: str) -> Any:
        if isinstance(value, Tensor):
            if type(value) not in (Tensor, nn.Parameter):
                raise TypeError(
                    f"{where} is a {type(value).__name__}: a checkpoint holds plain tensors; distributed ones are for "
                    "torch.distributed.checkpoint"
                )
            key = _memory_of(value)
            if key not in known:
                known[key] = tensor(value)
            return known[key]
        if type(value) in _DICTS:
            changed = copy.copy(value)  # keeps attributes, such as the metadata of a module's state_dict
            changed.clear()
            for name, each in value.items():
                changed[visit(name, f"the key {name!r} of {where}")] = visit(each, f"{where}[{name!r}]")
            return changed
        if type(value) in (list, tuple):
            return type(value)(visit(each, f"{where}[{i}]") for i, each in enumerate(value))
        if isinstance(value, np.generic):
            return value.item()
        if type(value) in _PLAIN:
            return value
        raise TypeError(
            f"{where} is a {type(value).__name__}: a checkpoint holds tensors, numbers, strings, and containers of them"
        )

    return visit(state, "state")


def _memory_of(tensor: Tensor) -> Any:
    """Return one key for all tensors over the same elements.

    A ``state_dict`` makes one tensor for each name of a tied weight.
    """
    if tensor.layout is not torch.strided or tensor.data_ptr() == 0:
        return id(tensor)
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device


class HostCopies:
    """Copies of states in host memory. Each copy reuses the buffers of the previous copy.

    The training stream copies tensors on a GPU, in order with its other work. So the host does not wait, and the copy
    contains no write of a later step.
    """

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []
        self._used = 0
        self._events: list[torch.cuda.Event] = []

    def copy(self, state: Any) -> Any:
        """Return a copy of a state. The copy is complete after ``wait``, and valid until the next ``copy``.

        Raises:
            TypeError: as in ``mapped``.
        """
        self._used = 0
        devices: set[torch.device] = set()

        def copied(tensor: Tensor) -> Tensor:
            devices.add(tensor.device)
            if tensor.layout is not torch.strided:
                return tensor.detach().cpu().clone()
            return self._buffer_like(tensor).copy_(tensor.detach(), non_blocking=True)

        with torch.no_grad():
            found = mapped(state, copied)
        del self._buffers[self._used :]
        self._events = []
        for device in devices:
            if device.type == "cuda":
                self._events.append(torch.cuda.Event(blocking=True))
                self._events[-1].record(torch.cuda.current_stream(device))
        return found

    def wait(self) -> None:
        """Wait until the copy is complete."""
        for event in self._events:
            event.synchronize()

    def _buffer_like(self, tensor: Tensor) -> Tensor:
        position, self._used = self._used, self._used + 1
        if position < len(self._buffers) and _alike(self._buffers[position], tensor):
            return self._buffers[position]
        pinned = tensor.device.type == "cuda"
        self._buffers[position:] = [torch.empty_like(tensor, device="cpu", pin_memory=pinned, requires_grad=False)]
        return self._buffers[position]


def _alike(buffer: Tensor, tensor: Tensor) -> bool:
    return buffer.dtype is tensor.dtype and buffer.shape == tensor.shape and buffer.stride() == tensor.stride()
