"""A profile as HTML: the body of a page of its own, or of a notebook's cell."""

from __future__ import annotations

from flatout.core import formatting
from flatout.profile import charts, sections
from flatout.profile.profile_data import ProfileData
from flatout.profile.sections import ms
from flatout.report.html import footer, table, text

_LOOKS = {
    "number": '<td class="gain">{}</td>',
    "strong": "<td><b>{}</b></td>",
    "plain": "<td>{}</td>",
    "quiet": "<td><code>{}</code></td>",
}


def fragment(profile: ProfileData) -> str:
    """The profile's parts, top to bottom, without document and style."""
    parts = [_header(profile), _advice(profile), _steps(profile), *map(_section, sections.sections(profile))]
    parts += [_memory(profile), _commands(profile), footer(profile.environment)]
    return f"<section>{''.join(parts)}</section>"


def _header(profile: ProfileData) -> str:
    rate = f" {formatting.count(profile.samples / profile.seconds)} samples per second." if profile.samples else ""
    verdict = f"<p>{text(profile.verdict)}</p>" if profile.verdict else ""
    return (
        f'<header><h1><span class="factor">{ms(profile.seconds)}</span> a step</h1>'
        f'<p class="lead">{text(formatting.capital(sections.biggest(profile)))}.{rate}</p>'
        f'<p class="quiet">{text(formatting.capital(sections.basis(profile)))}.</p>{verdict}</header>'
    )


def _advice(profile: ProfileData) -> str:
    items = "".join(f"<li>{text(sentence)}</li>" for sentence in profile.advice)
    return f'<h2>What to do, the costliest first</h2><ol class="why">{items}</ol>'


def _steps(profile: ProfileData) -> str:
    legend = " ".join(
        f'<i class="key" style="background:{look.colour}"></i>{look.name} '
        f"{formatting.share(profile.phases[phase] / profile.seconds)}"
        for phase, look in sections.LOOKS.items()
        if profile.phases[phase] > 0
    )
    device = ""
    if profile.device_busy is not None:
        device = f'<p class="quiet">The GPU worked for {formatting.share(profile.device_busy)} of the time.</p>'
    return (
        f"<h2>Where a step's time goes</h2>{charts.mean(profile)}"
        f'<p class="quiet">{legend}</p>{device}<h2>Step by step</h2>{charts.steps(profile.steps)}'
    )


def _section(section: sections.Section) -> str:
    headings = [heading for heading, _, _ in section.columns]
    looks = [_LOOKS[look] for _, look, _ in section.columns]
    cells = [[look.format(text(cell)) for look, cell in zip(looks, row, strict=True)] for row in section.rows]
    if section.bar is not None:
        headings.insert(1, "")
        for row, item in zip(cells, section.items, strict=True):
            row.insert(1, f"<td>{charts.bar(section.bar(item))}</td>")
    note = f'<p class="quiet">{text(section.note)}</p>' if section.note else ""
    return f"<h2>{section.title}</h2>{note}{table(headings, (f'<tr>{row}</tr>' for row in map(''.join, cells)))}"


def _memory(profile: ProfileData) -> str:
    if profile.memory is None:
        return ""
    total = sum(step.seconds for step in profile.steps)
    note = text(formatting.capital(sections.peak(profile)))
    return f'<h2>Memory</h2><p class="quiet">{note}.</p>{charts.memory(profile.memory, total)}'


def _commands(profile: ProfileData) -> str:
    if not profile.commands:
        return ""
    listed = "".join(f'<p class="why"><code>{text(line)}</code></p>' for line in profile.commands)
    return (
        "<h2>Deeper, with NVIDIA's tools</h2>"
        '<p class="quiet">A timeline of the whole process (Nsight Systems) and one kernel in depth (Nsight Compute). '
        f"nvprof is gone: it knows no GPU made since 2020.</p>{listed}"
    )
