"""Reason codes of reports: the one file of the tests that knows how a report words its rows."""

from __future__ import annotations

import re
from typing import Any

# code: what the sentence contains, as a regular expression
PATTERNS: dict[str, str] = {
    "asked-for": "asks for it",
    "budget-spent": "budget",
}


def reasons(told: Any) -> set[str]:
    """Return the codes of a row, or of its sentence."""
    text = told if isinstance(told, str) else told.why
    return {code for code, pattern in PATTERNS.items() if re.search(pattern, text)}
