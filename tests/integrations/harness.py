"""Options, samples and comparisons with plain training, shared by the tests of all adapters."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_post_hooks
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from flatout.autotune.script_report import ScriptReport
from flatout.optim.native_step import NativeStep
from tests.clock import Clock
from tests.jobs import NO_TECHNIQUES, only

UPDATES = 40

QUICK: dict[str, Any] = {"techniques": only("fused_optimizer", "precision")}
"""Options with short trials."""

FUSED: dict[str, Any] = {"techniques": NO_TECHNIQUES | {"fused_optimizer": True}}
"""Options for the native step alone."""

IN_MEMORY: dict[str, Any] = {"techniques": NO_TECHNIQUES | {"in_memory": True}}
"""Options for the in-memory loader alone."""


@dataclass
class Trained:
    """Result of a training."""

    model: nn.Module
    losses: list[float]
    drawn: list[float] = field(default_factory=lambda: torch.rand(3).tolist())
    """Random numbers drawn after the training."""

    def bits(self) -> list[Any]:
        """Return all values that must be equal."""
        return [self.losses, *(p.tolist() for p in self.model.state_dict().values()), self.drawn]


class UserError(Exception):
    """Error of the user's own code."""


def samples() -> TensorDataset:
    """Return samples for 40 batches of two."""
    return TensorDataset(torch.linspace(-1, 1, 80 * 8).view(80, 8), torch.arange(80) % 3)


def network() -> nn.Sequential:
    """Return a small network with dropout."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.ReLU(), nn.Linear(16, 3))


def slow_without_native_step(clock: Clock, module: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Advance the clock at each forward, by half the time if all optimizers have a native step."""
    watched = list(optimizers)

    def advance(*_: object) -> None:
        clock.advance(0.005 if all(isinstance(optimizer, NativeStep) for optimizer in watched) else 0.01)

    module.register_forward_hook(advance)


def statuses(report: ScriptReport | None) -> dict[str, str]:
    """Return the status of each technique for the one module that was tuned."""
    assert report is not None
    (module,) = report.modules
    return {row.technique: row.status for row in module.report.rows}


def was_tried(report: ScriptReport | None) -> bool:
    """Return True if a trial of a technique has run."""
    return report is not None and any(row.trials for each in report.modules for row in each.report.rows)


def replaced_functions() -> tuple[Any, ...]:
    """Return the functions of torch that tuning replaces, and the number of hooks of all optimizers."""
    functions = nn.Module.__call__, torch.autograd.backward, DataLoader.__iter__, _BaseDataLoaderIter.__next__
    return *functions, len(_global_optimizer_post_hooks)


def assert_close(found: list[float] | Tensor, expected: list[float] | Tensor) -> None:
    torch.testing.assert_close(torch.as_tensor(found), torch.as_tensor(expected), rtol=1e-3, atol=1e-5)
