"""``Profile``: the result of a profile, with its text, page and files."""

from __future__ import annotations

import gzip
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate, pairwise
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from flatout.core import formatting
from flatout.profile.profile_data import Operator, Phase, Step, Sync
from flatout.report.document import Block, Chart, Note, Part, Table
from flatout.report.shown import Shown
from flatout.report.wording import environment

SCHEMA_VERSION = 3
"""Version of the JSON form, which increases when a field changes its meaning or is removed."""

LOOKS: Mapping[Phase, tuple[str, str]] = {
    "loader_wait": ("waiting for data", "load"),
    "h2d": ("copying to the device", "copy"),
    "forward": ("forward and loss", "forward"),
    "backward": ("backward", "backward"),
    "update": ("update", "update"),
    "host_idle": ("the loop's own code", "rest"),
}
"""Name and style of each phase."""


@dataclass(frozen=True, repr=False)
class Profile(Shown):
    """Profile of training steps.

    ``print(profile)`` prints text, ``rich.print(profile)`` prints text in color, and a Jupyter cell shows a page with
    a chart.

    Attributes:
        steps: times of each step that was timed, without the profiler.
        seconds: mean time of the timed steps.
        before: number of steps before the timed ones: warm-up, search for syncs, and use of prefetched batches.
        samples: samples per step; None if unknown.
        phases: mean seconds per step and phase, without the profiler. The sum of all phases is ``seconds``.
        syncs: places where the host waits for the GPU, or would wait with one.
        environment: device, cores, versions and date of the figures.
        verdict: MFU of the timed steps of a run, NVML's utilization, the usual MFU, and the limit; empty for a script.
        profiled_steps: number of steps under the profiler, after the timed ones.
        profiled_seconds: mean time of the profiled steps; None if the loop ended before the profiler began.
        operators: costliest first, from the profiler.
        device_busy: seconds of kernels and copies in a profiled step, relative to ``seconds``, at most 1. Work that
            overlaps on the GPU counts twice. None without kernels.
        memory_peak: bytes of tensors at the peak of the profiled steps; None if no step was profiled. On a CPU, only
            allocations since the first profiled step count.
        advice: sentences on costs and remedies, largest cost first.
        trace: Chrome trace, compressed with gzip; None if no step was profiled.
    """

    _TITLE = "flatout profile"

    steps: tuple[Step, ...]
    seconds: float
    before: int
    samples: float | None
    phases: Mapping[Phase, float]
    syncs: tuple[Sync, ...]
    environment: Mapping[str, str]
    verdict: str = ""
    profiled_steps: int = 0
    profiled_seconds: float | None = None
    operators: tuple[Operator, ...] = ()
    device_busy: float | None = None
    memory_peak: int | None = None
    advice: tuple[str, ...] = ()
    trace: bytes | None = field(default=None, compare=False)

    @property
    def distortion(self) -> float | None:
        """Factor by which the profiler lengthens a step; None if no step was profiled."""
        return None if self.profiled_seconds is None else self.profiled_seconds / self.seconds

    @property
    def on_gpu(self) -> bool:
        """True if the process used a GPU. Times of phases are then times of the GPU."""
        return self.environment.get("device", "").startswith("cuda")

    def to_dict(self) -> dict[str, Any]:
        plain = asdict(replace(self, trace=None))
        del plain["trace"]
        return {"schema": SCHEMA_VERSION, **plain}

    def to_chrome_trace(self, path: str | PathLike[str]) -> None:
        """Write the trace for chrome://tracing or https://ui.perfetto.dev.

        Args:
            path: file to write. The file is compressed with gzip if ``path`` ends in ``.gz``.

        Raises:
            ValueError: no step was profiled, because the loop ended before the profiler began.
        """
        if self.trace is None:
            raise ValueError("this profile has no trace: the loop ended before the profiler began")
        Path(path).write_bytes(self.trace if fspath(path).endswith(".gz") else gzip.decompress(self.trace))

    def _facts(self) -> dict[str, str]:
        steps = formatting.counted(len(self.steps), "step")
        return {"seconds": f"{ms(self.seconds)} a step", "biggest": _headline(self)[0], "steps": steps}

    def _blocks(self) -> Iterator[Block]:
        yield Note([(ms(self.seconds), "factor"), " a step"], "headline")
        yield Note(f"{formatting.capital('; '.join(_headline(self)))}.", "lead")
        yield Note(f"{formatting.capital(_basis(self))}.", "quiet")
        if self.verdict:
            yield Note(self.verdict)
        yield Note("Where a step's time goes", "title")
        ends = pairwise(accumulate((1e3 * seconds for seconds in self.phases.values()), initial=0.0))
        bars = []
        for (phase, seconds), (start, end) in zip(self.phases.items(), ends, strict=True):
            name, style = LOOKS[phase]
            value = f"{formatting.share(seconds / self.seconds)}, {ms(seconds)}"
            bars.append((name, value, [(start, end, style, "")]))
        yield Chart("time of a step by phase", bars, is_connected=True)
        if self.advice:
            yield Note("What to do, the costliest first", "title")
            yield Table([[f"{number}", (sentence, "why")] for number, sentence in enumerate(self.advice, 1)])
        for title, note, table in tables(self):
            yield Note(title, "title")
            yield Note(note, "quiet")
            yield table
        if self.memory_peak is not None:
            place = " on the GPU" if self.on_gpu else ", without memory from before profiling"
            yield Note("Memory", "title")
            yield Note(f"Peak {formatting.size_of(self.memory_peak)}{place}.", "quiet")
        yield from environment(self.environment)


def ms(seconds: float) -> str:
    """Return milliseconds with three digits."""
    return formatting.milliseconds(1e3 * seconds)


def tables(profile: Profile) -> Iterator[tuple[str, str, Table]]:
    """Yield the tables of a profile that have rows: title, note and table."""
    rows: list[list[Part]]
    if profile.operators:
        has_kernels = profile.device_busy is not None
        own = "the operator's own kernels" if has_kernels else "its own time, without the operators that it calls"
        rows = []
        for operator in profile.operators:
            gpu = [ms(operator.device_seconds)] if has_kernels else []
            calls, host = formatting.count(operator.calls), ms(operator.host_seconds)
            rows.append([formatting.share(operator.share), *gpu, host, calls, (operator.name, "strong")])
        note = f"Share of a step under the profiler ({ms(profile.profiled_seconds or 0.0)}): {own}."
        headings = ["share", *["GPU"] * has_kernels, "host", "calls", "operator"]
        yield "Costliest operators", note, Table(rows, headings, frozenset(range(len(headings) - 1)))
    if profile.syncs:
        note = "Each sync point makes Python wait until the GPU has finished all queued work."
        if not profile.on_gpu:
            note = "Sync points cost nothing on this CPU. On a GPU, each makes Python wait for all queued work."
        rows = []
        for sync in profile.syncs:
            where, phase = sync.where or "not in your code", LOOKS[sync.phase][0]
            rows.append([formatting.count(sync.per_step), sync.what, (where, "strong"), phase, (sync.code, "code")])
        yield "Sync points", note, Table(rows, ["per step", "call", "at", "in", "code"], frozenset({0}))


def _headline(profile: Profile) -> list[str]:
    """Return the largest phase of a step, the samples per second and the use of the GPU, as far as they are known."""
    phase = max(profile.phases, key=profile.phases.__getitem__)
    facts = [f"{formatting.share(profile.phases[phase] / profile.seconds)} of a step is {LOOKS[phase][0]}"]
    if profile.samples:
        facts.append(f"{formatting.count(profile.samples / profile.seconds)} samples/s")
    if profile.device_busy is not None:
        facts.append(f"the GPU works for {formatting.share(profile.device_busy)} of a step")
    return facts


def _basis(profile: Profile) -> str:
    """Return a text on the steps that the figures average."""
    steps = formatting.counted(len(profile.steps), "step")
    text = f"mean of {steps} without the profiler, after {profile.before} warm-up steps"
    return text if profile.profiled_steps else f"{text}; the loop ended before the profiler began"
