"""A profile as HTML: a self-contained page, or a fragment for a notebook's cell."""

from __future__ import annotations

from html import escape

from flatout.profile import charts, wording
from flatout.profile.summary import PHASES, Profile
from flatout.report import html, words
from flatout.report.style import STYLE


def document(profile: Profile) -> str:
    """A whole page; it is well-formed XML too."""
    return html.page("flatout profile", fragment(profile))


def embedded(profile: Profile) -> str:
    """A fragment with its style, for a page that is not ours (Jupyter)."""
    return f'<div class="flatout"><style>{STYLE}</style>{fragment(profile)}</div>'


def fragment(profile: Profile) -> str:
    """The profile's parts, top to bottom, without document and style."""
    parts = [_header(profile), _advice(profile), _steps(profile), *map(_section, wording.sections(profile))]
    parts += [_memory(profile), _commands(profile), _footer(profile)]
    return f"<section>{''.join(parts)}</section>"


def _text(value: str) -> str:
    return escape(words.clean(value))


def _header(profile: Profile) -> str:
    return (
        f'<header><h1><span class="factor">{wording.ms(profile.seconds)}</span> a step</h1>'
        f'<p class="lead">{_text(wording.capital(wording.biggest(profile)))}.'
        f"{_rate(profile)}</p>"
        f'<p class="quiet">{_text(wording.capital(wording.basis(profile)))}.</p>'
        f"{f'<p>{_text(profile.verdict)}</p>' if profile.verdict else ''}</header>"
    )


def _rate(profile: Profile) -> str:
    return f" {words.count(profile.samples / profile.seconds)} samples per second." if profile.samples else ""


def _advice(profile: Profile) -> str:
    items = "".join(f"<li>{_text(sentence)}</li>" for sentence in profile.advice)
    return f'<h2>What to do, the costliest first</h2><ol class="why">{items}</ol>'


def _steps(profile: Profile) -> str:
    legend = " ".join(
        f'<i class="key" style="background:{charts.COLOURS[phase]}"></i>{wording.PHASE_NAMES[phase]} '
        f"{wording.share(profile.phases[phase], profile.seconds)}"
        for phase in PHASES
        if profile.phases[phase] > 0
    )
    device = ""
    if profile.device_busy is not None:
        device = f'<p class="quiet">The GPU worked for {wording.share(profile.device_busy, 1)} of the time.</p>'
    return (
        f"<h2>Where a step's time goes</h2>{charts.mean(profile)}"
        f'<p class="quiet">{legend}</p>{device}<h2>Step by step</h2>{charts.steps(profile.steps)}'
    )


def _section(section: wording.Section) -> str:
    columns = [(column.heading, [_cell(column.look, cell) for cell in column.cells]) for column in section.columns]
    if section.bars:
        columns.insert(1, ("", [f"<td>{charts.bar(share)}</td>" for share in section.bars]))
    head = "".join(f"<th>{heading}</th>" for heading, _ in columns)
    body = "".join(f"<tr>{''.join(row)}</tr>" for row in zip(*(cells for _, cells in columns), strict=True))
    note = f'<p class="quiet">{_text(section.note)}</p>' if section.note else ""
    return f"<h2>{section.title}</h2>{note}<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cell(look: wording.Look, text: str) -> str:
    opened, closed = {
        "number": ('<td class="gain">', "</td>"),
        "strong": ("<td><b>", "</b></td>"),
        "plain": ("<td>", "</td>"),
        "quiet": ("<td><code>", "</code></td>"),
    }[look]
    return f"{opened}{_text(text)}{closed}"


def _memory(profile: Profile) -> str:
    if profile.memory is None:
        return ""
    note = wording.capital(wording.memory_note(profile))
    total = sum(step.seconds for step in profile.steps)
    return f'<h2>Memory</h2><p class="quiet">{_text(note)}.</p>{charts.memory(profile.memory, total)}'


def _commands(profile: Profile) -> str:
    if not profile.commands:
        return ""
    listed = "".join(f'<p class="why"><code>{_text(line)}</code></p>' for line in profile.commands)
    return (
        "<h2>Deeper, with NVIDIA's tools</h2>"
        '<p class="quiet">A timeline of the whole process (Nsight Systems) and one kernel in depth (Nsight Compute). '
        f"nvprof is gone: it knows no GPU made since 2020.</p>{listed}"
    )


def _footer(profile: Profile) -> str:
    facts = " · ".join(f"{_text(key)} {_text(value)}" for key, value in profile.environment.items())
    return f'<footer class="quiet">{facts}</footer>'
