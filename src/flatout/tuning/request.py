"""Request: the arguments of ``flatout.optimize``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flatout.plan import CACHED, Plan
from flatout.training.spec import LossWeight


@dataclass(frozen=True, eq=False)
class Request:
    """Arguments of :func:`flatout.optimize`, which documents each, and ``Spec.is_recorded``."""

    model: nn.Module
    loader: Iterable[Any]
    optimizer: torch.optim.Optimizer | None
    loss_fn: Callable[[Any, Any], Tensor] | None
    compute_loss: Callable[[nn.Module, Any], Tensor] | None
    loss_weight: LossWeight | None
    scheduler: Any
    device: torch.device | str | None
    precision: str
    batch_size: str | int
    lr_rule: str
    memory_limit: int | None
    accumulate: int
    max_grad_norm: float | None
    deterministic: bool
    seed: int | None
    techniques: Mapping[str, Any] | None
    expected_steps: int | None
    budget: float | None
    plan: Plan | str | Path | None
    is_recorded: bool = False

    @property
    def given_plan(self) -> Plan | str | Path | None:
        """Plan that the user gave, which is applied to the letter; None if trials or the cache decide."""
        return None if self.plan == CACHED else self.plan

    @property
    def measures(self) -> bool:
        """True if trials may run. Only then a plan is read from the cache, or written to it."""
        return self.budget != 0 and self.given_plan is None
