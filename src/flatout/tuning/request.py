"""Request: the arguments of ``flatout.optimize``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flatout.plan import Plan
from flatout.training.spec import LossWeight


@dataclass(frozen=True, eq=False)
class Request:
    """Arguments of :func:`flatout.optimize`, which documents each."""

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
