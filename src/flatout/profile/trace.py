"""A Chrome trace of torch's profiler, as facts: who ran when, in which part of a step, and for which line of code.

The trace is the one source: unlike the profiler's event objects it has everything (call sites, memory, correlation of
launches with kernels, links from forward to backward) in every torch from 2.11 on. Times are microseconds.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise, zip_longest
from os import PathLike
from typing import Any, NamedTuple

from flatout.profile.places import is_users
from flatout.profile.summary import Phase

BOUNDARY = "flatout.boundary"
"""Annotation of no length between two steps."""

_MARKED: dict[str, Phase] = {
    "flatout.loader_wait": "loader_wait",
    "flatout.h2d": "h2d",
    "flatout.forward": "forward",
    "flatout.backward": "backward",
    "flatout.update": "update",
}
_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
RUNTIME = {"cuda_runtime", "cuda_driver"}
_FUNCTION = re.compile(r"(?P<file>.+)\((?P<line>\d+)\): (?P<name>.+)")
_UPDATES = re.compile(
    r"Optimizer\.(step|zero_grad)#.*|torch/amp/grad_scaler\.py\(\d+\): (unscale_|step|update)"
    r"|torch/nn/utils/clip_grad\.py\(\d+\): .+|torch/optim/lr_scheduler\.py\(\d+\): (step|wrapper)"
)
_COPIES = {"aten::to", "aten::_to_copy", "aten::copy_"}


@dataclass(eq=False)
class Event:
    """Something that took time on a thread of the host, or on a stream of a device.

    Attributes:
        parent: the shortest event of the same thread that holds this one.
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

    def ancestors(self) -> Iterator[Event]:
        """This event, the one that holds it, and so on outwards."""
        event: Event | None = self
        while event is not None:
            yield event
            event = event.parent


class Span(NamedTuple):
    """A stretch of the main thread that belongs to one part of a step."""

    start: float
    end: float
    phase: Phase


class Trace:
    """The events of one trace.

    Args:
        events: as in the ``traceEvents`` of a Chrome trace.

    Raises:
        ValueError: there are fewer than two boundaries, so no step.
    """

    def __init__(self, events: Iterable[Mapping[str, Any]]) -> None:
        self.host: list[Event] = []
        self.device: list[Event] = []
        self.memory: list[Mapping[str, Any]] = []
        self._forward_of: dict[tuple[Any, float], tuple[Any, float]] = {}
        forward: dict[Any, tuple[Any, float]] = {}
        backward: dict[Any, tuple[Any, float]] = {}
        for raw in events:
            kind = raw.get("cat", "")
            if kind == "fwdbwd":
                (forward if raw["ph"] == "s" else backward)[raw["id"]] = (_thread(raw), raw["ts"])
            elif kind == "cpu_instant_event" and raw["name"] == "[memory]":
                self.memory.append(raw)
            elif raw.get("ph") == "X" and (kind in _DEVICE or kind in RUNTIME or kind in _HOST):
                start = float(raw["ts"])
                event = Event(
                    raw["name"], kind, start, start + float(raw.get("dur", 0)), _thread(raw), raw.get("args", {})
                )
                (self.device if kind in _DEVICE else self.host).append(event)
        self._forward_of = {backward[key]: place for key, place in forward.items() if key in backward}
        self.device.sort(key=lambda event: event.start)
        self.memory.sort(key=lambda raw: raw["ts"])
        self.host.sort(key=lambda event: (event.start, -event.end))
        _nest(self.host)
        marks = [event for event in self.host if event.name == BOUNDARY]
        if len(marks) < 2:
            raise ValueError(f"the trace must hold at least one step, between two boundaries; it has {len(marks)}")
        self.main = marks[0].thread
        self.boundaries = [mark.start for mark in marks]

    @classmethod
    def read(cls, path: str | PathLike[str]) -> Trace:
        """Reads what ``export_chrome_trace`` wrote."""
        with open(path, encoding="utf-8", errors="replace") as file:
            return cls(json.load(file)["traceEvents"])

    @property
    def start(self) -> float:
        """The beginning of the first step."""
        return self.boundaries[0]

    @property
    def end(self) -> float:
        """The end of the last step."""
        return self.boundaries[-1]

    @property
    def steps(self) -> int:
        """Number of steps."""
        return len(self.boundaries) - 1

    @cached_property
    def spans(self) -> list[Span]:
        """The parts of the steps on the main thread, in order, without overlap; between them lies ``host_idle``."""
        return _flat(sorted(self._phases(), key=lambda span: (span.start, -span.end)))

    def phase_at(self, time: float) -> Phase:
        """The part of a step that the main thread is in."""
        index = bisect_right(self._span_starts, time) - 1
        if index >= 0 and time < self.spans[index].end:
            return self.spans[index].phase
        return "host_idle"

    def phase_of(self, event: Event) -> Phase:
        """The part of a step that a host event belongs to. autograd's own threads work while main is in backward."""
        return self.phase_at(event.start)

    def divided(self, start: float, end: float) -> Iterator[Span]:
        """The parts of a stretch of time, in order, ``host_idle`` included."""
        at = start
        for span in self.spans[max(0, bisect_right(self._span_starts, start) - 1) :]:
            if span.start >= end:
                break
            if span.end <= at:
                continue
            if span.start > at:
                yield Span(at, span.start, "host_idle")
                at = span.start
            yield Span(at, min(span.end, end), span.phase)
            at = min(span.end, end)
        if at < end:
            yield Span(at, end, "host_idle")

    def where(self, event: Event) -> str:
        """``file:line`` of the user's code that a host event serves; empty when not known.

        A backward operator serves the line of its forward operator. Without call sites in the trace (an older torch),
        or where an expression calls no function, the place is that of the function: ``file:line (name)``.
        """
        for outer in event.ancestors():
            origin = self._forward_of.get((outer.thread, outer.start))
            if origin is not None and outer.kind == "cpu_op" and origin in self._forward_ops:
                return _called_from(self._forward_ops[origin])
        return _called_from(event)

    def hot_lines(self, phase: Phase) -> dict[str, float]:
        """Where the user's code spends a part of the steps: place to seconds per step, costliest first."""
        spent: dict[str, float] = {}
        counted = float("-inf")
        for event in self.host:
            if event.kind != "python_function" or event.thread != self.main or event.start < counted:
                continue
            place = _own_place(event)
            if place and self.start <= event.start < self.end and self._lies_in(event, phase):
                spent[place] = spent.get(place, 0.0) + 1e-6 * event.duration / self.steps
                counted = event.end
        return dict(sorted(spent.items(), key=lambda item: -item[1]))

    def _lies_in(self, event: Event, phase: Phase) -> bool:
        """Whether all of an event is in one stretch of that part of a step."""
        following = bisect_right(self._span_starts, event.start)
        if phase != "host_idle":
            span = self.spans[following - 1] if following else None
            return span is not None and span.phase == phase and event.end <= span.end
        return self.phase_at(event.start) == phase and (
            following == len(self.spans) or event.end <= self.spans[following].start
        )

    @cached_property
    def training_threads(self) -> set[Any]:
        """The main thread and autograd's own: not those that load or pin batches."""
        engine = {event.thread for event in self.host if event.name.startswith("autograd::engine::")}
        return engine | {self.main}

    @property
    def on_cuda(self) -> bool:
        """Whether tensors were on a GPU, its kernels recorded or not."""
        return bool(self.device) or any(told["args"].get("Device Type") == 1 for told in self.memory)

    def launch_of(self, work: Event) -> Event | None:
        """The runtime call on the host that a kernel or copy comes from."""
        return self._launches.get(work.args.get("correlation"))

    def operator_of(self, call: Event) -> Event | None:
        """The innermost operator that a runtime call is made by."""
        return next((event for event in call.ancestors() if event.kind == "cpu_op"), None)

    def within(self, events: list[Event]) -> list[Event]:
        """Those of ``events``, in order of their start, that begin in the profiled steps."""
        return [event for event in events if self.start <= event.start < self.end]

    @cached_property
    def _launches(self) -> dict[Any, Event]:
        return {
            event.args["correlation"]: event
            for event in self.host
            if event.kind in RUNTIME and "correlation" in event.args
        }

    @cached_property
    def _forward_ops(self) -> dict[tuple[Any, float], Event]:
        origins = set(self._forward_of.values())
        return {
            (event.thread, event.start): event
            for event in self.host
            if event.kind == "cpu_op" and (event.thread, event.start) in origins
        }

    @cached_property
    def _span_starts(self) -> list[float]:
        return [span.start for span in self.spans]

    def _phases(self) -> list[Span]:
        """The marked parts; for a part that nobody marked, what torch itself tells of it."""
        main = [event for event in self.host if event.thread == self.main]
        marked = [
            Span(event.start, event.end, _MARKED[event.name])
            for event in main
            if event.kind == "user_annotation" and event.name in _MARKED
        ]
        known = {span.phase for span in marked}
        found = [span for span in self._inferred(main) if span.phase not in known]
        return marked + found + _losses(marked + found)

    def _inferred(self, main: list[Event]) -> list[Span]:
        spans = []
        backwards = _outermost(event for event in main if event.name.endswith(": _engine_run_backward"))
        spans += [Span(event.start, event.end, "backward") for event in backwards]
        spans += [Span(e.start, e.end, "update") for e in _outermost(e for e in main if _UPDATES.fullmatch(e.name))]

        calls = _outermost(event for event in main if event.name.startswith("nn.Module: "))
        ops = [event for (thread, _), event in self._forward_ops.items() if thread == self.main]
        trained = [op.start for op in ops]
        learning = {
            id(call)
            for call in [*calls, *ops]
            if bisect_left(trained, call.start) < bisect_right(trained, call.end)
            and not any("_engine_run_backward" in outer.name for outer in call.ancestors())  # recomputes a forward
        }
        spans += [Span(call.start, call.end, "forward") for call in [*calls, *ops] if id(call) in learning]

        waits = _outermost(event for event in main if event.name.startswith("enumerate(DataLoader)#"))
        for wait, following in zip_longest(waits, waits[1:]):
            until = self.end if following is None else following.start
            between = [call for call in calls if wait.end <= call.start < until]
            if not between or any(id(call) in learning for call in between):  # else it feeds an evaluation
                spans.append(Span(wait.start, wait.end, "loader_wait"))

        for copy in self.device:
            call = self.launch_of(copy) if copy.kind == "gpu_memcpy" and "HtoD" in copy.name else None
            if call is not None and call.thread == self.main:
                outer = [event for event in call.ancestors() if event.name in _COPIES] or [call]
                spans.append(Span(outer[-1].start, outer[-1].end, "h2d"))
        return spans


_HOST = {"cpu_op", "user_annotation", "python_function"}


def _thread(raw: Mapping[str, Any]) -> Any:
    return raw.get("pid"), raw.get("tid")


def _nest(events: list[Event]) -> None:
    """Tells each event its parent. Events are sorted by start, the longer ones first.

    What was under way when profiling stopped ends with it, parents and children in any order: an event's parent is
    the one that it begins in.
    """
    under_way: dict[Any, list[Event]] = {}
    for event in events:
        stack = under_way.setdefault(event.thread, [])
        while stack and stack[-1].end <= event.start:
            stack.pop()
        event.parent = stack[-1] if stack else None
        stack.append(event)


def _outermost(events: Iterable[Event]) -> list[Event]:
    """Without those that lie in another of them."""
    kept: list[Event] = []
    for event in events:
        if not kept or event.start >= kept[-1].end:
            kept.append(event)
    return kept


def _losses(spans: list[Span]) -> list[Span]:
    """From a forward to its backward whatever is nothing else is forward too: the loss."""
    losses: list[Span] = []
    begun: float | None = None
    for span in sorted(spans, key=lambda span: span.start):
        if span.phase == "forward" and begun is None:
            begun = span.start
        elif span.phase == "backward" and begun is not None:
            losses.append(Span(begun, span.start, "forward"))
            begun = None
    return losses


def _flat(spans: list[Span]) -> list[Span]:
    """Without overlap: the innermost counts (an update of LBFGS runs forwards and backwards)."""
    edges = sorted({edge for span in spans for edge in (span.start, span.end)})
    flat: list[Span] = []
    pending, active = list(reversed(spans)), list[Span]()
    for start, end in pairwise(edges):
        while pending and pending[-1].start <= start:
            active.append(pending.pop())
        active = [span for span in active if span.end > start]
        if not active:
            continue
        phase = active[-1].phase
        if flat and flat[-1].phase == phase and flat[-1].end == start:
            flat[-1] = flat[-1]._replace(end=end)
        else:
            flat.append(Span(start, end, phase))
    return flat


def _own_place(event: Event) -> str:
    """The place of one Python function in the user's code: where it is, or else where it is called from."""
    function = _FUNCTION.fullmatch(event.name)
    if function is not None and is_users(function["file"]):
        return f"{function['file']}:{function['line']} ({function['name']})"
    caller = event.args.get("CallFrom", "")
    return caller if caller and is_users(caller.rpartition(":")[0]) else ""


def _called_from(event: Event) -> str:
    places = (_own_place(outer) for outer in event.ancestors() if outer.kind == "python_function")
    return next(filter(None, places), "")
