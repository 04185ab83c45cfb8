"""What another number of samples per update asks of a training, and may do to it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch

from flatout.training.learning_rate import ScaledSchedule, lr_factor

WARMUP_EPOCHS = 5
WARMUP_SHARE = 0.1
"""Length of the warm-up to a larger learning rate, as Goyal et al. (2017, arXiv:1706.02677) have it; of a training that
is short, this share at most."""

GENERALISES_BELOW = 1024
"""Samples of an update from which on the report warns: in Keskar et al. (2017, arXiv:1609.04836) batches of thousands
generalise worse; Goyal et al. went to 8,192 without a loss, with the rule and the warm-up."""


ADAPTIVE = (torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax)


@dataclass(frozen=True)
class BatchSizeChange:
    """From one number of samples per update to another.

    Attributes:
        rule: of the learning rate; see ``lr_factor``.
        samples: of an update, before and now.
        updates: of an epoch, before and now.
        training: updates that all of the training takes now.
    """

    rule: str
    samples: tuple[int, int]
    updates: tuple[int, int]
    training: int

    @property
    def factor(self) -> float:
        """Of the learning rates."""
        return lr_factor(self.rule, *self.samples)

    @property
    def warmup(self) -> int:
        """Updates until they are there; none where they become smaller."""
        if self.factor <= 1:
            return 0
        return min(WARMUP_EPOCHS * self.updates[1], math.ceil(WARMUP_SHARE * self.training))

    def schedule(self, optimizer: torch.optim.Optimizer, scheduler: Any) -> ScaledSchedule:
        """The user's schedule, or none, for the new updates."""
        per_update = Fraction(*self.updates)
        return ScaledSchedule(optimizer, scheduler, factor=self.factor, warmup=self.warmup, per_update=per_update)

    def told(self, optimizer: torch.optim.Optimizer) -> list[str]:
        """What changes, for the report; the optimizer's rates are still the old ones."""
        before, after = self.samples
        told = [f"an update has {after:,} samples instead of {before:,}"]
        rates = dict.fromkeys(float(group["lr"]) for group in optimizer.param_groups)
        if self.factor == 1:
            told.append(f"the learning rate stays (lr_rule={self.rule!r})")
        else:
            changed = ", ".join(f"{rate:.3g} → {rate * self.factor:.3g}" for rate in rates)
            how = f"warmed up over {self.warmup:,} updates" if self.warmup else "at once"
            told.append(f"learning rate {changed} ({self.rule} rule), {how}")
        if self.rule == "linear" and isinstance(optimizer, ADAPTIVE):
            told.append("Adam's rule is the square root (Malladi et al., 2022): lr_rule='sqrt'")
        if after > before and after >= GENERALISES_BELOW:
            told.append(
                f"models may generalise worse with {GENERALISES_BELOW:,} samples and more (Keskar et al., 2017): "
                "compare run.evaluate"
            )
        return told
