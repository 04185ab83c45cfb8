"""``Profile``: the result of a profile, with its text, page and files."""

from __future__ import annotations

import gzip
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from markupsafe import Markup
from rich.console import Console, ConsoleOptions, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from flatout.core import formatting
from flatout.profile.profile_data import PHASES, Operator, Phase, Step, Sync
from flatout.report import charts, html, terminal
from flatout.report.shown import Shown

SCHEMA_VERSION = 3
"""Version of the JSON form, which increases when a field changes its meaning or is removed."""

LOOKS: Mapping[Phase, tuple[str, str, str]] = {
    "loader_wait": ("waiting for data", "dark_orange", "var(--load)"),
    "h2d": ("copying to the device", "yellow", "var(--rejected)"),
    "forward": ("forward and loss", "blue", "var(--step)"),
    "backward": ("backward", "magenta", "var(--untried)"),
    "update": ("update", "green", "var(--kept)"),
    "host_idle": ("the loop's own code", "bright_black", "var(--soft)"),
}
"""Name of each phase in tables and sentences, its style in a terminal, and its color on a page."""

_ROWS = 8
"""Rows of a table in a terminal. The page shows all."""

_NUMBERS = {"share", "calls", "host", "GPU", "per step"}
"""Headings of columns of numbers."""

_STYLES = {"operator": "bold", "at": "bold", "code": "dim"}
"""Styles of columns in a terminal, by heading."""

_TableText = tuple[str, str, Sequence[str], list[list[str]]]
"""Title, note, headings and rows of a table."""


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

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        yield from _rendered(self, options)

    def __str__(self) -> str:
        return terminal.plain_text(lambda options: _rendered(self, options), None, None)

    def _facts(self) -> dict[str, str]:
        steps = formatting.counted(len(self.steps), "step")
        return {"seconds": f"{ms(self.seconds)} a step", "biggest": _headline(self)[0], "steps": steps}

    def _fragment(self) -> Markup:
        chart = [charts.Segment(LOOKS[phase][0], 1e3 * self.phases[phase], LOOKS[phase][2]) for phase in PHASES]
        return html.render(
            "profile.html.j2",
            profile=self,
            seconds=ms(self.seconds),
            facts=_headline(self),
            basis=_basis(self),
            chart=charts.stacked("time of a step by phase", {"time": chart}),
            looks=LOOKS,
            tables=list(tables(self)),
            numbers=_NUMBERS,
            peak=_peak(self),
        )


def ms(seconds: float) -> str:
    """Return milliseconds with three digits."""
    return formatting.milliseconds(1e3 * seconds)


def tables(profile: Profile) -> Iterator[_TableText]:
    """Yield the tables of a profile that have rows, in their order."""
    if profile.operators:
        has_kernels = profile.device_busy is not None
        own = "the operator's own kernels" if has_kernels else "its own time, without the operators that it calls"
        rows = []
        for operator in profile.operators:
            gpu = [ms(operator.device_seconds)] if has_kernels else []
            calls, host = formatting.count(operator.calls), ms(operator.host_seconds)
            rows.append([formatting.share(operator.share), *gpu, host, calls, operator.name])
        note = f"Share of a step under the profiler ({ms(profile.profiled_seconds or 0.0)}): {own}."
        yield "Costliest operators", note, ("share", *["GPU"] * has_kernels, "host", "calls", "operator"), rows
    if profile.syncs:
        note = "Each sync point makes Python wait until the GPU has finished all queued work."
        if not profile.on_gpu:
            note = "Sync points cost nothing on this CPU. On a GPU, each makes Python wait for all queued work."
        rows = []
        for sync in profile.syncs:
            where, phase = sync.where or "not in your code", LOOKS[sync.phase][0]
            rows.append([formatting.count(sync.per_step), sync.what, where, phase, sync.code])
        yield "Sync points", note, ("per step", "call", "at", "in", "code"), rows


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


def _peak(profile: Profile) -> str:
    """Return the peak of memory; empty if no step was profiled."""
    if profile.memory_peak is None:
        return ""
    peak = f"peak {formatting.size_of(profile.memory_peak)}"
    return f"{peak} on the GPU" if profile.on_gpu else f"{peak}, without memory from before profiling"


def _rendered(profile: Profile, options: ConsoleOptions) -> Iterator[RenderableType]:
    """Yield the parts of the profile, top to bottom, for a console of ``options.max_width`` columns."""
    plain = options.ascii_only

    def say(text: str, style: str = "") -> Text:
        return terminal.say(formatting.clean(text), plain, style)

    def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
        grid = Table(box=None, padding=(0, 2, 0, 0), show_edge=False, pad_edge=False, header_style="dim")
        for heading in headings:
            right = heading in _NUMBERS
            grid.add_column(heading, justify="right" if right else "left", no_wrap=right, overflow="fold")
        for row in rows:
            grid.add_row(*(say(text, _STYLES.get(heading, "")) for heading, text in zip(headings, row, strict=True)))
        return grid

    def titled(title: str, *parts: RenderableType) -> Iterator[RenderableType]:
        yield Text("")
        yield say(title, "bold cyan")
        yield from (Padding(part, (0, 0, 0, 2)) for part in parts)

    yield Text.assemble(("flatout", "bold magenta"), "  ", say(f"{ms(profile.seconds)} a step", "bold"))
    yield say("; ".join(_headline(profile)), "bold")
    yield say(_basis(profile), "dim")
    if profile.verdict:
        yield say(profile.verdict)
    yield Text("")
    phases = Table.grid(padding=(0, 2, 0, 0))
    for justify in ("right", "left", "right", "left"):
        phases.add_column(justify=justify)
    width, longest = max(10, min(40, options.max_width - 62)), max(profile.phases.values())
    for phase, seconds in profile.phases.items():
        name, style, _ = LOOKS[phase]
        bar = "█" * round(width * seconds / longest)
        share = formatting.share(seconds / profile.seconds)
        phases.add_row(say(share), say(name, style), say(ms(seconds)), say(bar, style))
    yield phases
    advice = Table.grid(padding=(0, 1))
    advice.add_column(justify="right")
    advice.add_column(overflow="fold")
    for number, sentence in enumerate(profile.advice, 1):
        advice.add_row(say(f"{number}", "bold"), say(sentence))
    yield from titled("what to do", advice)
    for title, note, headings, rows in tables(profile):
        yield from titled(title[0].lower() + title[1:], say(note, "dim"), table(headings, rows[:_ROWS]))
    if profile.memory_peak is not None:
        yield from titled("memory", say(_peak(profile)))
    yield Text("")
    yield terminal.facts(profile.environment, plain)
