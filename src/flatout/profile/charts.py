"""A profile's charts, as inline SVG that takes its colours from the report's style sheet."""

from __future__ import annotations

from itertools import pairwise

from flatout.core import formatting
from flatout.profile.profile_data import PHASES, Memory, ProfileData, Step
from flatout.profile.sections import LOOKS, ms
from flatout.report.charts import WIDTH, Segment, level, stacked, svg

_BEGIN = 64  # room for numbers, left of the plot
_TOP = 8


def mean(profile: ProfileData) -> str:
    """The mean step as one stacked bar; with a GPU a second one, of what it worked for."""
    rows = {"host": profile.phases} | ({"GPU": profile.device_phases} if profile.device_phases else {})
    bars = {
        name: [Segment(LOOKS[phase].name, 1e3 * phases[phase], LOOKS[phase].colour) for phase in PHASES]
        for name, phases in rows.items()
    }
    return stacked("time of a step by part", bars)


def steps(steps: tuple[Step, ...]) -> str:
    """Every profiled step as a stacked column; an outlier shows, and its part."""
    height = 150
    longest = max(step.seconds for step in steps)
    room = (WIDTH - _BEGIN) / len(steps)
    width = min(60.0, room * 0.8)
    parts = [level(_TOP + height * (1 - share), _BEGIN, ms(share * longest)) for share in (0.0, 0.5, 1.0)]
    for index, step in enumerate(steps):
        x, y = _BEGIN + index * room + (room - width) / 2, float(_TOP + height)
        parts.append(f"<g><title>step {index + 1}: {ms(step.seconds)}</title>")
        for phase in PHASES:
            tall = height * step.phases[phase] / longest
            y -= tall
            place = f'x="{x:.1f}" y="{y:.2f}" width="{width:.1f}" height="{tall:.2f}"'
            parts.append(f'<rect style="fill:{LOOKS[phase].colour}" {place}/>')
        parts.append(
            f'<text class="axis" x="{x + width / 2:.1f}" y="{height + 24}" text-anchor="middle">{index + 1}</text></g>'
        )
    return svg(height + 30, "time of every profiled step by part", parts)


def memory(memory: Memory, seconds: float) -> str:
    """Allocated memory over the profiled steps.

    Args:
        memory: with its timeline.
        seconds: that the steps took together.
    """
    height = 130
    low = min(0, *(allocated for _, allocated in memory.timeline))
    span = max(1, memory.peak - low)

    def x(time: float) -> float:
        return _BEGIN + (WIDTH - _BEGIN) * min(1.0, time / seconds)

    def y(allocated: float) -> float:
        return _TOP + height * (1 - (allocated - low) / span)

    (begun, first), ended = memory.timeline[0], (seconds, memory.timeline[-1][1])
    line = f"M{x(begun):.1f} {y(first):.1f}"
    for (_, before), (time, now) in pairwise([*memory.timeline, ended]):
        line += f"L{x(time):.1f} {y(before):.1f}L{x(time):.1f} {y(now):.1f}"
    area = f"{line}L{x(seconds):.1f} {y(low):.1f}L{x(begun):.1f} {y(low):.1f}Z"
    parts = [level(y(at), _BEGIN, formatting.size_of(at)) for at in (low, (low + memory.peak) / 2, memory.peak)]
    parts.append(f'<path d="{area}" style="fill:var(--step);opacity:.25"/>')
    parts.append(f'<path d="{line}" style="fill:none;stroke:var(--step);stroke-width:1.5"/>')
    for share, anchor in ((0.0, "start"), (0.5, "middle"), (1.0, "end")):
        at = f'x="{x(share * seconds):.1f}" y="{height + 26}" text-anchor="{anchor}"'
        parts.append(f'<text class="axis" {at}>{ms(share * seconds)}</text>')
    return svg(height + 32, "memory allocated over the profiled steps", parts)


def bar(share: float) -> str:
    """A small bar for a table's cell, full at 1."""
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 90 12" style="width:90px" role="img" aria-hidden="true">'
        f'<rect class="step" x="0" y="1" width="{90 * share:.1f}" height="10" rx="2"/></svg>'
    )
