"""How a profile puts things, so that terminal and page say the same."""

from __future__ import annotations

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


def sync_note(profile: Profile) -> str:
    """What the list of syncs means on this machine."""
    if profile.device_phases:
        return "Each makes Python wait until the GPU has done all that is queued."
    return "On this CPU they cost nothing. On a GPU each makes Python wait until all that is queued is done."
