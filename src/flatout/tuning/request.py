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
    """Arguments of :func:`flatout.optimize`, which documents them, and ``Spec.is_recorded``."""

    model: nn.Module
    loader: Iterable[Any]
    optimizer: torch.optim.Optimizer | None
    loss_fn: Callable[[Any, Any], Tensor] | None = None
    compute_loss: Callable[[nn.Module, Any], Tensor] | None = None
    loss_weight: LossWeight | None = None
    scheduler: Any = None
    device: torch.device | str | None = None
    precision: str | torch.dtype = "auto"
    batch_size: str | int = "keep"
    lr_rule: str = "auto"
    memory_limit: int | None = None
    accumulate: int = 1
    max_grad_norm: float | None = None
    deterministic: bool = False
    seed: int | None = None
    techniques: Mapping[str, Any] | None = None
    expected_steps: int | None = None
    budget: float | None = None
    plan: Plan | str | Path | None = CACHED
    parallel: str = "auto"
    is_recorded: bool = False

    @property
    def modules(self) -> list[nn.Module]:
        """Model and loss modules."""
        return [m for m in (self.model, self.loss_fn, self.compute_loss) if isinstance(m, nn.Module)]

    @property
    def is_inference(self) -> bool:
        """True for a model in eval mode without an optimizer."""
        return self.optimizer is None and not self.model.training

    @property
    def given_plan(self) -> Plan | str | Path | None:
        """Plan that the user gave, which is applied exactly; None if trials or the cache decide."""
        return None if self.plan == CACHED else self.plan

    @property
    def run_step_arguments(self) -> dict[str, Any]:
        """Given arguments that only ``run.step`` uses."""
        given = {
            "scheduler": self.scheduler,
            "max_grad_norm": self.max_grad_norm,
            "accumulate": None if self.accumulate == 1 else self.accumulate,
            "loss_weight": self.loss_weight,
            "batch_size": None if self.batch_size == "keep" else self.batch_size,
            "memory_limit": self.memory_limit,
        }
        return {name: value for name, value in given.items() if value is not None}

    @property
    def measures(self) -> bool:
        """True if trials may run. Otherwise, no plan is read from the cache or written to the cache."""
        return self.budget != 0 and self.given_plan is None
