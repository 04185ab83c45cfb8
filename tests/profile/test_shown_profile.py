"""Text, page and JSON of a profile."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from collections.abc import Callable
from functools import partial
from html import unescape
from pathlib import Path

import pytest

from flatout.core.formatting import clean, share
from flatout.profile import Profile
from flatout.profile.shown_profile import LOOKS, tables
from tests.profile.profile_sample import sync_bound
from tests.renderings.rendered import in_terminal, root_of
from tests.report.drawn import bars
from tests.report.drawn import share as share_of


def cells(profile: Profile) -> list[str]:
    parts = [part for _, _, table in tables(profile) for row in table.rows for part in row]
    return [clean(part if isinstance(part, str) else part[0]) for part in parts]


@pytest.mark.parametrize("width", [60, 80, 140])
@pytest.mark.parametrize("ascii_only", [False, True])
def test_a_terminal_shows_every_figure(width: int, ascii_only: bool) -> None:
    profile = sync_bound()
    text = in_terminal(profile, width, ascii_only)
    assert max(map(len, text.splitlines())) <= width
    assert "\x1b" not in text
    assert text.isascii() if ascii_only else "█" in text
    assert profile.verdict in " ".join(text.split())
    wide = in_terminal(profile, 300, ascii_only)
    assert len(list(tables(profile))) == 2
    assert [cell for cell in cells(profile) if cell not in wide] == []


def test_a_page_shows_every_figure(tmp_path: Path) -> None:
    profile = sync_bound()
    profile.to_html(tmp_path / "profile.html")
    root = ET.fromstring((tmp_path / "profile.html").read_text(encoding="utf-8"))
    tags = {element.tag.rpartition("}")[2] for element in root.iter()}
    assert not tags & {"script", "link", "img", "iframe", "b>"}
    said = "".join(root.itertext()).replace("\u00a0", " ")
    assert profile.verdict in said
    assert [cell for cell in cells(profile) if cell not in said] == []
    assert 'train<b>&".py:12' in said
    plain = json.loads(profile.to_json())
    assert plain["verdict"] == profile.verdict
    assert "trace" not in plain


@pytest.mark.parametrize("render", [partial(in_terminal, width=120), Profile._repr_html_])
def test_environment_advice_and_peak_are_shown_everywhere(render: Callable[[Profile], str]) -> None:
    profile = sync_bound()
    said = " ".join(render(profile).replace("\u00a0", " ").split())
    for key, value in profile.environment.items():
        assert f"{key} {value}" in said
    for sentence in profile.advice:
        assert clean(sentence)[:50] in unescape(said)
    assert "peak 2.00 KiB on the GPU" in said.replace("Peak", "peak")


def test_the_chart_is_drawn_to_scale_with_a_legend() -> None:
    profile = sync_bound()
    root = root_of(profile)
    drawn = [(share_of(rect, "x"), share_of(rect, "width")) for rect in bars(root)]
    assert [x for x, _ in drawn[1:]] == pytest.approx([x + width for x, width in drawn[:-1]], abs=0.31)
    shares = {phase: seconds / profile.seconds for phase, seconds in profile.phases.items()}
    assert [width for _, width in drawn] == pytest.approx([100 * part for part in shares.values()], abs=0.31)
    said = "".join(root.itertext())
    for phase, (name, _) in LOOKS.items():
        assert f"{name}{share(shares[phase])}" in said
