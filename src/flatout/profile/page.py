"""A profile as HTML: a self-contained page, or a fragment for a notebook's cell."""

from __future__ import annotations

import re
from collections.abc import Iterable
from html import escape

from flatout.profile import charts, wording
from flatout.profile.summary import PHASES, Profile
from flatout.report import html, words
from flatout.report.style import STYLE

_NUMBER = re.compile(r"[\d.,]+( ms| %)?")


def document(profile: Profile) -> str:
    """A whole page; it is well-formed XML too."""
    return html.page("flatout profile", fragment(profile))


def embedded(profile: Profile) -> str:
    """A fragment with its style, for a page that is not ours (Jupyter)."""
    return f'<div class="flatout"><style>{STYLE}</style>{fragment(profile)}</div>'


def fragment(profile: Profile) -> str:
    """The profile's parts, top to bottom, without document and style."""
    parts = [_header(profile), _advice(profile), _steps(profile), _gaps(profile), _operators(profile)]
    parts += [_syncs(profile), _memory(profile), _commands(profile), _footer(profile)]
    return f"<section>{''.join(parts)}</section>"


def _text(value: str) -> str:
    return escape(words.clean(value))


def _header(profile: Profile) -> str:
    return (
        f'<header><h1><span class="factor">{wording.ms(profile.seconds)}</span> a step</h1>'
        f'<p class="lead">{_text(_capital(wording.biggest(profile)))}.'
        f"{_rate(profile)}</p>"
        f'<p class="quiet">{_text(_capital(wording.basis(profile)))}.</p></header>'
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


def _operators(profile: Profile) -> str:
    if not profile.operators:
        return ""
    on_gpu = bool(profile.device_phases)
    longest = max(operator.share for operator in profile.operators) or 1.0
    rows = [
        [
            _text(wording.share(operator.share, 1)),
            charts.bar(operator.share / longest),
            f"<b>{_text(operator.name)}</b>",
            wording.times(operator.calls),
            wording.ms(operator.host_seconds),
            *([wording.ms(operator.device_seconds)] if on_gpu else []),
            _text(operator.where),
        ]
        for operator in profile.operators
    ]
    own = "kernels of its own" if on_gpu else "time of its own, without what it calls"
    table = _table(["", "", "operator", "calls", "host", *(["GPU"] if on_gpu else []), "mostly for"], rows)
    return f'<h2>Costliest operators</h2><p class="quiet">Share of a step: {own}.</p>{table}'


def _gaps(profile: Profile) -> str:
    if not profile.gaps:
        return ""
    rows = [
        [
            wording.share(gap.seconds, profile.seconds),
            _text(wording.CAUSES[gap.cause]),
            wording.ms(gap.seconds),
            wording.times(gap.count),
            wording.ms(gap.longest),
            wording.PHASE_NAMES[gap.phase],
            f"<b>{_text(gap.where)}</b>",
        ]
        for gap in profile.gaps
    ]
    headings = ["", "because", "per step", "times", "longest", "in", "at"]
    return f"<h2>Why the GPU idled</h2>{_table(headings, rows)}"


def _syncs(profile: Profile) -> str:
    if not profile.syncs:
        return ""
    rows = [
        [
            wording.times(sync.per_step),
            _text(sync.what),
            f"<b>{_text(sync.where or 'not in your code')}</b>",
            wording.PHASE_NAMES[sync.phase],
            f"<code>{_text(sync.code)}</code>",
        ]
        for sync in profile.syncs
    ]
    table = _table(["per step", "call", "at", "in", "code"], rows)
    return f'<h2>Sync points</h2><p class="quiet">{wording.sync_note(profile)}</p>{table}'


def _memory(profile: Profile) -> str:
    if profile.memory is None:
        return ""
    note = _capital(wording.memory_note(profile))
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


def _table(headings: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = "".join(f"<th>{heading}</th>" for heading in headings)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cell(content: str) -> str:
    number = _NUMBER.fullmatch(content) is not None
    return f'<td class="gain">{content}</td>' if number else f"<td>{content}</td>"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
