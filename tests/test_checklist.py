"""The README tells the checklist as the techniques' docstrings do."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from flatout.techniques import REGISTRY, Advice

ROOT = Path(__file__).parents[1]


def test_the_readme_has_the_checklist() -> None:
    spec = importlib.util.spec_from_file_location("checklist", ROOT / "tools" / "checklist.py")
    checklist = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(checklist)
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert checklist.rewritten(text) == text, "python tools/checklist.py README.md"
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
