"""Limit of the time that tuning may take from a script of unknown length."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from flatout.arguments import BUDGET_VARIABLE
from flatout.plan import CACHED, Plan
from flatout.tuning.ranks import world_size
from flatout.tuning.request import choices_of

FIRST_SECONDS = 1.0
"""Seconds that tuning may take from the start."""

SHARE = 0.1
"""Additional tuning time, relative to the time that the script has trained so far."""


class Allowance:
    """Time for tuning, which is ``FIRST_SECONDS`` and a share of the time that the script has trained so far.

    A trial that has begun may exceed the allowance. The script then trains longer before the next trial.

    Args:
        budget: limit in seconds of all tuning.

    Attributes:
        budget: the argument.
        spent: seconds of tuning so far.
    """

    def __init__(self, budget: float = math.inf) -> None:
        self.budget = budget
        self._begun = time.perf_counter()
        self.spent = 0.0

    @property
    def trained(self) -> float:
        """Seconds since the beginning, without tuning."""
        return time.perf_counter() - self._begun - self.spent

    @property
    def left(self) -> float:
        """Seconds that tuning may take now, or a negative number if tuning has exceeded the allowance."""
        return min(FIRST_SECONDS + SHARE * self.trained, self.budget) - self.spent

    def due(self, seconds: float) -> float:
        """Return the ``time.perf_counter()`` at which ``left`` reaches ``seconds`` without tuning until then.

        The result is infinity if ``left`` never does.
        """
        if seconds == math.inf or self.spent + seconds > self.budget:
            return math.inf
        return self._begun + self.spent + (seconds + self.spent - FIRST_SECONDS) / SHARE


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
