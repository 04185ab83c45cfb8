"""A profile's charts, as inline SVG that takes its colours from the report's style sheet."""

from __future__ import annotations

from html import escape

from flatout.profile import wording
from flatout.profile.summary import PHASES, Memory, Phase, Profile, Step
from flatout.report.charts import WIDTH, svg

COLOURS: dict[Phase, str] = {
    "loader_wait": "var(--load)",
    "h2d": "var(--rejected)",
    "forward": "var(--step)",
    "backward": "var(--untried)",
    "update": "var(--kept)",
    "host_idle": "var(--soft)",
}
_NARROWEST = 62  # a bar that a number fits in


def mean(profile: Profile) -> str:
    """The mean step as one stacked bar; with a GPU a second one, of what it worked for."""
    rows = [("host", dict(profile.phases))]
    if profile.device_phases:
        rows.append(("GPU", dict(profile.device_phases)))
    label, line = 50, 44
    longest = max(profile.seconds, *(sum(phases.values()) for _, phases in rows))
    parts = []
    for index, (name, phases) in enumerate(rows):
        top, x = index * line, float(label)
        parts.append(f'<text class="name" x="{label - 8}" y="{top + 24}" text-anchor="end">{name}</text>')
        for phase in PHASES:
            width = (WIDTH - label) * phases[phase] / longest
            told = f"{wording.PHASE_NAMES[phase]}: {wording.ms(phases[phase])}"
            parts.append(
                f'<rect style="fill:{COLOURS[phase]}" x="{x:.1f}" y="{top + 2}" width="{width:.1f}" height="34" rx="2">'
                f"<title>{escape(told)}</title></rect>"
            )
            if width > _NARROWEST:
                parts.append(
                    f'<text class="inside" x="{x + width / 2:.1f}" y="{top + 24}" text-anchor="middle">'
                    f"{wording.ms(phases[phase])}</text>"
                )
            x += width
    return svg(len(rows) * line, "time of a step by part", parts)


def steps(steps: tuple[Step, ...]) -> str:
    """Every profiled step as a stacked column; an outlier shows, and its part."""
    label, height = 64, 150
    longest = max(step.seconds for step in steps)
    room = (WIDTH - label) / len(steps)
    width = min(60.0, room * 0.8)
    parts = []
    for share in (0.0, 0.5, 1.0):
        y = 8 + height * (1 - share)
        parts.append(f'<line class="tick" x1="{label}" y1="{y:.1f}" x2="{WIDTH}" y2="{y:.1f}"/>')
        parts.append(
            f'<text class="axis" x="{label - 8}" y="{y + 4:.1f}" text-anchor="end">{wording.ms(share * longest)}</text>'
        )
    for index, step in enumerate(steps):
        x, y = label + index * room + (room - width) / 2, 8.0 + height
        parts.append(f"<g><title>step {index + 1}: {wording.ms(step.seconds)}</title>")
        for phase in PHASES:
            tall = height * step.phases.get(phase, 0.0) / longest
            y -= tall
            parts.append(
                f'<rect style="fill:{COLOURS[phase]}" x="{x:.1f}" y="{y:.2f}" width="{width:.1f}" height="{tall:.2f}"/>'
            )
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
    label, height = 64, 130
    low = min(0, *(allocated for _, allocated in memory.timeline))
    span = max(1, memory.peak - low)

    def place(time: float, allocated: float) -> str:
        x = label + (WIDTH - label) * min(1.0, time / seconds)
        return f"{x:.1f} {8 + height * (1 - (allocated - low) / span):.1f}"

    steps = [f"L{place(time, before)}L{place(time, now)}" for (time, now), before in _pairs(memory)]
    last = memory.timeline[-1][1]
    line = "".join(steps).replace("L", "M", 1) + f"L{place(seconds, last)}"
    area = f"{line}L{place(seconds, low)}L{place(memory.timeline[0][0], low)}Z"
    parts = []
    for allocated in (low, (low + memory.peak) / 2, memory.peak):
        y = place(0, allocated).split()[1]
        parts.append(f'<line class="tick" x1="{label}" y1="{y}" x2="{WIDTH}" y2="{y}"/>')
        told = wording.bytes_(allocated)
        parts.append(f'<text class="axis" x="{label - 8}" y="{float(y) + 4:.1f}" text-anchor="end">{told}</text>')
    parts.append(f'<path d="{area}" style="fill:var(--step);opacity:.25"/>')
    parts.append(f'<path d="{line}" style="fill:none;stroke:var(--step);stroke-width:1.5"/>')
    for share in (0.0, 0.5, 1.0):
        anchor = "start" if share == 0 else "end" if share == 1 else "middle"
        parts.append(
            f'<text class="axis" x="{label + share * (WIDTH - label):.1f}" y="{height + 26}" '
            f'text-anchor="{anchor}">{wording.ms(share * seconds)}</text>'
        )
    return svg(height + 32, "memory allocated over the profiled steps", parts)


def bar(share: float) -> str:
    """A small bar for a table's cell, full at 1."""
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 90 12" style="width:90px" role="img" aria-hidden="true">'
        f'<rect class="step" x="0" y="1" width="{90 * max(0.0, min(1.0, share)):.1f}" height="10" rx="2"/></svg>'
    )


def _pairs(memory: Memory) -> list[tuple[tuple[float, int], int]]:
    """Every point with what was allocated before it."""
    amounts = [memory.timeline[0][1], *(allocated for _, allocated in memory.timeline)]
    return list(zip(memory.timeline, amounts[:-1], strict=True))
