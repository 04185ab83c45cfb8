"""Values of training, logged without waiting for the device: the inside of ``Run.log``."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

KEEP = 10_000
"""Values that ``Logs`` remembers; a listener hears of all."""

_BLOCK = 64  # slots that one allocation makes: allocating pinned memory may wait for the device


class Logged(NamedTuple):
    """One value.

    Attributes:
        step: when it was logged.
        name: what it is.
        value: a Python number, exactly what the tensor held.
    """

    step: int
    name: str
    value: Any


Listener = Callable[[int, str, Any], object]
"""``(step, name, value)``, called for every value once it is there."""


class _Slot:
    """A pinned number, and when it has arrived there."""

    def __init__(self, host: Tensor) -> None:
        self._host = host
        self._arrived = torch.cuda.Event()

    def send(self, tensor: Tensor) -> None:
        """Queue the copy behind whatever computes the tensor, and before whatever changes it later."""
        self._host.copy_(tensor, non_blocking=True)
        self._arrived.record(torch.cuda.current_stream(tensor.device))

    def ready(self) -> bool:
        return self._arrived.query()

    def read(self) -> Any:
        self._arrived.synchronize()
        return self._host.item()


class _Sent(NamedTuple):
    """A value on its way: in a slot that goes back to its pool afterwards, or there already."""

    step: int
    name: str
    value: Any
    slot: _Slot | None
    pool: list[_Slot]


class Logs:
    """Numbers that training logs. Logging never waits: what a GPU has yet to compute is copied to pinned memory behind
    the work that is queued, and read when a later call finds it there.

    Values come out in the order in which they went in. Listeners run in the thread that logs or flushes, so that
    nothing runs beside the training that it has not started; one that is slow is the training's own time.
    Iterating waits for what is on its way, then gives the last ``keep`` values. Any thread may call anything.

    What is on its way is bounded by CUDA, whose queue takes about a thousand operations and then makes any call wait.

    Args:
        keep: values to remember.
    """

    def __init__(self, keep: int = KEEP) -> None:
        self._lock = threading.Lock()  # held for moments: never while something is waited for or somebody listens
        self._on_their_way: deque[_Sent] = deque()
        self._arrived: deque[Logged] = deque(maxlen=keep)
        self._pools: dict[tuple[torch.device, torch.dtype], list[_Slot]] = {}
        self._listeners: list[Listener] = []
        self._delivery = threading.Lock()
        self._deliverer: int | None = None

    def listen(self, listener: Listener) -> Callable[[], None]:
        """Call ``listener(step, name, value)`` for every value that arrives from now on.

        An exception of the listener comes out of the call that delivered: a ``log`` or a ``flush``.

        Returns:
            Call it to end that.
        """
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def log(self, name: str, value: Tensor | Real, step: int) -> None:
        """Log a number. A tensor may be changed or freed at once.

        Args:
            name: what it is.
            value: a number, or a tensor of one element, on any device.
            step: when it is logged.

        Raises:
            TypeError: ``value`` is neither a tensor nor a real number.
            ValueError: a tensor of more or less than one element.
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
        """Wait until everything logged so far is there, and hand it to the listeners."""
        self._deliver(wait=True)

    def poll(self) -> bool:
        """Pass the values that have arrived to the listeners, without waiting.

        Returns:
            True if other values are still on their way.
        """
        self._deliver(wait=False)
        return bool(self._on_their_way)

    def latest(self, name: str) -> Any:
        """The last value of that name that is there already, without waiting; None when there is none."""
        self._deliver(wait=False)
        with self._lock:
            return next((each.value for each in reversed(self._arrived) if each.name == name), None)

    def __iter__(self) -> Iterator[Logged]:
        """The last values, those on their way included."""
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
        if self._deliverer == this_thread:  # a listener logs: the delivery that it is part of comes to that, too
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
        """The first value on its way, if it has arrived; only the one who delivers may ask."""
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
    with torch.inference_mode(False):  # they are written to from outside, too
        block = torch.empty(_BLOCK, dtype=dtype, pin_memory=True)
        return [_Slot(block[i]) for i in range(_BLOCK)]
