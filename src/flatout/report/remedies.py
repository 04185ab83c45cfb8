"""Techniques that a report leaves to try, and the arguments that try them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from flatout.core import formatting
from flatout.report.model import Row

ARGUMENTS: Mapping[str, str] = {
    "batch_size": "batch_size='auto'",
    "channels_last": "techniques={'channels_last': True}",
    "compile": "techniques={'compile': True}",
    "cuda_graph": "techniques={'cuda_graph': True}",
    "fused_optimizer": "techniques={'fused_optimizer': True}",
    "in_memory": "techniques={'in_memory': True}",
    "precision": "precision='bf16'",
    "tf32": "techniques={'tf32': True}",
    "workers": "techniques={'workers': 2}",
}
"""Argument of ``flatout.optimize`` that tries a technique, by the technique's name."""


def untried(rows: Iterable[Row], techniques: Iterable[str]) -> list[str]:
    """Return the titles of untried techniques, each with the argument that tries the technique.

    Techniques are omitted if they were kept, rejected or forbidden, if they do not apply, or if they have no row.
    """
    by_name = {row.technique: row for row in rows if row.status == "not tried" and not row.left_out}
    return [f"{formatting.clean(by_name[name].title)} ({ARGUMENTS[name]})" for name in techniques if name in by_name]
