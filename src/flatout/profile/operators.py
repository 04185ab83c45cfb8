"""Costs of torch's operators, and the lines of code that cause them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from itertools import islice

from flatout.profile.events import Event
from flatout.profile.profile_data import PHASES, Operator, Phase
from flatout.profile.trace import Trace


def operators(trace: Trace, limit: int = 15) -> tuple[Operator, ...]:
    """Return the costliest operators, by the time of their own kernels.

    Without a device, the operators' own time on the host counts.

    Args:
        trace: trace of at least one step.
        limit: largest number of operators.
    """
    calls: dict[str, int] = defaultdict(int)
    host: dict[str, float] = defaultdict(float)
    device: dict[str, float] = defaultdict(float)
    places: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    ranked = device if trace.device else host

    ops = [event for event in trace.within(trace.host) if event.kind == "cpu_op"]
    inner: dict[Event, float] = defaultdict(float)
    for op in ops:
        outer = next(islice(op.operators(), 1, None), None)
        if outer is not None:
            inner[outer] += op.duration
    for op in ops:
        own = max(0.0, op.duration - inner[op])
        calls[op.name] += 1
        host[op.name] += own
        if not trace.device:
            places[op.name][trace.where(op)] += own
    for work in trace.within(trace.device):
        launch = trace.launch_of(work)
        launcher = None if launch is None else next(launch.operators(), None)
        name = work.name if launcher is None else launcher.name
        calls[name] += launcher is None
        device[name] += work.duration
        if launch is not None:
            places[name][trace.where(launch)] += work.duration

    wall = trace.end - trace.start
    to_seconds = 1e-6 / trace.steps
    return tuple(
        Operator(
            name=name,
            calls=calls[name] / trace.steps,
            host_seconds=host[name] * to_seconds,
            device_seconds=device[name] * to_seconds,
            share=ranked[name] / wall,
            where=max(places[name], key=places[name].__getitem__, default=""),
        )
        for name in sorted(calls, key=lambda name: (-ranked[name], -host[name]))[:limit]
    )


def device_phases(trace: Trace) -> Mapping[Phase, float]:
    """Return seconds per step of kernels and copies, by the part of the step that launched them; empty without any."""
    spent = dict.fromkeys(PHASES, 0.0)
    for work in trace.within(trace.device):
        launch = trace.launch_of(work)
        spent[trace.phase_of(launch or work)] += work.duration
    return {phase: 1e-6 * time / trace.steps for phase, time in spent.items()} if trace.device else {}


def top_kernel(trace: Trace) -> str:
    """Return the name of the kernel with the most device time; empty without a kernel."""
    spent: dict[str, float] = defaultdict(float)
    for work in trace.within(trace.device):
        if work.kind == "kernel":
            spent[work.name] += work.duration
    return max(spent, key=spent.__getitem__, default="")
