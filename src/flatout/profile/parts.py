"""Parts of a step on the main thread, from the marks of flatout or else from torch's own events."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, pairwise, zip_longest
from typing import NamedTuple

from flatout.profile.events import Event
from flatout.profile.profile_data import PHASES, Phase, Step

_MARKED: dict[str, Phase] = {
    "flatout.loader_wait": "loader_wait",
    "flatout.h2d": "h2d",
    "flatout.forward": "forward",
    "flatout.backward": "backward",
    "flatout.update": "update",
}
BACKWARD = ": _engine_run_backward"
"""Suffix of the names of backward events."""
_UPDATES = re.compile(
    r"Optimizer\.(step|zero_grad)#.*|torch/amp/grad_scaler\.py\(\d+\): (unscale_|step|update)"
    r"|torch/nn/utils/clip_grad\.py\(\d+\): .+|torch/optim/lr_scheduler\.py\(\d+\): (step|wrapper)"
)
_COPIES = {"aten::to", "aten::_to_copy", "aten::copy_"}


class PhaseSpan(NamedTuple):
    """Interval in which the main thread is in one part of a step."""

    start: float
    end: float
    phase: Phase


class Parts:
    """Division of the main thread's whole time into parts of steps.

    Args:
        main: events of the main thread, in order of their start.
        trained: operators of the main thread's forwards that a backward followed.
        uploads: calls of the main thread that copy to the device.
        end: end of the last step.

    Attributes:
        spans: in order, without gap or overlap. Time outside all other parts is ``host_idle``.
    """

    def __init__(self, main: Sequence[Event], trained: Sequence[Event], uploads: Sequence[Event], end: float) -> None:
        marked = [
            PhaseSpan(event.start, event.end, _MARKED[event.name])
            for event in main
            if event.kind == "user_annotation" and event.name in _MARKED
        ]
        known = {span.phase for span in marked}
        found = marked + [span for span in _inferred(main, trained, uploads, end) if span.phase not in known]
        self.spans = _flat([*found, *_losses(found)])
        self._starts = [span.start for span in self.spans]

    def at(self, time: float) -> PhaseSpan:
        """Return the span at a moment."""
        return self.spans[bisect_right(self._starts, time) - 1]

    def between(self, start: float, end: float) -> Iterator[PhaseSpan]:
        """Yield the spans of an interval, in order. The first and the last are cut to the interval."""
        for span in islice(self.spans, bisect_right(self._starts, start) - 1, None):
            if span.start >= end:
                return
            yield PhaseSpan(max(span.start, start), min(span.end, end), span.phase)

    def steps(self, boundaries: Sequence[float]) -> tuple[Step, ...]:
        """Return the steps between boundaries, each with the seconds of its parts."""
        found = []
        for start, end in pairwise(boundaries):
            phases = dict.fromkeys(PHASES, 0.0)
            for span in self.between(start, end):
                phases[span.phase] += 1e-6 * (span.end - span.start)
            found.append(Step(1e-6 * (end - start), phases))
        return tuple(found)


def _inferred(
    main: Sequence[Event], trained: Sequence[Event], uploads: Sequence[Event], end: float
) -> Iterator[PhaseSpan]:
    """Yield the parts that torch's own events show, marked ones included."""
    for event in _outermost(event for event in main if event.name.endswith(BACKWARD)):
        yield PhaseSpan(event.start, event.end, "backward")
    for event in _outermost(event for event in main if _UPDATES.fullmatch(event.name)):
        yield PhaseSpan(event.start, event.end, "update")

    calls = _outermost(event for event in main if event.name.startswith("nn.Module: "))
    starts = sorted(operator.start for operator in trained)
    learning = {
        event
        for event in (*calls, *trained)
        if bisect_left(starts, event.start) < bisect_right(starts, event.end)
        and not any(outer.name.endswith(BACKWARD) for outer in event.ancestors())  # recomputes a forward
    }
    for event in learning:
        yield PhaseSpan(event.start, event.end, "forward")

    waits = _outermost(event for event in main if event.name.startswith("enumerate(DataLoader)#"))
    for wait, following in zip_longest(waits, waits[1:]):
        until = end if following is None else following.start
        fed = [call for call in calls if wait.end <= call.start < until]
        if not fed or not learning.isdisjoint(fed):  # else the batch is for an evaluation
            yield PhaseSpan(wait.start, wait.end, "loader_wait")

    for call in uploads:
        *_, outermost = call, *(event for event in call.ancestors() if event.name in _COPIES)
        yield PhaseSpan(outermost.start, outermost.end, "h2d")


def _outermost(events: Iterable[Event]) -> list[Event]:
    """Return the events that lie in no other event."""
    kept: list[Event] = []
    for event in events:
        if not kept or event.start >= kept[-1].end:
            kept.append(event)
    return kept


def _losses(spans: list[PhaseSpan]) -> Iterator[PhaseSpan]:
    """Yield the time between a forward and its backward as forward, because the loss is computed there."""
    begun: float | None = None
    for span in sorted(spans, key=lambda span: span.start):
        if span.phase == "forward" and begun is None:
            begun = span.start
        elif span.phase == "backward" and begun is not None:
            yield PhaseSpan(begun, span.start, "forward")
            begun = None


def _flat(spans: list[PhaseSpan]) -> list[PhaseSpan]:
    """Return spans without overlap. The innermost span counts: an update of LBFGS runs forwards and backwards."""
    always = PhaseSpan(float("-inf"), float("inf"), "host_idle")
    pending = sorted([always, *spans], key=lambda span: (span.start, -span.end))[::-1]
    edges = sorted({edge for span in pending for edge in (span.start, span.end)})
    flat: list[PhaseSpan] = []
    active: list[PhaseSpan] = []
    for start, end in pairwise(edges):
        while pending and pending[-1].start <= start:
            active.append(pending.pop())
        active = [span for span in active if span.end > start]
        phase = active[-1].phase
        if flat and flat[-1].phase == phase:
            flat[-1] = flat[-1]._replace(end=end)
        else:
            flat.append(PhaseSpan(start, end, phase))
    return flat
