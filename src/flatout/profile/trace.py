"""Reader of the Chrome traces of torch's profiler: events, launches, parts of steps, and lines of code.

In torch 2.11 and later, a trace holds call sites, memory, the correlation of launches with kernels, and the links from
forward to backward. The profiler's event objects lack some of these. Times are microseconds.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Mapping
from functools import cached_property
from itertools import takewhile
from os import PathLike
from pathlib import Path
from typing import Any

from flatout.profile.events import RUNTIME, Event, nest
from flatout.profile.parts import Parts
from flatout.profile.places import LOOP, is_users
from flatout.profile.profile_data import Phase

BOUNDARY = "flatout.boundary"
"""Annotation of no length between two steps."""

_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
_HOST = {"cpu_op", "user_annotation", "python_function", *RUNTIME}
_ARGUMENTS = re.compile(r'(?<="args": \{\n).*(?=\n)')
_NAME = re.compile(r'(?<="name": ").*(?=",(?: "pid": .*)?$)', re.MULTILINE)  # not escaped by torch before 2.14
_TEXT = re.compile(r'(?<=": ").*?(?="(?:, "[A-Z][A-Za-z ]*": |$))')
_FUNCTION = re.compile(r"(?P<file>.+)\((?P<line>\d+)\): (?P<name>.+)")


class Trace:
    """Events of one trace.

    Args:
        events: as in the ``traceEvents`` of a Chrome trace.

    Attributes:
        host: events of the host's threads, in order of their start. Of two with one start, the longer is first.
        device: kernels, copies and memsets, in order of their start.
        memory: raw events of the allocators, in order of time.
        main: process and thread number of the thread that trains.
        boundaries: starts of the steps, and end of the last step.
        start: start of the first step.
        end: end of the last step.
        steps: number of steps.

    Raises:
        ValueError: ``events`` hold fewer than two boundaries, so no step.
    """

    def __init__(self, events: Iterable[Mapping[str, Any]]) -> None:
        self.host: list[Event] = []
        self.device: list[Event] = []
        self.memory: list[Mapping[str, Any]] = []
        forward: dict[Any, tuple[Any, float]] = {}
        backward: dict[Any, tuple[Any, float]] = {}
        for raw in events:
            kind, thread = raw.get("cat", ""), (raw.get("pid"), raw.get("tid"))
            if kind == "fwdbwd":
                (forward if raw["ph"] == "s" else backward)[raw["id"]] = thread, raw["ts"]
            elif kind == "cpu_instant_event" and raw["name"] == "[memory]":
                self.memory.append(raw)
            elif raw.get("ph") == "X" and (kind in _HOST or kind in _DEVICE):
                start = float(raw["ts"])
                event = Event(raw["name"], kind, start, start + float(raw.get("dur", 0)), thread, raw.get("args", {}))
                (self.device if kind in _DEVICE else self.host).append(event)
        self.device.sort(key=lambda event: event.start)
        self.memory.sort(key=lambda raw: raw["ts"])
        self.host.sort(key=lambda event: (event.start, -event.end))
        nest(self.host)
        calls = (event for event in self.host if event.is_call and "correlation" in event.args)
        self._launches = {call.args["correlation"]: call for call in calls}
        operators = {(event.thread, event.start): event for event in self.host if event.kind == "cpu_op"}
        self._forward_of = {
            place: operators[forward[key]] for key, place in backward.items() if forward.get(key) in operators
        }
        marks = [event for event in self.host if event.name == BOUNDARY]
        if len(marks) < 2:
            raise ValueError(f"the trace must hold at least one step, between two boundaries; it has {len(marks)}")
        self.main = marks[0].thread
        self.boundaries = [mark.start for mark in marks]
        self.start, self.end, self.steps = marks[0].start, marks[-1].start, len(marks) - 1

    @classmethod
    def read(cls, path: str | PathLike[str]) -> Trace:
        """Read a trace that ``export_chrome_trace`` wrote. A file with invalid JSON is repaired and written back."""
        text = Path(path).read_text(encoding="utf-8", errors="replace")
        try:
            trace = json.loads(text)
        except json.JSONDecodeError:  # kineto does not escape quotes in names of files
            text = _NAME.sub(lambda name: _escaped(name[0]), text)
            trace = json.loads(_ARGUMENTS.sub(_repaired, text), strict=False)
            Path(path).write_text(json.dumps(trace), encoding="utf-8")
        return cls(trace["traceEvents"])

    def within(self, events: Iterable[Event]) -> list[Event]:
        """Return the events that begin in the profiled steps."""
        return [event for event in events if self.start <= event.start < self.end]

    @cached_property
    def parts(self) -> Parts:
        """Parts of the steps on the main thread."""
        main = [event for event in self.host if event.thread == self.main]
        trained = [event for event in self.differentiated if event.thread == self.main]
        uploads = (event for event in self.device if event.kind == "gpu_memcpy" and "HtoD" in event.name)
        calls = (call for call in map(self.launch_of, uploads) if call is not None and call.thread == self.main)
        return Parts(main, trained, list(calls), self.end)

    def phase_of(self, event: Event) -> Phase:
        """Return the part of a step in which the main thread is when an event begins.

        Events of autograd's own threads get the right part, because the main thread is in backward at the same time.
        """
        return self.parts.at(event.start).phase

    @cached_property
    def training_threads(self) -> set[Any]:
        """Main thread and autograd's own threads, without threads that load or pin batches."""
        engine = {event.thread for event in self.host if event.name.startswith("autograd::engine::")}
        return engine | {self.main}

    @property
    def differentiated(self) -> set[Event]:
        """Operators of forwards that a backward followed."""
        return set(self._forward_of.values())

    @property
    def on_cuda(self) -> bool:
        """True if tensors were on a GPU, even if the trace has no kernels."""
        return bool(self.device) or any(told["args"].get("Device Type") == 1 for told in self.memory)

    def launch_of(self, work: Event) -> Event | None:
        """Return the runtime call on the host that launched a kernel or copy; None if the trace lacks the call."""
        return self._launches.get(work.args.get("correlation"))

    def where(self, event: Event) -> str:
        """Return ``file:line`` of the user's code that causes a host event; empty if unknown.

        A backward operator has the line of its forward operator. The place is a function, ``file:line (name)``, if the
        trace has no call sites or the expression calls no function.
        """
        origins = (self._forward_of.get((outer.thread, outer.start)) for outer in event.operators())
        served = next(filter(None, origins), event)
        inside = takewhile(lambda outer: not _is_loop(outer), served.ancestors())
        places = (_own_place(outer) for outer in inside if outer.kind == "python_function")
        return next(filter(None, places), "")

    def hot_lines(self, phase: Phase) -> dict[str, float]:
        """Return the seconds per step of places in the user's code during a part of the steps, costliest first."""
        spent: dict[str, float] = {}
        counted = float("-inf")
        for event in self.within(self.host):
            if event.kind != "python_function" or event.thread != self.main or event.start < counted:
                continue
            place, part = _own_place(event), self.parts.at(event.start)
            if place and part.phase == phase and event.end <= part.end:
                spent[place] = spent.get(place, 0.0) + 1e-6 * event.duration / self.steps
                counted = event.end
        return dict(sorted(spent.items(), key=lambda item: -item[1]))


def _repaired(arguments: re.Match[str]) -> str:
    """Return the arguments of an event with escaped quotes inside texts; empty if the result is still not valid."""
    line = arguments[0]
    for text in (line, _TEXT.sub(lambda value: _escaped(value[0]), line)):
        if _is_valid(f"{{{text}}}"):
            return text
    return ""


def _escaped(text: str) -> str:
    """Return the inside of a JSON string, escaped if the inside is not valid."""
    return text if _is_valid(f'"{text}"') else json.dumps(text)[1:-1]


def _is_valid(text: str) -> bool:
    with contextlib.suppress(json.JSONDecodeError):
        json.loads(text, strict=False)
        return True
    return False


def _is_loop(event: Event) -> bool:
    """Return True for the function that runs the steps of a profile."""
    function = _FUNCTION.fullmatch(event.name) if event.name.endswith(LOOP[1]) else None
    return function is not None and (function["file"], function["name"]) == LOOP


def _own_place(event: Event) -> str:
    """Return the place of a function in the user's code, or else the place in the user's code that calls it."""
    function = _FUNCTION.fullmatch(event.name)
    if function is not None and is_users(function["file"]):
        return f"{function['file']}:{function['line']} ({function['name']})"
    caller = event.args.get("CallFrom", "")
    return caller if caller and is_users(caller.rpartition(":")[0]) else ""
