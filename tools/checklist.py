"""Generator of the checklist from docstrings of techniques: ``python tools/checklist.py docs/techniques/index.md``."""

from __future__ import annotations

import sys
from pathlib import Path

from flatout.techniques import REGISTRY, Advice, Rule, Technique

BEGIN, END = "<!-- checklist: written by tools/checklist.py -->\n", "<!-- /checklist -->"


def table(link: bool = False) -> str:
    """Return the checklist in Markdown: the numbered rows, and then the additional techniques.

    Args:
        link: True if each title links to the page of the technique, which exists only in the built site.
    """
    lines = ["| # | technique | what it does | decided by | usually |", "|---|---|---|---|---|"]
    for t in sorted(REGISTRY, key=lambda technique: technique.number or 1000):
        title = f"[{t.title}]({t.name}.md)" if link else t.title
        lines.append(f"| {t.number or '+'} | {title} | {t.purpose} | {decided_by(t)} | {t.expected} |")
    return "\n".join(lines) + "\n"


def rewritten(text: str, link: bool = False) -> str:
    """Return the text with a new table between its marks."""
    head, rest = text.split(BEGIN)
    return f"{head}{BEGIN}{table(link)}{END}{rest.split(END)[1]}"


def decided_by(technique: Technique) -> str:
    """Return how flatout decides on a technique, in a word or two."""
    if isinstance(technique, Advice):
        return "advice"
    if isinstance(technique, Rule):
        return "rule"
    if getattr(technique, "on_request", ""):
        return "on request"
    return "measured + verified" if getattr(technique, "is_verified", False) else "measured"


if __name__ == "__main__":
    file = Path(sys.argv[1])
    file.write_text(rewritten(file.read_text(encoding="utf-8")), encoding="utf-8")
