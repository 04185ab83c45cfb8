"""HTML form of a profile."""

from __future__ import annotations

from collections.abc import Mapping

from markupsafe import Markup

from flatout.profile import sections
from flatout.profile.profile_data import PHASES, Memory, Phase, ProfileData, Step
from flatout.report import charts, html
from flatout.report.charts import Segment


def fragment(profile: ProfileData) -> Markup:
    """Return the HTML of the profile, without the document around it and without style."""
    total = profile.profiled_steps * (profile.profiled_seconds or 0.0)
    return html.render(
        "profile.html.j2",
        profile=profile,
        sections=sections,
        mean_chart=mean_chart(profile),
        steps_chart=steps_chart(profile.steps),
        memory_chart=memory_chart(profile.memory, total) if profile.memory else "",
        share_bar=charts.share_bar,
    )


def mean_chart(profile: ProfileData) -> Markup:
    """Draw the mean step as one stacked bar, and below it the work of the GPU, if there is one."""
    bars = {"time": profile.phases} | ({"GPU": profile.device_phases} if profile.device_phases else {})
    return charts.stacked("time of a step by part", {name: _segments(phases) for name, phases in bars.items()})


def steps_chart(steps: tuple[Step, ...]) -> Markup:
    """Draw each timed step as a column, which shows an outlier and its part."""
    columns = {
        f"step {number}: {sections.ms(step.seconds)}": _segments(step.phases) for number, step in enumerate(steps, 1)
    }
    return charts.columns("time of every timed step by part", columns, 1e3 * max(step.seconds for step in steps))


def memory_chart(memory: Memory, seconds: float) -> Markup:
    """Draw the allocated memory over the profiled steps, whose total time is ``seconds``."""
    return charts.area("memory allocated over the profiled steps", memory.timeline, seconds, memory.peak)


def _segments(phases: Mapping[Phase, float]) -> list[Segment]:
    return [Segment(sections.LOOKS[phase].name, 1e3 * phases[phase], sections.LOOKS[phase].color) for phase in PHASES]
