"""Options of ``flatout run`` and ``flatout.auto``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from flatout.arguments import BUDGET_VARIABLE
from flatout.plan import CACHED, Plan
from flatout.tuning.choices import choices_of
from flatout.tuning.ranks import world_size


@dataclass(frozen=True)
class Options:
    """Arguments of ``flatout.optimize`` that also apply to a script, and ``is_dry``.

    Attributes:
        techniques: as in ``flatout.optimize``.
        precision: as in ``flatout.optimize``.
        deterministic: as in ``flatout.optimize``, but without setting torch's own flags.
        plan: as in ``flatout.optimize``.
        is_dry: True to measure without keeping any technique.
        budget: limit in seconds of all tuning, or None for the share of :class:`Allowance` alone.

    Raises:
        TypeError: ``techniques`` is not a mapping.
        ValueError: a technique or a precision is unknown, or two choices contradict each other.
    """

    techniques: Mapping[str, Any] = field(default_factory=dict)
    precision: str | torch.dtype = "auto"
    deterministic: bool = False
    plan: Plan | str | Path | None = CACHED
    is_dry: bool = False
    budget: float | None = None

    def __post_init__(self) -> None:
        choices_of(self.techniques, self.precision)

    @property
    def why_nothing(self) -> str:
        """Reason why nothing is tuned in this process. Empty if tuning may begin."""
        if self.budget == 0:
            return f"nothing is tuned: {BUDGET_VARIABLE}=0 allows no trial"
        if world_size() > 1:
            return "nothing is tuned: several ranks train together. Call flatout.optimize() in the script"
        return ""
