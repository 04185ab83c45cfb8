"""Idle intervals of the GPU, and their causes."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from flatout.profile.events import Event
from flatout.profile.profile_data import Cause, Gaps, Phase
from flatout.profile.trace import Trace


@dataclass(frozen=True)
class Gap:
    """Interval of one cause in which the device ran neither kernels nor copies. Times are microseconds of the trace."""

    start: float
    end: float
    cause: Cause
    phase: Phase
    where: str


def busy(trace: Trace) -> list[tuple[float, float]]:
    """Return the intervals within the steps in which any stream of the device worked, in order and without overlap."""
    merged: list[tuple[float, float]] = []
    for work in trace.device:
        start, end = max(work.start, trace.start), min(work.end, trace.end)
        if start >= end:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def gaps(trace: Trace) -> list[Gap]:
    """Return all intervals without work on the device, in order, divided by the part of the step on the host.

    The gaps and ``busy`` together cover the profiled steps. The device causes a gap if the host launched the next work
    before the gap. A wait for the device leaves the device's queue empty. If a gap begins during a wait, the wait
    causes all of the gap except loading and copying.
    """
    if not trace.device:
        return []
    found: list[Gap] = []
    at = trace.start
    starts = [work.start for work in trace.device]
    waits = _waits(trace)
    wait_starts = [wait.start for wait in waits]
    for start, end in [*busy(trace), (trace.end, trace.end)]:
        if start > at:
            index = bisect_left(starts, start)
            following = trace.device[index] if index < len(starts) else None
            launch = None if following is None else trace.launch_of(following)
            last = bisect_right(wait_starts, at) - 1
            wait = waits[last] if last >= 0 and waits[last].end >= at else None
            found += _divided(trace, at, start, launch, wait)
        at = end
    return found


def grouped(trace: Trace, found: Iterable[Gap]) -> tuple[Gaps, ...]:
    """Return the sums of gaps with the same cause, part of the step and place, costliest first."""
    lengths: dict[tuple[Cause, Phase, str], list[float]] = defaultdict(list)
    for gap in found:
        lengths[gap.cause, gap.phase, gap.where].append(1e-6 * (gap.end - gap.start))
    groups = [
        Gaps(*key, count=len(each) / trace.steps, seconds=sum(each) / trace.steps, longest=max(each))
        for key, each in lengths.items()
    ]
    return tuple(sorted(groups, key=lambda group: -group.seconds))


def _waits(trace: Trace) -> list[Event]:
    """Return the calls of training that wait for the device, copies from and to pageable memory included."""
    paged = {trace.launch_of(work) for work in trace.device if work.kind == "gpu_memcpy" and "Pageable" in work.name}
    return [
        event
        for event in trace.host
        if event.is_call
        and event.thread in trace.training_threads
        and ("Synchronize" in event.name or event.name in ("cudaMemcpy", "hipMemcpy") or event in paged)
    ]


def _divided(trace: Trace, start: float, end: float, launch: Event | None, wait: Event | None) -> Iterator[Gap]:
    if launch is not None and launch.end <= start:
        operator = next(launch.operators(), None)
        yield Gap(start, end, "device", trace.phase_of(launch), "" if operator is None else operator.name)
        return
    drained_by = "" if wait is None else trace.where(wait) or wait.name
    drained_in = None if wait is None else trace.phase_of(wait)
    for span in trace.parts.between(start, end):
        if span.phase in ("loader_wait", "h2d"):
            yield Gap(span.start, span.end, "loader" if span.phase == "loader_wait" else "copy", span.phase, "")
        elif drained_in is not None:
            yield Gap(span.start, span.end, "copy" if drained_in == "h2d" else "sync", drained_in, drained_by)
        else:
            yield Gap(span.start, span.end, "own code" if span.phase == "host_idle" else "launch", span.phase, "")
