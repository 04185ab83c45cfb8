"""Construction of a profile from timed steps and a trace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from flatout.profile.advice import advise
from flatout.profile.gaps import busy, gaps, grouped
from flatout.profile.memory_timeline import memory
from flatout.profile.nsight import kernel_filter
from flatout.profile.operators import device_phases, operators, top_kernel
from flatout.profile.places import code_at
from flatout.profile.profile_data import Gaps, Step, Sync, TraceFile
from flatout.profile.shown_profile import Profile
from flatout.profile.trace import Trace
from flatout.report.environment import environment_of
from flatout.report.model import Row


def summarise(
    steps: tuple[Step, ...],
    trace: Trace | None,
    *,
    profiled: Sequence[Step] = (),
    before: int = 0,
    syncs: Sequence[Sync] = (),
    samples: float | None = None,
    commands: Sequence[str] = (),
    verdict: str = "",
    rows: Sequence[Row] = (),
    trace_file: TraceFile | None = None,
) -> Profile:
    """Return the profile of timed steps and of a trace of other steps.

    Args:
        steps: steps timed without the profiler.
        trace: trace of steps under the profiler; None if there were none.
        profiled: steps of the trace.
        before: as in ``Profile``.
        syncs: syncs that were found without the trace.
        samples: as in ``Profile``.
        commands: as in ``Profile``. The name of the costliest kernel replaces ``{kernel}``.
        verdict: as in ``Profile``.
        rows: rows of a report, as for ``advise``.
        trace_file: file of the trace.
    """
    mean = Step.mean(steps)
    profile = Profile(
        steps=steps,
        seconds=mean.seconds,
        before=before,
        profiled_steps=len(profiled),
        profiled_seconds=Step.mean(profiled).seconds if profiled else None,
        samples=samples,
        phases=mean.phases,
        device_phases={},
        operators=(),
        gaps=(),
        syncs=tuple(syncs),
        memory=None,
        advice=(),
        commands=(),
        environment=environment_of(torch.device("cuda" if torch.cuda.is_initialized() else "cpu")),
        verdict=verdict,
        trace=trace_file,
    )
    kernel = kernel_filter("" if trace is None else top_kernel(trace))
    profile = replace(profile, commands=tuple(command.replace("{kernel}", kernel) for command in commands))
    if trace is not None:
        profile = replace(
            profile,
            device_phases=device_phases(trace),
            operators=operators(trace),
            gaps=_unprofiled(trace, mean.seconds),
            syncs=(*syncs, *_silent(trace)),
            memory=memory(trace),
        )
    return replace(profile, advice=advise(profile, trace, rows))


def _unprofiled(trace: Trace, seconds: float) -> tuple[Gaps, ...]:
    """Return the gaps of a trace, scaled to the idle time of a step of ``seconds`` without the profiler.

    The profiler slows the host down, so a GPU waits for the host more often. The profiler does not slow kernels down.
    """
    found = grouped(trace, gaps(trace))
    idle = sum(gap.seconds for gap in found)
    works = sum(end - start for start, end in busy(trace)) * 1e-6 / trace.steps
    scale = max(0.0, seconds - works) / idle if idle else 1.0
    return tuple(replace(gap, seconds=scale * gap.seconds) for gap in found)


def _silent(trace: Trace) -> Iterator[Sync]:
    """Yield the user's waits for the whole device and for events, which torch's sync debug mode does not report."""
    seen = Counter(
        (event.name, trace.where(event), trace.phase_of(event))
        for event in trace.within(trace.host)
        if event.name in ("cudaDeviceSynchronize", "cudaEventSynchronize") and event.thread in trace.training_threads
    )
    for (what, where, phase), count in seen.most_common():
        if where:
            yield Sync(what, where, code_at(where), phase, count / trace.steps)
