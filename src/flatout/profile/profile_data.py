"""Frozen data classes of a profile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

Phase = Literal["loader_wait", "h2d", "forward", "backward", "update", "host_idle"]
PHASES: tuple[Phase, ...] = get_args(Phase)
"""Phases of a step, in order. The host's clock times the phases, or with a GPU the events of a stream.

``host_idle`` is the time of the loop's own code between the other phases.
"""


@dataclass(frozen=True)
class Operator:
    """Row of the ``key_averages`` of torch's profiler. Times of the host include the overhead of the profiler.

    Attributes:
        name: e.g. ``aten::convolution_backward``.
        calls: per step.
        host_seconds: per step, on the host, without the operators that it calls.
        device_seconds: per step, of the kernels that it launches itself; 0 without a GPU.
        share: share of a profiled step: ``device_seconds`` with a GPU, else ``host_seconds``.
    """

    name: str
    calls: float
    host_seconds: float
    device_seconds: float
    share: float


@dataclass(frozen=True)
class Sync:
    """Place where the host waits for the GPU, or would wait if there were one.

    Attributes:
        what: the call, e.g. ``item``.
        where: ``file:line`` of the user's code; empty if no frame is in the user's code.
        code: code of the line.
        phase: phase of the step.
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
class Step:
    """One step.

    Attributes:
        seconds: wall time.
        phases: seconds of each phase.
    """

    seconds: float
    phases: Mapping[Phase, float]

    @classmethod
    def mean(cls, steps: Sequence[Step]) -> Step:
        """Return the mean of at least one step."""
        count = len(steps)
        phases = {phase: sum(step.phases[phase] for step in steps) / count for phase in PHASES}
        return cls(sum(step.seconds for step in steps) / count, phases)
