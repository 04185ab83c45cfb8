"""Implementation of ``Run.log``, which logs values without waiting for the device."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

KEEP = 10_000
"""Default number of values that ``Logs`` stores. Listeners get all values."""

_BLOCK = 64  # slots per allocation, because allocating pinned memory may wait for the device


class Logged(NamedTuple):
    """Logged value.

    Attributes:
        step: the step of the value.
        name: the name of the value.
        value: a Python number that equals the tensor's element exactly.
    """

    step: int
    name: str
    value: Any


Listener = Callable[[int, str, Any], object]
"""Function that is called as ``(step, name, value)`` when a value arrives."""


class _Slot:
    """Pinned number, with an event for its arrival."""

    def __init__(self, host: Tensor) -> None:
        self._host = host
        self._arrived = torch.cuda.Event()

    def send(self, tensor: Tensor) -> None:
        """Queue a copy of the tensor, in stream order."""
        self._host.copy_(tensor, non_blocking=True)
        self._arrived.record(torch.cuda.current_stream(tensor.device))

    def ready(self) -> bool:
        return self._arrived.query()

    def read(self) -> Any:
        if not self.ready():  # a profile shows each call of synchronize as a wait
            self._arrived.synchronize()
        return self._host.item()


class _Sent(NamedTuple):
    """Value on its way to the host. Its slot returns to the pool. A value that is already there has no slot."""

    step: int
    name: str
    value: Any
    slot: _Slot | None
    pool: list[_Slot]


class Logs:
    """Numbers that training logs. Logging does not wait for the device.

    Values on a GPU are copied to pinned memory in stream order, and read by a later call.

    Values arrive in the order of ``log``. Listeners run in the thread that logs or flushes, so a slow listener slows
    the training down. Iterating waits for values on their way, and then yields the last ``keep`` values. All methods
    are thread-safe. CUDA limits the number of values on their way. Its queue holds about a thousand operations, and
    every call waits while the queue is full.

    Args:
        keep: number of values to store.
    """

    def __init__(self, keep: int = KEEP) -> None:
        self._lock = threading.Lock()  # never held during a wait or a listener
        self._on_their_way: deque[_Sent] = deque()
        self._arrived: deque[Logged] = deque(maxlen=keep)
        self._pools: dict[tuple[torch.device, torch.dtype], list[_Slot]] = {}
        self._listeners: list[Listener] = []
        self._delivery = threading.Lock()
        self._deliverer: int | None = None

    def listen(self, listener: Listener) -> Callable[[], None]:
        """Call ``listener(step, name, value)`` for every value that arrives from now on.

        The ``log`` or ``flush`` that delivers a value raises the listener's exceptions.

        Returns:
            A function that removes the listener.
        """
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def log(self, name: str, value: Tensor | Real, step: int) -> None:
        """Log a number. A tensor may be changed or freed right after the call.

        Args:
            name: name of the value.
            value: a number, or a tensor of one element, on any device.
            step: step of the value.

        Raises:
            TypeError: ``value`` is neither a tensor nor a real number.
            ValueError: ``value`` is a tensor of more or less than one element.
        """
        if not isinstance(value, (Tensor, Real)):
            raise TypeError(f"log takes a number or a tensor of one element, got {type(value).__name__} for {name!r}")
        if isinstance(value, Tensor) and value.numel() != 1:
            raise ValueError(f"log takes one number, got a tensor of shape {tuple(value.shape)} for {name!r}")
        sent = self._send(step, name, value)
        with self._lock:
            self._on_their_way.append(sent)
        self._deliver(wait=False)

    def flush(self) -> None:
        """Wait until all logged values have arrived, and pass them to the listeners."""
        self._deliver(wait=True)

    def poll(self) -> bool:
        """Pass the values that have arrived to the listeners, without waiting.

        Returns:
            True if other values are still on their way.
        """
        self._deliver(wait=False)
        return bool(self._on_their_way)

    def latest(self, name: str) -> Any:
        """Return the latest value of a name that has arrived, without waiting, or None if there is no such value."""
        self._deliver(wait=False)
        with self._lock:
            return next((each.value for each in reversed(self._arrived) if each.name == name), None)

    def __iter__(self) -> Iterator[Logged]:
        """Wait until all logged values have arrived, and iterate over the last ``keep`` values."""
        self.flush()
        with self._lock:
            return iter(tuple(self._arrived))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self._arrived)} values, {len(self._on_their_way)} on their way)"

    def _send(self, step: int, name: str, value: Tensor | Real) -> _Sent:
        if not isinstance(value, Tensor):
            return _Sent(step, name, value, None, [])
        if value.device.type != "cuda":
            return _Sent(step, name, value.item(), None, [])
        with self._lock:
            pool = self._pools.setdefault((value.device, value.dtype), [])
            if not pool:
                pool += _slots(value.dtype)
            slot = pool.pop()
        slot.send(value.detach().reshape(()))
        return _Sent(step, name, None, slot, pool)

    def _deliver(self, *, wait: bool) -> None:
        this_thread = threading.get_ident()
        if self._deliverer == this_thread:  # a listener logs, and the delivery that called it delivers this value, too
            return
        if not self._delivery.acquire(blocking=wait):
            return
        self._deliverer = this_thread
        try:
            while (logged := self._next(wait)) is not None:
                for listener in tuple(self._listeners):
                    listener(*logged)
        finally:
            self._deliverer = None
            self._delivery.release()

    def _next(self, wait: bool) -> Logged | None:
        """Return the first value on its way, if it has arrived. Only the delivering thread may call this."""
        with self._lock:
            sent = self._on_their_way[0] if self._on_their_way else None
        if sent is None or (sent.slot is not None and not wait and not sent.slot.ready()):
            return None
        logged = Logged(sent.step, sent.name, sent.value if sent.slot is None else sent.slot.read())
        with self._lock:
            self._on_their_way.popleft()
            self._arrived.append(logged)
            if sent.slot is not None:
                sent.pool.append(sent.slot)
        return logged


def _slots(dtype: torch.dtype) -> list[_Slot]:
    with torch.inference_mode(False):  # normal tensors, because code outside of inference mode writes to them
        block = torch.empty(_BLOCK, dtype=dtype, pin_memory=True)
        return [_Slot(block[i]) for i in range(_BLOCK)]
