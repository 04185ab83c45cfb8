"""Checklist in the page of techniques, which must equal the docstrings of the techniques."""

from __future__ import annotations

from pathlib import Path

from flatout.techniques import REGISTRY, Advice
from tests.docs.pages import tool

ROOT = Path(__file__).parents[1]


def test_the_page_has_the_checklist() -> None:
    checklist = tool("checklist")
    text = (ROOT / "docs" / "techniques" / "index.md").read_text(encoding="utf-8")
    assert checklist.rewritten(text) == text, "python tools/checklist.py docs/techniques/index.md"
    checklist_of_text = text.split(checklist.BEGIN)[1].split(checklist.END)[0]
    rows = [line for line in checklist_of_text.splitlines() if line.startswith("| ")]
    for title in [technique.title for technique in REGISTRY]:
        assert sum(f"| {title} |" in row for row in rows) == 1, title


def test_every_technique_says_what_it_does_and_when_it_helps() -> None:
    for technique in REGISTRY:
        assert "When it helps" in technique.documentation, technique.name


def test_every_technique_has_the_members_of_a_row() -> None:
    names = [technique.name for technique in REGISTRY]
    assert len(set(names)) == len(names)
    for technique in REGISTRY:
        assert technique.title, technique.name
        assert technique.rationale or isinstance(technique, Advice), technique.name
        assert technique.purpose, technique.name
