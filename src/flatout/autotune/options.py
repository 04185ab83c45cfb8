"""Options of ``flatout run`` and ``flatout.auto``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from flatout.plan import CACHED, Plan
from flatout.tuning.choices import choices_of


@dataclass(frozen=True)
class Options:
    """Arguments of ``flatout.optimize`` that also apply to a script, and ``is_dry``.

    Attributes:
        techniques: as in ``flatout.optimize``.
        precision: as in ``flatout.optimize``.
        deterministic: as in ``flatout.optimize``, but without setting torch's own flags.
        plan: as in ``flatout.optimize``.
        is_dry: True to measure without keeping any technique.

    Raises:
        TypeError: ``techniques`` is not a mapping.
        ValueError: a technique or a precision is unknown, or two choices contradict each other.
    """

    techniques: Mapping[str, Any] = field(default_factory=dict)
    precision: str | torch.dtype = "auto"
    deterministic: bool = False
    plan: Plan | str | Path | None = CACHED
    is_dry: bool = False

    def __post_init__(self) -> None:
        choices_of(self.techniques, self.precision)
