"""Frozen data classes of a profile, the source of its text, page and JSON form."""

from __future__ import annotations

import os
import shutil
import warnings
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import mkdtemp
from typing import Literal, get_args

Phase = Literal["loader_wait", "h2d", "forward", "backward", "update", "host_idle"]
PHASES: tuple[Phase, ...] = get_args(Phase)
"""Parts of a step, in order. The host's clock times the parts, or with a GPU the events of a stream.

``host_idle`` is the time of the loop's own code between the other parts.
"""

Cause = Literal["loader", "copy", "sync", "launch", "own code", "device"]
"""Causes of an idle GPU.

``loader``: the host waited for data. ``copy``: the host copied data. ``sync``: the host had waited for the GPU, so the
queue was empty. ``launch``: the host launched kernels slower than they ran. ``own code``: the host ran the loop's own
code. ``device``: work was queued, and the device delayed it.
"""


@dataclass(frozen=True)
class Operator:
    """One operator of torch, over the profiled steps. Times of the host include the overhead of the profiler.

    Attributes:
        name: e.g. ``aten::convolution_backward``.
        calls: per step.
        host_seconds: per step, on the host, without the operators that it calls.
        device_seconds: per step, of the kernels that it launches itself; 0 without a GPU.
        share: share of a profiled step: ``device_seconds`` with a GPU, else ``host_seconds``.
        where: ``file:line`` of the user's code that causes most of this time; empty if unknown. A backward operator has
            the line of its forward operator.
    """

    name: str
    calls: float
    host_seconds: float
    device_seconds: float
    share: float
    where: str


@dataclass(frozen=True)
class Gaps:
    """Intervals of one cause in which the GPU ran nothing.

    Attributes:
        cause: cause of the intervals.
        phase: part of the step.
        where: ``file:line`` of the user's code, or the operator; empty if unknown.
        count: number of intervals per profiled step.
        seconds: idle time of a step without the profiler, divided among causes as under the profiler.
        longest: longest interval under the profiler, seconds.
    """

    cause: Cause
    phase: Phase
    where: str
    count: float
    seconds: float
    longest: float


@dataclass(frozen=True)
class Sync:
    """Place where the host waits for the GPU, or would wait if there were one.

    Attributes:
        what: the call, e.g. ``item``.
        where: ``file:line`` of the user's code; empty if no frame is in the user's code.
        code: code of the line.
        phase: part of the step.
        per_step: calls per step.
        is_in_every_step: False if a searched step lacks the call, for example a call of an evaluation.
    """

    what: str
    where: str
    code: str
    phase: Phase
    per_step: float
    is_in_every_step: bool = True


@dataclass(frozen=True)
class Memory:
    """Memory of tensors.

    Attributes:
        device: name of the device, such as ``cuda:0``. For ``cpu``, only allocations since profiling began count.
        timeline: (seconds since the first profiled step, bytes allocated), in order.
        peak: bytes.
        peak_phase: part of the step with the peak.
    """

    device: str
    timeline: tuple[tuple[float, int], ...]
    peak: int
    peak_phase: Phase


@dataclass(frozen=True)
class Step:
    """One step.

    Attributes:
        seconds: wall time.
        phases: seconds of each part.
    """

    seconds: float
    phases: Mapping[Phase, float]

    @classmethod
    def mean(cls, steps: Sequence[Step]) -> Step:
        """Return the mean of at least one step."""
        count = len(steps)
        phases = {phase: sum(step.phases[phase] for step in steps) / count for phase in PHASES}
        return cls(sum(step.seconds for step in steps) / count, phases)


class TraceFile:
    """Chrome trace in a temporary directory, deleted with this object."""

    def __init__(self) -> None:
        folder = mkdtemp(prefix="flatout-profile-")
        self.path = Path(folder) / "trace.json"
        weakref.finalize(self, _remove, folder, os.getpid())


def _remove(folder: str, owner: int) -> None:
    if os.getpid() == owner:  # a forked child leaves the file to its parent
        shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True, repr=False)
class ProfileData:
    """Time of training steps by part, operator and line of code.

    Attributes:
        steps: times of each step that was timed, without the profiler.
        seconds: mean time of the timed steps.
        before: number of steps before the timed ones: warm-up, search for syncs, and use of prefetched batches.
        profiled_steps: number of steps under the profiler, after the timed ones.
        profiled_seconds: mean time of the profiled steps; None if the loop ended before the profiler began.
        samples: samples per step; None if unknown.
        phases: mean seconds per step and part, without the profiler. The sum of all parts is ``seconds``.
        device_phases: mean seconds per step in which the GPU worked for each part; empty without a GPU.
        operators: costliest first. Operators, ``gaps`` and ``memory`` come from the profiler.
        gaps: idle time of the GPU by cause and place, costliest first; empty without a GPU.
        syncs: places where the host waits for the GPU, or would wait with one.
        memory: memory of tensors over time; None if the trace has none.
        advice: sentences on costs and remedies, largest cost first.
        verdict: MFU of the timed steps of a run, NVML's utilization, the usual MFU, and the limit; empty for a script.
        commands: command lines for Nsight Systems and Nsight Compute; empty without a script.
        environment: device, cores, versions and date of the figures.
        trace: file that ``to_chrome_trace`` copies; None if no step was profiled or the profile was made by hand.
    """

    steps: tuple[Step, ...]
    seconds: float
    before: int
    profiled_steps: int
    profiled_seconds: float | None
    samples: float | None
    phases: Mapping[Phase, float]
    device_phases: Mapping[Phase, float]
    operators: tuple[Operator, ...]
    gaps: tuple[Gaps, ...]
    syncs: tuple[Sync, ...]
    memory: Memory | None
    advice: tuple[str, ...]
    commands: tuple[str, ...]
    environment: Mapping[str, str]
    verdict: str = ""
    trace: TraceFile | None = field(default=None, compare=False)

    @property
    def device_busy(self) -> float | None:
        """Share of the wall time in which the GPU worked, 0..1; None without a GPU."""
        if not self.device_phases:
            return None
        return 1 - sum(gap.seconds for gap in self.gaps) / self.seconds

    @property
    def unprofiled_seconds(self) -> float:
        """Deprecated name of ``seconds``, which used to be measured under the profiler."""
        message = "Profile.unprofiled_seconds is now Profile.seconds. Replace the old name, which will be removed"
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        return self.seconds

    @property
    def distortion(self) -> float | None:
        """Factor by which the profiler lengthens a step; None if no step was profiled."""
        return None if self.profiled_seconds is None else self.profiled_seconds / self.seconds
