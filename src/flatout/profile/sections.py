"""Sections of a profile and their texts, which terminal and page share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from flatout.core import formatting
from flatout.profile.profile_data import Cause, Phase, ProfileData

DISTORTED = 1.3
"""Slowdown of a step by the profiler, as a factor, above which a profile mentions the slowdown."""


class PhaseLook(NamedTuple):
    """Look of a part of a step.

    Attributes:
        name: name in tables and sentences.
        style: style of rich.
        color: color of the style sheet.
    """

    name: str
    style: str
    color: str


LOOKS: dict[Phase, PhaseLook] = {
    "loader_wait": PhaseLook("waiting for data", "dark_orange", "var(--load)"),
    "h2d": PhaseLook("copying to the device", "yellow", "var(--rejected)"),
    "forward": PhaseLook("forward and loss", "blue", "var(--step)"),
    "backward": PhaseLook("backward", "magenta", "var(--untried)"),
    "update": PhaseLook("update", "green", "var(--kept)"),
    "host_idle": PhaseLook("the loop's own code", "bright_black", "var(--soft)"),
}

CAUSES: dict[Cause, str] = {
    "loader": "the host waited for data",
    "copy": "a batch was copied to the GPU",
    "sync": "the host had waited for the GPU, so nothing was queued",
    "launch": "Python launches kernels slower than the GPU runs them",
    "own code": "the loop ran its own code",
    "device": "queued work had to wait on the device",
}


def ms(seconds: float) -> str:
    """Return milliseconds with three digits."""
    return formatting.milliseconds(1e3 * seconds)


def biggest(profile: ProfileData) -> str:
    """Return a sentence on the largest part of a step."""
    if profile.device_busy is not None and profile.device_busy < 0.9 and profile.gaps:
        worst = profile.gaps[0]
        where = f" ({worst.where})" if worst.where else ""
        idle = formatting.share(1 - profile.device_busy)
        return f"the GPU idles for {idle} of a step, mostly because {CAUSES[worst.cause]}{where}"
    phase = max(profile.phases, key=profile.phases.__getitem__)
    return f"{formatting.share(profile.phases[phase] / profile.seconds)} of a step is {LOOKS[phase].name}"


def basis(profile: ProfileData) -> str:
    """Return a text on the steps that the figures average."""
    count = len(profile.steps)
    text = f"mean of {count} step{'s' * (count != 1)} without the profiler, after {profile.before} warm-up steps"
    return text if profile.profiled_steps else f"{text}; the loop ended before the profiler began"


def distortion(profile: ProfileData) -> str:
    """Return a sentence on the slowdown by the profiler; empty if the slowdown is small."""
    if profile.distortion is None or profile.distortion <= DISTORTED:
        return ""
    return (
        f"The profiler makes a step take {profile.distortion:.1f} times as long, so Python and small operators look "
        "slower than they are."
    )


def peak(profile: ProfileData) -> str:
    """Return the peak of memory, its phase and its device; empty if nothing was allocated."""
    if profile.memory is None:
        return ""
    text = f"peak {formatting.size_of(profile.memory.peak)} in {LOOKS[profile.memory.peak_phase].name}"
    on_cpu = profile.memory.device == "cpu"
    return f"{text}, without memory from before profiling" if on_cpu else f"{text} on {profile.memory.device}"


Column = tuple[str, Literal["number", "strong", "plain", "quiet"], Callable[[Any], str]]
"""Column of a table: heading (may be empty), style of the cells, and function from an item to the text of its cell."""


@dataclass(frozen=True)
class Section:
    """Table with its heading.

    Attributes:
        title: title of the section.
        note: sentence above the table, or empty.
        columns: columns of the table.
        items: one item for each row.
        bar: function from an item to the length of its bar, 0..1; None for a table without bars.
    """

    title: str
    note: str
    columns: Sequence[Column]
    items: Sequence[Any]
    bar: Callable[[Any], float] | None = None

    @property
    def rows(self) -> list[list[str]]:
        """Texts of the cells, row by row."""
        return [[cell(item) for _, _, cell in self.columns] for item in self.items]


def sections(profile: ProfileData) -> Iterator[Section]:
    """Yield the tables of a profile that have rows, in their order."""
    on_gpu = bool(profile.device_phases)
    if profile.gaps:
        columns: list[Column] = [
            ("", "number", lambda gap: formatting.share(gap.seconds / profile.seconds)),
            ("because", "plain", lambda gap: CAUSES[gap.cause]),
            ("per step", "number", lambda gap: ms(gap.seconds)),
            ("times", "number", lambda gap: formatting.count(gap.count)),
            ("longest", "number", lambda gap: ms(gap.longest)),
            ("in", "plain", lambda gap: LOOKS[gap.phase].name),
            ("at", "strong", lambda gap: gap.where),
        ]
        yield Section("Why the GPU idled", "", columns, profile.gaps)
    if profile.operators:
        columns = [
            ("", "number", lambda operator: formatting.share(operator.share)),
            ("operator", "strong", lambda operator: operator.name),
            ("calls", "number", lambda operator: formatting.count(operator.calls)),
            ("host", "number", lambda operator: ms(operator.host_seconds)),
            ("mostly for", "plain", lambda operator: operator.where),
        ]
        if on_gpu:
            columns.insert(4, ("GPU", "number", lambda operator: ms(operator.device_seconds)))
        own = "the operator's own kernels" if on_gpu else "the operator's own time, without the operators that it calls"
        note = f"Share of a step under the profiler: {own}. {distortion(profile)}".rstrip()
        most = max(operator.share for operator in profile.operators) or 1.0
        yield Section("Costliest operators", note, columns, profile.operators, lambda operator: operator.share / most)
    if profile.syncs:
        columns = [
            ("per step", "number", lambda sync: formatting.count(sync.per_step)),
            ("call", "plain", lambda sync: sync.what),
            ("at", "strong", lambda sync: sync.where or "not in your code"),
            ("in", "plain", lambda sync: LOOKS[sync.phase].name),
            ("code", "quiet", lambda sync: sync.code),
        ]
        note = "Each makes Python wait until the GPU has finished all queued work."
        if not on_gpu:
            note = "They cost nothing on this CPU. On a GPU each makes Python wait until all queued work is finished."
        yield Section("Sync points", note, columns, profile.syncs)
