"""Writes the README's checklist from the techniques' own docstrings: ``python tools/checklist.py README.md``."""

from __future__ import annotations

import sys
from pathlib import Path

from flatout.techniques import REGISTRY, Advice, Rule, Technique

BEGIN, END = "<!-- checklist: written by tools/checklist.py -->\n", "<!-- /checklist -->"


def table() -> str:
    """The checklist in Markdown: the numbered rows, then their neighbours."""
    rows = [(t.number, t.title, t.purpose, _decided_by(t), t.expected) for t in REGISTRY]
    lines = ["| # | technique | what it does | decided by | usually |", "|---|---|---|---|---|"]
    for number, *cells in sorted(rows, key=lambda row: row[0] or 1000):
        lines.append(f"| {number or '+'} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def rewritten(text: str) -> str:
    """The text with the table between its marks made anew."""
    head, rest = text.split(BEGIN)
    return f"{head}{BEGIN}{table()}{END}{rest.split(END)[1]}"


def _decided_by(technique: Technique) -> str:
    if isinstance(technique, Advice):
        return "advice"
    if isinstance(technique, Rule):
        return "rule"
    return "measured + verified" if getattr(technique, "is_verified", False) else "measured"


if __name__ == "__main__":
    file = Path(sys.argv[1])
    file.write_text(rewritten(file.read_text(encoding="utf-8")), encoding="utf-8")
