"""Techniques that a report leaves to try, and the arguments that try them."""

from __future__ import annotations

from collections.abc import Iterable

from flatout.core import formatting
from flatout.report.model import Row

_ARGUMENTS = {
    "batch_size": "batch_size='auto'",
    "precision": "precision='bf16'",
    "workers": "techniques={'workers': 2}",
}


def argument_of(technique: str) -> str:
    """Return the argument of ``flatout.optimize`` that tries a technique."""
    return _ARGUMENTS.get(technique, f"techniques={{{technique!r}: True}}")


def untried(rows: Iterable[Row], techniques: Iterable[str]) -> list[str]:
    """Return the titles of untried techniques, each with the argument that tries the technique.

    Techniques are omitted if they were kept, rejected or forbidden, if they do not apply, or if they have no row.
    """
    by_name = {row.technique: row for row in rows if row.status == "not tried" and not row.left_out}
    return [f"{formatting.clean(by_name[name].title)} ({argument_of(name)})" for name in techniques if name in by_name]
