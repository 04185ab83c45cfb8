"""Events of a Chrome trace."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

RUNTIME = {"cuda_runtime", "cuda_driver"}
"""Kinds of events that are calls of the device's runtime or driver."""


@dataclass(eq=False)
class Event:
    """Interval on a thread of the host or on a stream of a device.

    Attributes:
        name: ``name`` in the trace.
        kind: ``cat`` in the trace.
        start: microseconds.
        end: microseconds.
        thread: identifies the thread or stream.
        args: ``args`` in the trace.
        parent: innermost event of the same thread in which this event starts; None if there is none.
    """

    name: str
    kind: str
    start: float
    end: float
    thread: Any
    args: Mapping[str, Any]
    parent: Event | None = field(default=None, repr=False)

    @property
    def duration(self) -> float:
        return self.end - self.start

    @property
    def is_call(self) -> bool:
        """True for a call of the device's runtime or driver."""
        return self.kind in RUNTIME

    def ancestors(self) -> Iterator[Event]:
        """Yield this event, its parent, and so on outwards."""
        event: Event | None = self
        while event is not None:
            yield event
            event = event.parent

    def operators(self) -> Iterator[Event]:
        """Return an iterator over the operators of torch among ``ancestors``, innermost first."""
        return (event for event in self.ancestors() if event.kind == "cpu_op")


def nest(events: Sequence[Event]) -> None:
    """Set the parent of each event. The events must be sorted by start, the longer ones first.

    Events that were running when profiling stopped all end at that moment, in any order. So the parent of an event is
    the event in which it starts.
    """
    under_way: dict[Any, list[Event]] = {}
    for event in events:
        stack = under_way.setdefault(event.thread, [])
        while stack and stack[-1].end <= event.start:
            stack.pop()
        event.parent = stack[-1] if stack else None
        stack.append(event)
