"""How a profile puts things, so that terminal and page say the same."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from flatout.profile.summary import Cause, Phase, Profile
from flatout.report import words

PHASE_NAMES: dict[Phase, str] = {
    "loader_wait": "waiting for data",
    "h2d": "copying to the device",
    "forward": "forward and loss",
    "backward": "backward",
    "update": "update",
    "host_idle": "the loop's own code",
}

CAUSES: dict[Cause, str] = {
    "loader": "the host waited for data",
    "copy": "a batch was copied to it",
    "sync": "the host had waited for it, so nothing was queued",
    "launch": "Python launches kernels slower than they run",
    "own code": "the loop ran code of its own",
    "device": "work was queued, but had to wait on the device",
}


def ms(seconds: float) -> str:
    """Milliseconds, three digits."""
    return words.milliseconds(1e3 * seconds)


def share(part: float, whole: float) -> str:
    """A part in per cent: ``41 %``; below ten one decimal."""
    if whole <= 0:
        return "?"
    percent = 100 * part / whole
    return f"{percent:.{0 if percent >= 9.95 else 1}f} %"


def bytes_(count: float) -> str:
    """``512 B``, ``1.5 MiB``, ``12 GiB``."""
    for unit in ("B", "KiB", "MiB"):
        if abs(count) < 1024:
            return f"{count:.{0 if unit == 'B' or abs(count) >= 9.95 else 1}f} {unit}"
        count /= 1024
    return f"{count:.{0 if abs(count) >= 9.95 else 1}f} GiB"


def times(count: float) -> str:
    """How often per step: ``12``, ``0.5``."""
    return f"{count:,.0f}" if abs(count - round(count)) < 0.05 else f"{count:.1f}"


def biggest(profile: Profile) -> str:
    """The largest part of a step, in words."""
    if profile.device_busy is not None and profile.device_busy < 0.9 and profile.gaps:
        worst = profile.gaps[0]
        return (
            f"the GPU idles for {share(1 - profile.device_busy, 1)} of it, above all because {CAUSES[worst.cause]}"
            f"{' (' + worst.where + ')' if worst.where else ''}"
        )
    phase = max(profile.phases, key=lambda phase: profile.phases[phase])
    return f"{share(profile.phases[phase], profile.seconds)} of it is {PHASE_NAMES[phase]}"


def capital(text: str) -> str:
    """With a capital letter."""
    return text[:1].upper() + text[1:]


def pace(profile: Profile) -> str:
    """``12.3 ms a step, 5,201 samples/s``."""
    rate = f", {words.count(profile.samples / profile.seconds)} samples/s" if profile.samples else ""
    return f"{ms(profile.seconds)} a step{rate}"


def basis(profile: Profile) -> str:
    """What the figures rest on."""
    count = len(profile.steps)
    text = f"mean of {count} step{'s' * (count != 1)} under the profiler"
    if profile.unprofiled_seconds:
        text += f"; {ms(profile.unprofiled_seconds)} without it"
    return text


def memory_note(profile: Profile) -> str:
    """The peak, where it was, and what counts."""
    assert profile.memory is not None
    peak = f"peak {bytes_(profile.memory.peak)} in {PHASE_NAMES[profile.memory.peak_phase]}"
    if profile.memory.device == "cpu":
        return f"{peak}, above what was there when profiling began"
    return f"{peak} on {profile.memory.device}"


Look = Literal["number", "strong", "plain", "quiet"]


@dataclass(frozen=True)
class Column:
    """A table's column.

    Attributes:
        heading: may be empty.
        look: how its cells are shown.
        cells: from top to bottom.
    """

    heading: str
    look: Look
    cells: tuple[str, ...]


@dataclass(frozen=True)
class Section:
    """A table under its heading.

    Attributes:
        title: of the section.
        note: what the reader must know first; may be empty.
        columns: of the table.
        bars: 0..1, one for each row; empty for none.
    """

    title: str
    note: str
    columns: tuple[Column, ...]
    bars: tuple[float, ...] = ()


def sections(profile: Profile) -> Iterator[Section]:
    """The tables of a profile, in their order; those without a row are left out."""
    if profile.gaps:
        gaps = profile.gaps
        yield Section(
            "Why the GPU idled",
            "",
            (
                _column("", "number", (share(gap.seconds, profile.seconds) for gap in gaps)),
                _column("because", "plain", (CAUSES[gap.cause] for gap in gaps)),
                _column("per step", "number", (ms(gap.seconds) for gap in gaps)),
                _column("times", "number", (times(gap.count) for gap in gaps)),
                _column("longest", "number", (ms(gap.longest) for gap in gaps)),
                _column("in", "plain", (PHASE_NAMES[gap.phase] for gap in gaps)),
                _column("at", "strong", (gap.where for gap in gaps)),
            ),
        )
    if profile.operators:
        operators, on_gpu = profile.operators, bool(profile.device_phases)
        most = max(operator.share for operator in operators) or 1.0
        gpu = [_column("GPU", "number", (ms(operator.device_seconds) for operator in operators))] if on_gpu else []
        yield Section(
            "Costliest operators",
            f"Share of a step: {'kernels of its own' if on_gpu else 'time of its own, without what it calls'}.",
            (
                _column("", "number", (share(operator.share, 1) for operator in operators)),
                _column("operator", "strong", (operator.name for operator in operators)),
                _column("calls", "number", (times(operator.calls) for operator in operators)),
                _column("host", "number", (ms(operator.host_seconds) for operator in operators)),
                *gpu,
                _column("mostly for", "plain", (operator.where for operator in operators)),
            ),
            tuple(operator.share / most for operator in operators),
        )
    if profile.syncs:
        syncs = profile.syncs
        yield Section(
            "Sync points",
            "Each makes Python wait until the GPU has done all that is queued."
            if profile.device_phases
            else "On this CPU they cost nothing. On a GPU each makes Python wait until all that is queued is done.",
            (
                _column("per step", "number", (times(sync.per_step) for sync in syncs)),
                _column("call", "plain", (sync.what for sync in syncs)),
                _column("at", "strong", (sync.where or "not in your code" for sync in syncs)),
                _column("in", "plain", (PHASE_NAMES[sync.phase] for sync in syncs)),
                _column("code", "quiet", (sync.code for sync in syncs)),
            ),
        )


def _column(heading: str, look: Look, cells: Iterable[str]) -> Column:
    return Column(heading, look, tuple(cells))
