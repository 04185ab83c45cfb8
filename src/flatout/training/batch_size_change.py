"""Effects of a new number of samples per update on learning rates and warm-up, and lines for the report."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch

from flatout.training.learning_rate import ScaledSchedule, lr_factor, rule_for

WARMUP_EPOCHS = 5
WARMUP_SHARE = 0.1
"""Length of the warm-up to a larger learning rate (Goyal et al., 2017, arXiv:1706.02677).

In a short training the warm-up takes at most ``WARMUP_SHARE`` of all updates.
"""

GENERALISES_BELOW = 1024
"""Samples per update at which the report starts to warn.

In Keskar et al. (2017, arXiv:1609.04836), models that are trained with batches of thousands generalize worse. Goyal et
al. trained with 8,192 samples without a loss of accuracy, with the linear rule and the warm-up.
"""


@dataclass(frozen=True)
class BatchSizeChange:
    """Change of the number of samples per update.

    Attributes:
        rule: rule of the learning rates, one of ``LR_RULES``.
        samples: samples per update, before and after.
        updates: updates per epoch, before and after.
        training: updates of the whole training after the change.
    """

    rule: str
    samples: tuple[int, int]
    updates: tuple[int, int]
    training: int

    @property
    def factor(self) -> float:
        """Factor of the learning rates."""
        return lr_factor(self.rule, *self.samples)

    @property
    def warmup(self) -> int:
        """Number of updates of the warm-up, or 0 if learning rates do not grow."""
        if self.factor <= 1:
            return 0
        return min(WARMUP_EPOCHS * self.updates[1], math.ceil(WARMUP_SHARE * self.training))

    def schedule(self, optimizer: torch.optim.Optimizer, scheduler: Any) -> ScaledSchedule:
        """Return the schedule for the new updates.

        Args:
            optimizer: the optimizer whose learning rates change.
            scheduler: the user's scheduler, or None.
        """
        per_update = Fraction(*self.updates)
        return ScaledSchedule(optimizer, scheduler, factor=self.factor, warmup=self.warmup, per_update=per_update)

    def told(self, optimizer: torch.optim.Optimizer) -> list[str]:
        """Return lines for the report, one per change. Call this before the optimizer's learning rates change."""
        before, after = self.samples
        told = [f"an update has {after:,} samples instead of {before:,}"]
        rates = dict.fromkeys(float(group["lr"]) for group in optimizer.param_groups)
        if self.factor == 1:
            told.append(f"the learning rate stays (lr_rule={self.rule!r})")
        else:
            changed = ", ".join(f"{rate:.3g} → {rate * self.factor:.3g}" for rate in rates)
            how = f"warmed up over {self.warmup:,} updates" if self.warmup else "at once"
            told.append(f"learning rate {changed} ({self.rule} rule), {how}")
        if self.rule == "linear" and rule_for(optimizer) == "sqrt":
            told.append(f"rates of {type(optimizer).__name__} scale with the square root: lr_rule='sqrt'")
        if after > before and after >= GENERALISES_BELOW:
            told.append(
                f"models may generalise worse with {GENERALISES_BELOW:,} samples and more (Keskar et al., 2017): "
                "compare run.evaluate"
            )
        return told
