"""From a trace to a profile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import torch

from flatout.profile.advice import advise
from flatout.profile.gaps import gaps, grouped
from flatout.profile.memory_timeline import memory
from flatout.profile.nsight import kernel_filter
from flatout.profile.operators import device_phases, operators, top_kernel
from flatout.profile.places import code_at
from flatout.profile.profile_data import PHASES, Step, Sync, TraceFile
from flatout.profile.shown_profile import Profile
from flatout.profile.trace import Trace
from flatout.report.environment import environment_of


def summarise(
    trace: Trace,
    *,
    unprofiled_seconds: float | None = None,
    syncs: Sequence[Sync] = (),
    samples: float | None = None,
    commands: Sequence[str] = (),
    verdict: str = "",
    trace_file: TraceFile | None = None,
) -> Profile:
    """A profile of a trace, and of what a trace does not tell; for the arguments see ``Profile``.

    Args:
        syncs: those that were found apart from the trace.
        commands: ``{kernel}`` in them becomes the costliest kernel's name.
        trace_file: that the trace was read from.
    """
    steps = tuple(_steps(trace))
    kernel = kernel_filter(top_kernel(trace))
    profile = Profile(
        steps=steps,
        seconds=sum(step.seconds for step in steps) / len(steps),
        unprofiled_seconds=unprofiled_seconds,
        samples=samples,
        phases={phase: sum(step.phases[phase] for step in steps) / len(steps) for phase in PHASES},
        device_phases=device_phases(trace),
        operators=operators(trace),
        gaps=grouped(trace, gaps(trace)),
        syncs=(*syncs, *_silent(trace)),
        memory=memory(trace),
        advice=(),
        commands=tuple(command.replace("{kernel}", kernel) for command in commands),
        environment=environment_of(torch.device("cuda" if torch.cuda.is_initialized() else "cpu")),
        verdict=verdict,
        trace=trace_file,
    )
    return replace(profile, advice=advise(profile, trace))


def _steps(trace: Trace) -> Iterator[Step]:
    for start, end in pairwise(trace.boundaries):
        phases = dict.fromkeys(PHASES, 0.0)
        for span in trace.parts.between(start, end):
            phases[span.phase] += 1e-6 * (span.end - span.start)
        yield Step(1e-6 * (end - start), phases)


def _silent(trace: Trace) -> Iterator[Sync]:
    """Waits of the user's code that torch's sync debug mode does not tell of: for the whole device, and for events."""
    seen = Counter(
        (event.name, trace.where(event), trace.phase_of(event))
        for event in trace.within(trace.host)
        if event.name in ("cudaDeviceSynchronize", "cudaEventSynchronize") and event.thread in trace.training_threads
    )
    for (what, where, phase), count in seen.most_common():
        if where:
            yield Sync(what, where, code_at(where), phase, count / trace.steps)
