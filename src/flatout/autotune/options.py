"""Options of ``flatout run`` and ``flatout.auto``."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flatout.plan import CACHED, Plan
from flatout.techniques import REGISTRY, Advice, Measured, Rule


@dataclass(frozen=True)
class Options:
    """What may be tuned, and how.

    Attributes:
        techniques: as in ``flatout.optimize``.
        precision: as in ``flatout.optimize``.
        deterministic: choose only techniques that change no bit. Torch's own flags stay the script's.
        plan: as in ``flatout.optimize``.
        is_dry: tune, but train as first written.
    """

    techniques: Mapping[str, Any] = field(default_factory=dict)
    precision: str = "auto"
    deterministic: bool = False
    plan: Plan | str | Path | None = CACHED
    is_dry: bool = False


def without(names: Collection[str]) -> dict[str, Any]:
    """Return ``techniques`` that forbid these techniques.

    Raises:
        ValueError: there is no such technique, or it cannot be forbidden.
    """
    _check(names)
    return dict.fromkeys(names, False)


def only(names: Collection[str]) -> dict[str, Any]:
    """Return ``techniques`` that forbid all techniques but these.

    Raises:
        ValueError: there is no such technique, or it cannot be forbidden.
    """
    _check(names)
    return dict.fromkeys([name for name in FORBIDDABLE if name not in names], False)


FORBIDDABLE = tuple(
    technique.name
    for technique in REGISTRY
    if isinstance(technique, (Measured, Advice)) or (isinstance(technique, Rule) and technique.is_forbiddable)
)
"""Names that ``--only`` and ``--without`` accept."""


def _check(names: Collection[str]) -> None:
    unknown = [name for name in names if name not in FORBIDDABLE]
    if unknown:
        raise ValueError(f"there is no technique {unknown[0]!r} to choose. Choose from {', '.join(FORBIDDABLE)}")
